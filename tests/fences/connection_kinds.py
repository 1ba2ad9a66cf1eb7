"""Every kind of connection that a fence accepts, and one way to use those that block and those of asyncio."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fencelock.aio.fences import sql as aio_sql
from fencelock.fences import sql
from fencelock.sqlio.drivers import find_adapter
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import Postgres


class Databases(NamedTuple):
    """The database servers, and a folder for SQLite."""

    postgres: Postgres | None
    mariadb: MariaDB | None
    folder: Path


class OpenConnection:
    """An open connection with the fence of its API; `do` awaits what must be awaited."""

    def __init__(self, given: Any, runner: asyncio.Runner, session: Any = None) -> None:
        self.connection = given
        self.awaited = find_adapter(given).awaited
        self.fence: Any = (aio_sql if self.awaited else sql).SqlFence()
        self._session = session if session is not None else given
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


Opener = Callable[[Databases, asyncio.Runner, bool], Iterator[OpenConnection]]
CONNECTION_KINDS: dict[str, Callable[[Databases, asyncio.Runner, bool], Any]] = {}


def connection_kind(make: Opener) -> Opener:
    CONNECTION_KINDS[make.__name__] = contextmanager(make)
    return make


@contextmanager
def open_connection(kind: str, where: Databases, *, autocommit: bool = False) -> Iterator[OpenConnection]:
    """Open a connection of this kind."""
    with asyncio.Runner() as runner, CONNECTION_KINDS[kind](where, runner, autocommit) as one:
        yield one


def mysql_options(where: Databases) -> dict[str, Any]:
    assert where.mariadb is not None
    # Without TLS, which the server has not: PyMySQL would read the machine's certificates each time.
    place = {"host": where.mariadb.host, "port": where.mariadb.port, "database": "fencelock"}
    return {**place, "user": "root", "ssl_disabled": True}


def postgres_url(where: Databases) -> str:
    assert where.postgres is not None
    return where.postgres.url


@connection_kind
def sqlite(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    connection = sqlite3.connect(where.folder / "app.db", isolation_level=None if autocommit else "IMMEDIATE")
    yield OpenConnection(connection, runner)
    connection.close()


@connection_kind
def sqlite_cursor(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    connection = sqlite3.connect(where.folder / "app.db", isolation_level=None if autocommit else "DEFERRED")
    yield OpenConnection(connection.cursor(), runner, connection)
    connection.close()


@connection_kind
def aiosqlite(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import aiosqlite

    connection = aiosqlite.connect(where.folder / "app.db", isolation_level=None if autocommit else "DEFERRED")
    connection = runner.run(_await(connection))
    connection.row_factory = aiosqlite.Row
    yield OpenConnection(connection, runner)
    runner.run(connection.close())


@connection_kind
def aiosqlite_cursor(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import aiosqlite

    opened = aiosqlite.connect(where.folder / "app.db", isolation_level=None if autocommit else "IMMEDIATE")
    connection = runner.run(_await(opened))
    yield OpenConnection(runner.run(_await(connection.cursor())), runner, connection)
    runner.run(connection.close())


@connection_kind
def psycopg(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(postgres_url(where), autocommit=autocommit, row_factory=dict_row) as connection:
        yield OpenConnection(connection, runner)


@connection_kind
def psycopg_cursor(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import psycopg

    with psycopg.connect(postgres_url(where), autocommit=autocommit) as connection:
        yield OpenConnection(connection.cursor(), runner, connection)


@connection_kind
def psycopg_async(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import psycopg

    connection = runner.run(psycopg.AsyncConnection.connect(postgres_url(where), autocommit=autocommit))
    yield OpenConnection(connection, runner)
    runner.run(connection.close())


@connection_kind
def psycopg_async_cursor(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import psycopg

    connection = runner.run(psycopg.AsyncConnection.connect(postgres_url(where), autocommit=autocommit))
    yield OpenConnection(connection.cursor(), runner, connection)
    runner.run(connection.close())


class AsyncpgConnection(OpenConnection):
    """A connection of asyncpg, whose transactions are explicit."""

    def __init__(self, connection: Any, runner: asyncio.Runner, autocommit: bool, given: Any = None) -> None:
        super().__init__(given or connection, runner)
        self._connection = connection
        self._autocommit = autocommit
        self._end("")

    def commit(self) -> None:
        self._end("COMMIT")

    def rollback(self) -> None:
        self._end("ROLLBACK")

    def _end(self, statement: str) -> None:
        if not self._autocommit:
            self.do(self._connection.execute(f"{statement}; BEGIN"))


@connection_kind
def asyncpg_async(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import asyncpg

    connection = runner.run(asyncpg.connect(postgres_url(where)))
    yield AsyncpgConnection(connection, runner, autocommit)
    runner.run(connection.close())


@connection_kind
def asyncpg_pool_async(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import asyncpg

    async def open_pool() -> Any:
        return await asyncpg.create_pool(postgres_url(where), min_size=1, max_size=1)

    pool = runner.run(open_pool())
    connection = runner.run(_await(pool.acquire()))
    yield AsyncpgConnection(connection, runner, autocommit)
    runner.run(pool.release(connection))
    runner.run(pool.close())


@connection_kind
def psycopg2(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import psycopg2
    from psycopg2.extras import RealDictCursor

    connection = psycopg2.connect(postgres_url(where), cursor_factory=RealDictCursor)
    connection.autocommit = autocommit
    yield OpenConnection(connection, runner)
    connection.close()


@connection_kind
def pymysql(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import pymysql

    connection = pymysql.connect(autocommit=autocommit, **mysql_options(where))
    yield OpenConnection(connection, runner)
    connection.close()


@connection_kind
def pymysql_found_rows(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    import pymysql
    from pymysql.constants import CLIENT

    connection = pymysql.connect(
        autocommit=autocommit,
        client_flag=CLIENT.FOUND_ROWS,
        cursorclass=pymysql.cursors.DictCursor,
        charset="latin1",
        **mysql_options(where),
    )
    yield OpenConnection(connection.cursor(), runner, connection)
    connection.close()


def _alchemy(url: str, runner: asyncio.Runner, autocommit: bool, kind: str) -> Iterator[OpenConnection]:
    import sqlalchemy
    from sqlalchemy.orm import Session

    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = sqlalchemy.create_engine(url, **level)
    with engine.connect() if kind == "connection" else Session(engine) as session:
        yield OpenConnection(session, runner)
    engine.dispose()


def _alchemy_async(url: str, runner: asyncio.Runner, autocommit: bool, kind: str) -> Iterator[OpenConnection]:
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    level: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = create_async_engine(url, **level)
    session: Any = engine.connect() if kind == "connection" else AsyncSession(engine)
    runner.run(session.__aenter__())
    yield OpenConnection(session, runner)
    runner.run(session.__aexit__(None, None, None))
    runner.run(engine.dispose())


@connection_kind
def alchemy_sqlite(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    yield from _alchemy(f"sqlite:///{where.folder}/app.db", runner, autocommit, "connection")


@connection_kind
def alchemy_postgres(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg://")
    yield from _alchemy(url, runner, autocommit, "connection")


@connection_kind
def alchemy_session_psycopg2(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg2://")
    yield from _alchemy(url, runner, autocommit, "session")


@connection_kind
def alchemy_session_mariadb(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    assert where.mariadb is not None
    url = where.mariadb.url.replace("mysql://", "mariadb+pymysql://")
    yield from _alchemy(url, runner, autocommit, "session")


@connection_kind
def alchemy_async_postgres(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    url = postgres_url(where).replace("postgresql://", "postgresql+psycopg://")
    yield from _alchemy_async(url, runner, autocommit, "session")


@connection_kind
def alchemy_asyncpg(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    url = postgres_url(where).replace("postgresql://", "postgresql+asyncpg://")
    yield from _alchemy_async(url, runner, autocommit, "connection")


@connection_kind
def alchemy_own_begin(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    """SQLite with the event handlers of SQLAlchemy's manual that emit BEGIN."""
    import sqlalchemy

    connect_args: dict[str, Any] = {"isolation_level": None}
    engine = sqlalchemy.create_engine(f"sqlite:///{where.folder}/app.db", connect_args=connect_args)
    if not autocommit:
        sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.connect() as connection:
        yield OpenConnection(connection, runner)
    engine.dispose()


@connection_kind
def alchemy_async_sqlite(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    yield from _alchemy_async(f"sqlite+aiosqlite:///{where.folder}/app.db", runner, autocommit, "connection")


class DjangoConnection(OpenConnection):
    """Django's connection; its transactions are `atomic` blocks."""

    def __init__(self, connection: Any, runner: asyncio.Runner, autocommit: bool) -> None:
        super().__init__(connection, runner)
        self._autocommit = autocommit
        self._begin()

    def _begin(self) -> None:
        self.connection.set_autocommit(self._autocommit)


def _django(settings: dict[str, Any], runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    from django.db import ConnectionHandler

    from tests import django_app

    django_app.ready()
    connection = ConnectionHandler({"default": settings})["default"]
    yield DjangoConnection(connection, runner, autocommit)
    connection.close()


@connection_kind
def django_sqlite(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    yield from _django(
        {"ENGINE": "django.db.backends.sqlite3", "NAME": str(where.folder / "app.db")}, runner, autocommit
    )


@connection_kind
def django_postgres(where: Databases, runner: asyncio.Runner, autocommit: bool) -> Iterator[OpenConnection]:
    assert where.postgres is not None
    options = {"HOST": where.postgres.host, "PORT": where.postgres.port, "USER": "postgres", "NAME": "postgres"}
    yield from _django({"ENGINE": "django.db.backends.postgresql", **options}, runner, autocommit)
