"""The connections that callers hand to a fence: one recipe for each kind, and a colour-blind way to use it."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.servers.mariadb import MariaDB
from tests.servers.postgres import Postgres


class Where(NamedTuple):
    """Where the databases are."""

    postgres: Postgres | None
    mariadb: MariaDB | None
    folder: Path


class Caller:
    """Somebody with a connection of some kind, who awaits what has to be awaited."""

    def __init__(self, handed: Any, runner: asyncio.Runner, session: Any = None) -> None:
        self.handed = handed
        self._session = session if session is not None else handed
        self._runner = runner

    def do(self, outcome: Any) -> Any:
        """Return an outcome, awaited if it has to be."""
        if inspect.isawaitable(outcome):
            return self._runner.run(_await(outcome))
        return outcome

    def commit(self) -> None:
        self.do(self._session.commit())

    def rollback(self) -> None:
        self.do(self._session.rollback())


async def _await(outcome: Any) -> Any:
    return await outcome


Recipe = Callable[[Where, asyncio.Runner, bool], Iterator[Caller]]
RECIPES: dict[str, Callable[[Where, asyncio.Runner, bool], Any]] = {}


def recipe(make: Recipe) -> Recipe:
    RECIPES[make.__name__] = contextmanager(make)
    return make


@contextmanager
def caller(kind: str, where: Where, *, autocommit: bool = False) -> Iterator[Caller]:
    """Give a caller with a connection of this kind."""
    with asyncio.Runner() as runner, RECIPES[kind](where, runner, autocommit) as one:
        yield one


def mysql_options(where: Where) -> dict[str, Any]:
    assert where.mariadb is not None
    # Without TLS, which the server has not: PyMySQL would read the machine's certificates each time.
    place = {"host": where.mariadb.host, "port": where.mariadb.port, "database": "fencelock"}
    return {**place, "user": "root", "ssl_disabled": True}


def postgres_url(where: Where) -> str:
    assert where.postgres is not None
    return where.postgres.url


@recipe
def sqlite(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    connection = sqlite3.connect(where.folder / "app.db", isolation_level=None if autocommit else "IMMEDIATE")
    yield Caller(connection, runner)
    connection.close()


@recipe
def sqlite_cursor(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    connection = sqlite3.connect(where.folder / "app.db", isolation_level=None if autocommit else "DEFERRED")
    yield Caller(connection.cursor(), runner, connection)
    connection.close()


@recipe
def aiosqlite(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import aiosqlite

    connection = aiosqlite.connect(where.folder / "app.db", isolation_level=None if autocommit else "DEFERRED")
    connection = runner.run(_await(connection))
    connection.row_factory = aiosqlite.Row
    yield Caller(connection, runner)
    runner.run(connection.close())


@recipe
def aiosqlite_cursor(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import aiosqlite

    opened = aiosqlite.connect(where.folder / "app.db", isolation_level=None if autocommit else "IMMEDIATE")
    connection = runner.run(_await(opened))
    yield Caller(runner.run(_await(connection.cursor())), runner, connection)
    runner.run(connection.close())


@recipe
def psycopg(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(postgres_url(where), autocommit=autocommit, row_factory=dict_row) as connection:
        yield Caller(connection, runner)


@recipe
def psycopg_cursor(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import psycopg

    with psycopg.connect(postgres_url(where), autocommit=autocommit) as connection:
        yield Caller(connection.cursor(), runner, connection)


@recipe
def psycopg_async(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import psycopg

    connection = runner.run(psycopg.AsyncConnection.connect(postgres_url(where), autocommit=autocommit))
    yield Caller(connection, runner)
    runner.run(connection.close())


@recipe
def psycopg_async_cursor(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import psycopg

    connection = runner.run(psycopg.AsyncConnection.connect(postgres_url(where), autocommit=autocommit))
    yield Caller(connection.cursor(), runner, connection)
    runner.run(connection.close())


@recipe
def psycopg2(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import psycopg2
    from psycopg2.extras import RealDictCursor

    connection = psycopg2.connect(postgres_url(where), cursor_factory=RealDictCursor)
    connection.autocommit = autocommit
    yield Caller(connection, runner)
    connection.close()


@recipe
def pymysql(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import pymysql

    connection = pymysql.connect(autocommit=autocommit, **mysql_options(where))
    yield Caller(connection, runner)
    connection.close()


@recipe
def pymysql_found_rows(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    import pymysql
    from pymysql.constants import CLIENT

    connection = pymysql.connect(
        autocommit=autocommit,
        client_flag=CLIENT.FOUND_ROWS,
        cursorclass=pymysql.cursors.DictCursor,
        charset="latin1",
        **mysql_options(where),
    )
    yield Caller(connection.cursor(), runner, connection)
    connection.close()


def _alchemy(url: str, runner: asyncio.Runner, autocommit: bool, kind: str) -> Iterator[Caller]:
    import sqlalchemy
    from sqlalchemy.orm import Session

    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = sqlalchemy.create_engine(url, **level)
    with engine.connect() if kind == "connection" else Session(engine) as session:
        yield Caller(session, runner)
    engine.dispose()


def _alchemy_async(url: str, runner: asyncio.Runner, autocommit: bool, kind: str) -> Iterator[Caller]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = create_async_engine(url, **level)
    session: Any = engine.connect() if kind == "connection" else AsyncSession(engine)
    runner.run(session.__aenter__())
    yield Caller(session, runner)
    runner.run(session.__aexit__(None, None, None))
    runner.run(engine.dispose())


@recipe
def alchemy_sqlite(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    yield from _alchemy(f"sqlite:///{where.folder}/app.db", runner, autocommit, "connection")


@recipe
def alchemy_postgres(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg://")
    yield from _alchemy(url, runner, autocommit, "connection")


@recipe
def alchemy_session_psycopg2(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg2://")
    yield from _alchemy(url, runner, autocommit, "session")


@recipe
def alchemy_session_mariadb(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    assert where.mariadb is not None
    url = where.mariadb.url.replace("mysql://", "mariadb+pymysql://")
    yield from _alchemy(url, runner, autocommit, "session")


@recipe
def alchemy_async_postgres(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg://")
    yield from _alchemy_async(url, runner, autocommit, "session")


@recipe
def alchemy_asyncpg(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    url = postgres_url(where).replace("postgresql://", "postgresql+asyncpg://")
    yield from _alchemy_async(url, runner, autocommit, "connection")


@recipe
def alchemy_own_begin(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    """SQLite as SQLAlchemy's manual has it for those who want BEGIN to be said at the beginning."""
    import sqlalchemy

    connect_args: dict[str, Any] = {"isolation_level": None}
    engine = sqlalchemy.create_engine(f"sqlite:///{where.folder}/app.db", connect_args=connect_args)
    if not autocommit:
        sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.connect() as connection:
        yield Caller(connection, runner)
    engine.dispose()


@recipe
def alchemy_async_sqlite(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    yield from _alchemy_async(f"sqlite+aiosqlite:///{where.folder}/app.db", runner, autocommit, "connection")


class DjangoCaller(Caller):
    """Django's connection; its transactions are `atomic` blocks."""

    def __init__(self, connection: Any, runner: asyncio.Runner, autocommit: bool) -> None:
        super().__init__(connection, runner)
        self._autocommit = autocommit
        self._begin()

    def _begin(self) -> None:
        self.handed.set_autocommit(self._autocommit)


def _django(settings: dict[str, Any], runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    from django.db import ConnectionHandler

    from tests import django_app

    django_app.ready()
    connection = ConnectionHandler({"default": settings})["default"]
    yield DjangoCaller(connection, runner, autocommit)
    connection.close()


@recipe
def django_sqlite(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    yield from _django(
        {"ENGINE": "django.db.backends.sqlite3", "NAME": str(where.folder / "app.db")}, runner, autocommit
    )


@recipe
def django_postgres(where: Where, runner: asyncio.Runner, autocommit: bool) -> Iterator[Caller]:
    assert where.postgres is not None
    options = {"HOST": where.postgres.host, "PORT": where.postgres.port, "USER": "postgres", "NAME": "postgres"}
    yield from _django({"ENGINE": "django.db.backends.postgresql", **options}, runner, autocommit)
