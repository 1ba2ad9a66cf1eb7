"""The kinds of connection: one small class for each way to ask, and a table of who is asked how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fencelock.errors import InvalidType
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, Answer, AwaitedLink, BlockingLink, bind

BEGIN = {
    POSTGRESQL: "turn autocommit off, or begin a transaction first",
    MYSQL: "turn autocommit off, or begin a transaction first",
    SQLITE: "execute BEGIN IMMEDIATE first",
}

NOTHING: Mapping[str, Any] = {}


class Driver(NamedTuple):
    """A line of the table of drivers."""

    dialect: str
    paramstyle: str
    idle: Callable[[Any], bool]
    """Whether a connection of its commits each statement by itself, as things stand."""
    fresh: Callable[[Any], Any] = lambda connection: connection.cursor()
    """A cursor that gives tuples, whatever the caller has made of rows."""


def _sqlite_commits(connection: Any) -> bool:
    if connection.in_transaction:
        return False
    # Python 3.12 has an attribute for it; -1 stands for the older rule, by isolation_level.
    autocommit = getattr(connection, "autocommit", -1)
    return connection.isolation_level is None if autocommit == -1 else bool(autocommit)


async def aiosqlite_commits(connection: Any) -> bool:
    """Ask sqlite3's own connection: aiosqlite does not hand on `autocommit`, which answers in its thread only."""
    return bool(await connection._execute(_sqlite_commits, connection._conn))


def _sqlite_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def _libpq_commits(connection: Any) -> bool:
    return bool(connection.autocommit) and connection.info.transaction_status == 0


def _psycopg_cursor(connection: Any) -> Any:
    from psycopg.rows import tuple_row

    return connection.cursor(row_factory=tuple_row)


def _psycopg2_cursor(connection: Any) -> Any:
    from psycopg2.extensions import cursor

    return connection.cursor(cursor_factory=cursor)


def _pymysql_commits(connection: Any) -> bool:
    return bool(connection.get_autocommit()) and not connection.server_status & 1  # SERVER_STATUS_IN_TRANS


def _pymysql_cursor(connection: Any) -> Any:
    from pymysql.cursors import Cursor

    return connection.cursor(Cursor)


def _mysqldb_cursor(connection: Any) -> Any:
    from MySQLdb.cursors import Cursor

    return connection.cursor(Cursor)


DRIVERS = {
    "sqlite3": Driver(SQLITE, "qmark", _sqlite_commits, _sqlite_cursor),
    "psycopg": Driver(POSTGRESQL, "format", _libpq_commits, _psycopg_cursor),
    "psycopg2": Driver(POSTGRESQL, "format", _libpq_commits, _psycopg2_cursor),
    "pymysql": Driver(MYSQL, "format", _pymysql_commits, _pymysql_cursor),
    "MySQLdb": Driver(MYSQL, "format", lambda connection: bool(connection.get_autocommit()), _mysqldb_cursor),
    "aiosqlite": Driver(SQLITE, "qmark", _sqlite_commits),
}
"""DB-API drivers, by the package that their connections come from."""


def kind_of(thing: object) -> str:
    """Return the name of a thing's type, for people."""
    kind = type(thing)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def modules_of(thing: object) -> list[str]:
    """Return where a thing's type and what it is derived from are defined."""
    return [kind.__module__ for kind in type(thing).__mro__]


def find(thing: Any) -> BlockingLink | AwaitedLink:
    """Return the link for a connection or a cursor; raise InvalidType for anything else."""
    modules = modules_of(thing)
    packages = [module.partition(".")[0] for module in modules]
    if "sqlalchemy" in packages:
        from fencelock.sqlio.alchemy import alchemy

        return alchemy(thing, modules)
    if "django" in packages:
        connection = thing if hasattr(thing, "vendor") else getattr(thing, "db", None)  # a cursor's
        if not hasattr(connection, "vendor"):
            raise InvalidType(
                f"one of Django's connections is needed, not {kind_of(thing)}: give it connections['default']"
            )
        return _Django(connection)
    for package in packages:
        if package in DRIVERS and not isinstance(thing, type):
            return _of_driver(thing, package)
    raise InvalidType(
        "a connection or a cursor is needed, of sqlite3, psycopg, psycopg2, PyMySQL, mysqlclient, aiosqlite, SQLAlchemy "
        f"(Connection, Session and their asyncio twins) or Django, not {kind_of(thing)}"
    )


def _of_driver(thing: Any, package: str) -> BlockingLink | AwaitedLink:
    connection = thing
    if not hasattr(connection, "commit"):
        # A cursor of aiosqlite's has a `connection`, too: sqlite3's own, which belongs to another thread.
        connection = getattr(thing, "_conn" if package == "aiosqlite" else "connection", None)
        if connection is None or not hasattr(connection, "commit"):
            raise InvalidType(f"a connection or a cursor is needed, not {kind_of(thing)}")
    driver = DRIVERS[package]
    if package == "aiosqlite":
        return _Aiosqlite(connection, driver)
    if package == "psycopg" and any(kind.__name__ == "AsyncConnection" for kind in type(connection).__mro__):
        return _Awaited(connection, driver)
    return _Blocking(connection, driver)


class _Connection:
    """A connection and the line of the table that it is asked by."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        self._connection = connection
        self._driver = driver
        self.dialect = driver.dialect
        self.begin = BEGIN[driver.dialect]


class _Blocking(_Connection):
    """A connection of a DB-API driver."""

    awaited: Literal[False] = False

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, self._driver.paramstyle)
        cursor = self._driver.fresh(self._connection)
        try:
            return _ask(cursor, text, values)
        finally:
            cursor.close()

    async def commits_each(self) -> bool:
        if not self._driver.idle(self._connection):
            return False
        if type(self._connection).__module__.partition(".")[0] != "MySQLdb":
            return True
        # mysqlclient does not tell whether BEGIN was said by hand; MariaDB does, MySQL does not.
        try:
            return (await self.execute("SELECT @@in_transaction")).rows == [(0,)]
        except Exception:
            return True


class _Awaited(_Connection):
    """A connection of psycopg's asyncio half."""

    awaited: Literal[True] = True

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, self._driver.paramstyle)
        async with self._driver.fresh(self._connection) as cursor:
            return await _ask_awaited(cursor, text, values)

    async def commits_each(self) -> bool:
        return self._driver.idle(self._connection)

    def refuse(self, _why: str, /) -> None:
        self._connection.pgconn.finish()  # the server rolls back


class _Aiosqlite(_Connection):
    """A connection of aiosqlite's: sqlite3 in a thread of its own."""

    awaited: Literal[True] = True

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, self._driver.paramstyle)
        cursor = await self._connection.cursor()
        try:
            cursor.row_factory = None
            return await _ask_awaited(cursor, text, values)
        finally:
            await cursor.close()

    async def commits_each(self) -> bool:
        return await aiosqlite_commits(self._connection)

    def refuse(self, _why: str, /) -> None:
        # The first step puts it into the thread's queue, before whatever the caller does next. A close() of the caller's
        # still finds what it expects.
        self._connection._execute(self._connection._conn.close).send(None)


class _Django:
    """What `django.db.connection` is, or one of `django.db.connections`: it speaks `%s` to every database."""

    awaited: Literal[False] = False
    begin = "do both inside `with transaction.atomic():`"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.dialect = str(connection.vendor)
        if self.dialect not in (POSTGRESQL, MYSQL, SQLITE):
            raise InvalidType(
                f"Django's {self.dialect} is none of the databases that we know: PostgreSQL, MySQL, SQLite"
            )

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, "format")
        with self._connection.cursor() as cursor:
            return _ask(cursor, text, values)

    async def commits_each(self) -> bool:
        return bool(self._connection.get_autocommit())


def _ask(cursor: Any, text: str, values: tuple[Any, ...]) -> Answer:
    cursor.execute(text, values)
    rows = [] if cursor.description is None else cursor.fetchall()
    return Answer([tuple(row) for row in rows], cursor.rowcount)


async def _ask_awaited(cursor: Any, text: str, values: tuple[Any, ...]) -> Answer:
    await cursor.execute(text, values)
    rows = [] if cursor.description is None else await cursor.fetchall()
    return Answer([tuple(row) for row in rows], cursor.rowcount)
