"""The databases that these tests run on, every kind of connection to them, and processes that use them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from fencelock.fences.sql import SqlFence
from fencelock.lockfree.schema import create_tables
from fencelock.sqlio.drivers import resolve
from tests.support.processes import Child

NAMES = ("sqlite", "postgresql", "mariadb")
MARK = {"sqlite": "?", "postgresql": "%s", "mariadb": "%s"}

BUSINESS = "CREATE TABLE IF NOT EXISTS charge (name varchar(1100) NOT NULL, amount integer NOT NULL)"


def connect_to(url: str) -> Any:
    """Return a DB-API connection that does not commit by itself."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return sqlite3.connect(parts.path, timeout=30, check_same_thread=False)
    if parts.scheme == "mysql":
        import pymysql  # each driver takes a while, and a process needs one

        # To read the machine's certificates, for a server that has none, would take longer than a test does.
        return pymysql.connect(
            host=parts.hostname or "",
            port=parts.port or 0,
            user="root",
            database=parts.path[1:],
            autocommit=False,
            ssl_disabled=True,
        )
    import psycopg

    return psycopg.connect(url)


class Database:
    """One database with the tables of fencelock.lockfree and a table of the application."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.mark = MARK[name]
        with self.connected() as connection:
            if name == "sqlite":
                connection.execute("PRAGMA journal_mode = WAL")
            create_tables(connection)
            SqlFence().create(connection)
            connection.cursor().execute(BUSINESS)
            connection.commit()

    def connect(self) -> Any:
        """Return a connection, to be closed."""
        return connect_to(self.url)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection that is closed at the end, without a commit."""
        connection = self.connect()
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A connection with a transaction that is committed at the end, unless there is an error."""
        with self.connected() as connection:
            yield connection
            connection.commit()

    def ask(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        """Run a statement, written with ?, in a transaction of its own."""
        with self.transaction() as connection:
            cursor = connection.cursor()
            cursor.execute(sql.replace("?", self.mark), args)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def charge(self, connection: Any, name: str, amount: int = 10) -> None:
        """Do the business write."""
        connection.cursor().execute(f"INSERT INTO charge VALUES ({self.mark}, {self.mark})", (name, amount))

    def charges(self, name: str) -> int:
        """Return how often the business write was done."""
        return int(self.ask("SELECT count(*) FROM charge WHERE name = ?", name)[0][0])

    def path(self) -> str:
        """Return the URL without its scheme."""
        return self.url.partition("://")[2]


# ------------------------------------------------------------------------------------------- kinds of connections


@asynccontextmanager
async def _closing(connection: Any) -> AsyncIterator[Any]:
    try:
        yield connection
    finally:
        with suppress(Exception):  # a relay has closed it
            await resolve(connection.close())


@asynccontextmanager
async def _dbapi(database: Database) -> AsyncIterator[Any]:
    async with _closing(database.connect()) as connection:
        yield connection


@asynccontextmanager
async def _psycopg2(database: Database) -> AsyncIterator[Any]:
    async with _closing(import_module("psycopg2").connect(database.url)) as connection:
        yield connection


@asynccontextmanager
async def _psycopg_async(database: Database) -> AsyncIterator[Any]:
    import psycopg

    async with _closing(await psycopg.AsyncConnection.connect(database.url)) as connection:
        yield connection


@asynccontextmanager
async def _asyncpg(database: Database) -> AsyncIterator[Any]:
    import asyncpg

    async with _closing(await asyncpg.connect(database.url)) as connection:
        yield connection


@asynccontextmanager
async def _aiosqlite(database: Database) -> AsyncIterator[Any]:
    import aiosqlite

    async with aiosqlite.connect(database.path(), timeout=30) as connection:
        yield connection


def _alchemy_url(database: Database, *, awaited: bool) -> str:
    driver = {"sqlite": "sqlite+aiosqlite" if awaited else "sqlite", "postgresql": "postgresql+psycopg"}
    return f"{driver.get(database.name, 'mysql+pymysql')}://{'/' if database.name == 'sqlite' else ''}{database.path()}"


def _alchemy(session: bool) -> Any:
    @asynccontextmanager
    async def make(database: Database) -> AsyncIterator[Any]:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        engine = create_engine(_alchemy_url(database, awaited=False))
        with Session(engine) if session else engine.connect() as connection:
            yield connection
        engine.dispose()

    return make


def _async_alchemy(session: bool, driver: str = "psycopg") -> Any:
    @asynccontextmanager
    async def make(database: Database) -> AsyncIterator[Any]:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

        engine = create_async_engine(_alchemy_url(database, awaited=True).replace("psycopg", driver))
        async with AsyncSession(engine) if session else engine.connect() as connection:
            yield connection
        await engine.dispose()

    return make


KINDS: dict[tuple[str, str], Any] = {
    ("sqlite", "sqlite3"): _dbapi,
    ("sqlite", "aiosqlite"): _aiosqlite,
    ("sqlite", "sqlalchemy"): _alchemy(False),
    ("sqlite", "sqlalchemy async"): _async_alchemy(False),
    ("postgresql", "psycopg"): _dbapi,
    ("postgresql", "psycopg2"): _psycopg2,
    ("postgresql", "psycopg async"): _psycopg_async,
    ("postgresql", "asyncpg"): _asyncpg,
    ("postgresql", "sqlalchemy session"): _alchemy(True),
    ("postgresql", "sqlalchemy async session"): _async_alchemy(True),
    ("postgresql", "sqlalchemy asyncpg"): _async_alchemy(False, "asyncpg"),
    ("mariadb", "pymysql"): _dbapi,
    ("mariadb", "sqlalchemy"): _alchemy(False),
    ("mariadb", "sqlalchemy session"): _alchemy(True),
}
"""Every kind of connection, by database: an asynchronous context manager each, blocking or asyncio."""


# ------------------------------------------------------------------------------------------- processes


@contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """Starts processes with `url`, `connection` and `args`, and kills them at the end."""
    begin = (
        "import sys\nfrom tests.lockfree.databases import Database, connect_to\n"
        "url = sys.argv[1]\nconnection = connect_to(url)\nargs = sys.argv[2:]\n"
    )
    with ExitStack() as stack:
        yield lambda database, program, *args: stack.enter_context(
            Child.of_source(begin + program, database.url, *args)
        )
