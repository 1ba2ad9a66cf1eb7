"""The adapters of DB-API drivers, of Django and of asyncpg, and a table of what differs between the drivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fencelock.errors import InvalidType
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, ConnectionAdapter, Result, bind, kind_of

TURN_OFF_AUTOCOMMIT = "turn autocommit off, or begin a transaction first"
HOW_TO_BEGIN = {POSTGRESQL: TURN_OFF_AUTOCOMMIT, MYSQL: TURN_OFF_AUTOCOMMIT, SQLITE: "execute BEGIN IMMEDIATE first"}

NO_ARGS: Mapping[str, Any] = {}


class Driver(NamedTuple):
    """What differs between DB-API drivers. Both functions may return an awaitable."""

    dialect: str
    paramstyle: str
    is_autocommit: Callable[[Any], Any]
    open_cursor: Callable[[Any], Any]
    """Opens a cursor that returns tuples, whatever row factory the caller has set."""


async def resolve(value: Any) -> Any:
    """Return what a driver's function returned, awaited if it is a driver of asyncio."""
    return await value if hasattr(value, "__await__") else value


def _sqlite_is_autocommit(connection: Any) -> bool:
    if connection.in_transaction:
        return False
    # Python 3.12 has the attribute `autocommit`; -1 means that `isolation_level` decides, as in older versions.
    autocommit = getattr(connection, "autocommit", -1)
    return connection.isolation_level is None if autocommit == -1 else bool(autocommit)


def _sqlite_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def aiosqlite_is_autocommit(connection: Any) -> Any:
    """Ask sqlite3's own connection, in aiosqlite's thread: aiosqlite itself has no `autocommit`."""
    return connection._execute(_sqlite_is_autocommit, connection._conn)


async def _aiosqlite_cursor(connection: Any) -> Any:
    cursor = await connection.cursor()
    cursor.row_factory = None
    return cursor


def _libpq_is_autocommit(connection: Any) -> bool:
    return bool(connection.autocommit) and connection.info.transaction_status == 0


def _psycopg_cursor(connection: Any) -> Any:
    from psycopg.rows import tuple_row

    return connection.cursor(row_factory=tuple_row)


def _psycopg2_cursor(connection: Any) -> Any:
    from psycopg2.extensions import cursor

    return connection.cursor(cursor_factory=cursor)


def _pymysql_is_autocommit(connection: Any) -> bool:
    return bool(connection.get_autocommit()) and not connection.server_status & 1  # SERVER_STATUS_IN_TRANS


def _pymysql_cursor(connection: Any) -> Any:
    from pymysql.cursors import Cursor

    return connection.cursor(Cursor)


def _mysqldb_is_autocommit(connection: Any) -> bool:
    if not connection.get_autocommit():
        return False
    # mysqlclient does not know of a transaction that was begun by a BEGIN statement. MariaDB does, MySQL does not.
    with _mysqldb_cursor(connection) as cursor:
        try:
            cursor.execute("SELECT @@in_transaction")
        except Exception:
            return True
        return bool(cursor.fetchone() == (0,))


def _mysqldb_cursor(connection: Any) -> Any:
    from MySQLdb.cursors import Cursor

    return connection.cursor(Cursor)


DRIVERS = {
    "sqlite3": Driver(SQLITE, "qmark", _sqlite_is_autocommit, _sqlite_cursor),
    "psycopg": Driver(POSTGRESQL, "format", _libpq_is_autocommit, _psycopg_cursor),
    "psycopg2": Driver(POSTGRESQL, "format", _libpq_is_autocommit, _psycopg2_cursor),
    "pymysql": Driver(MYSQL, "format", _pymysql_is_autocommit, _pymysql_cursor),
    "MySQLdb": Driver(MYSQL, "format", _mysqldb_is_autocommit, _mysqldb_cursor),
    "aiosqlite": Driver(SQLITE, "qmark", aiosqlite_is_autocommit, _aiosqlite_cursor),
}
"""DB-API drivers, by the package that defines their connections."""


def modules_of(thing: object) -> list[str]:
    """Return the modules that define an object's type and its base classes."""
    return [kind.__module__ for kind in type(thing).__mro__]


def find_adapter(thing: Any) -> ConnectionAdapter:
    """Return the adapter of a connection or cursor; raise InvalidType for anything else."""
    modules = modules_of(thing)
    packages = [module.partition(".")[0] for module in modules]
    if "sqlalchemy" in packages:
        from fencelock.sqlio.sqlalchemy import sqlalchemy_adapter

        return sqlalchemy_adapter(thing, modules)
    if "django" in packages:
        return _django_adapter(thing)
    if "asyncpg" in packages and hasattr(thing, "is_in_transaction"):
        return AsyncpgAdapter(thing)
    for package in packages:
        if package in DRIVERS and not isinstance(thing, type):
            return _dbapi_adapter(thing, package)
    raise InvalidType(
        "a connection or a cursor is needed, of sqlite3, psycopg, psycopg2, PyMySQL, mysqlclient, aiosqlite, asyncpg, "
        f"SQLAlchemy (Connection, Session, AsyncConnection, AsyncSession) or Django, not {kind_of(thing)}"
    )


def _django_adapter(thing: Any) -> ConnectionAdapter:
    connection: Any = thing if hasattr(thing, "vendor") else getattr(thing, "db", None)  # a cursor's
    if not hasattr(connection, "vendor"):
        raise InvalidType(
            f"one of Django's connections is needed, not {kind_of(thing)}: give it connections['default']"
        )
    if connection.vendor not in HOW_TO_BEGIN:
        raise InvalidType(f"Django's {connection.vendor} is not supported: use PostgreSQL, MySQL or SQLite")
    driver = Driver(connection.vendor, "format", lambda it: it.get_autocommit(), lambda it: it.cursor())
    return DbapiAdapter(connection, driver, "do both inside `with transaction.atomic():`", awaited=False)


def _dbapi_adapter(thing: Any, package: str) -> ConnectionAdapter:
    connection = thing
    if not hasattr(connection, "commit"):
        # `connection` of an aiosqlite cursor is sqlite3's own connection, which belongs to another thread.
        connection = getattr(thing, "_conn" if package == "aiosqlite" else "connection", None)
        if connection is None or not hasattr(connection, "commit"):
            raise InvalidType(f"a connection or a cursor is needed, not {kind_of(thing)}")
    is_async_psycopg = any(kind.__name__ == "AsyncConnection" for kind in type(connection).__mro__)
    driver = DRIVERS[package]
    awaited = package == "aiosqlite" or is_async_psycopg
    return DbapiAdapter(connection, driver, HOW_TO_BEGIN[driver.dialect], awaited=awaited)


class BaseAdapter:
    """A connection that begins a transaction with its first statement, and has `commit` and `rollback`."""

    def __init__(self, connection: Any, dialect: str, how_to_begin: str, *, awaited: bool) -> None:
        self._connection = connection
        self.dialect = dialect
        self.how_to_begin = how_to_begin
        self.awaited = awaited

    async def begin(self) -> None:
        """Do nothing: the first statement begins a transaction."""

    async def commit(self) -> None:
        """Commit."""
        await resolve(self._connection.commit())

    async def rollback(self) -> None:
        """Roll back."""
        await resolve(self._connection.rollback())


class DbapiAdapter(BaseAdapter):
    """A connection of a DB-API driver, of its asyncio twin, or of Django."""

    def __init__(self, connection: Any, driver: Driver, how_to_begin: str, *, awaited: bool) -> None:
        super().__init__(connection, driver.dialect, how_to_begin, awaited=awaited)
        self._driver = driver

    async def execute(self, sql: str, args: Mapping[str, Any] = NO_ARGS) -> Result:
        """Run one statement."""
        text, values = bind(sql, args, self._driver.paramstyle)
        cursor = await resolve(self._driver.open_cursor(self._connection))
        try:
            await resolve(cursor.execute(text, values))
            rows = [] if cursor.description is None else await resolve(cursor.fetchall())
            return Result([tuple(row) for row in rows], cursor.rowcount)
        finally:
            await resolve(cursor.close())

    async def is_autocommit(self) -> bool:
        """Return whether each statement commits by itself."""
        return bool(await resolve(self._driver.is_autocommit(self._connection)))


class AsyncpgAdapter:
    """A connection of asyncpg, or one from its pool. It commits each statement unless a transaction was begun."""

    dialect = POSTGRESQL
    awaited = True
    how_to_begin = "do both inside `async with connection.transaction():`"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str, args: Mapping[str, Any] = NO_ARGS) -> Result:
        """Run one statement."""
        text, values = bind(sql, args, "numeric_dollar")
        statement = await self._connection.prepare(text)  # only this returns both the rows and their number
        rows = await statement.fetch(*values)
        count = statement.get_statusmsg().rpartition(" ")[2]
        return Result([tuple(row) for row in rows], int(count) if count.isdigit() else -1)

    async def is_autocommit(self) -> bool:
        """Return whether no transaction was begun."""
        return not self._connection.is_in_transaction()

    async def begin(self) -> None:
        """Begin a transaction."""
        await self._connection.execute("BEGIN")

    async def commit(self) -> None:
        """Commit."""
        await self._connection.execute("COMMIT")

    async def rollback(self) -> None:
        """Roll back."""
        await self._connection.execute("ROLLBACK")
