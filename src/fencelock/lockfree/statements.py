"""Statements on whatever connection the caller has: DB-API, psycopg and aiosqlite awaited, SQLAlchemy, Django.

Statements are written with `?`, and run in the caller's own transaction; nothing here begins one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple

from fencelock.errors import FencelockError
from fencelock.lockfree.colour import settled

Dialect = Literal["postgresql", "mysql", "sqlite"]

DRIVERS: dict[str, Dialect] = {
    "sqlite3": "sqlite",
    "aiosqlite": "sqlite",
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pymysql": "mysql",
    "MySQLdb": "mysql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "aiomysql": "mysql",
    "asyncmy": "mysql",
}
DIALECTS: dict[str, Dialect] = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
"""As SQLAlchemy and Django call them."""


class Answer(NamedTuple):
    """What became of a statement: how many rows it changed, and the rows that it returned."""

    changed: int
    rows: list[tuple[Any, ...]]


class Statements:
    """Runs statements on a DB-API connection, blocking or awaited."""

    def __init__(self, connection: Any, dialect: Dialect, driver: str, *, awaited: bool) -> None:
        self.connection = connection
        self.dialect: Dialect = dialect
        self.awaited = awaited
        self._driver = driver

    async def run(self, statement: str, *args: object) -> Answer:
        """Run one statement; the rows are tuples, whatever the caller has set up for itself."""
        cursor = await settled(self._cursor())
        try:
            await settled(cursor.execute(self._spelled(statement), args))
            rows = await settled(cursor.fetchall()) if cursor.description else []
            return Answer(cursor.rowcount, [tuple(row) for row in rows])
        finally:
            await settled(cursor.close())

    async def commit(self) -> None:
        """End the transaction."""
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        """Undo the transaction."""
        await settled(self.connection.rollback())

    def autocommits(self) -> bool:
        """Return whether each statement would be committed by itself, as far as the driver can tell."""
        connection = self.connection
        match self._driver:
            case "sqlite3" | "aiosqlite":
                # Python 3.12 has an attribute for it; -1 stands for the older rule, by isolation_level.
                mode = getattr(connection, "autocommit", -1)
                auto = connection.isolation_level is None if mode == -1 else bool(mode)
                return auto and not connection.in_transaction
            case "psycopg":
                return bool(connection.autocommit) and connection.info.transaction_status == 0
            case "psycopg2":
                return bool(connection.autocommit)
            case "pymysql" | "aiomysql" | "asyncmy":
                return bool(connection.get_autocommit()) and not connection.server_status & 1
            case "django":
                return bool(connection.get_autocommit()) and not connection.in_atomic_block
        return False

    def _cursor(self) -> Any:
        connection = self.connection
        match self._driver:
            case "psycopg":
                return connection.cursor(row_factory=import_module("psycopg.rows").tuple_row)
            case "psycopg2":
                return connection.cursor(cursor_factory=import_module("psycopg2.extensions").cursor)
            case "pymysql":
                return connection.cursor(import_module("pymysql.cursors").Cursor)
            case "sqlite3":
                cursor = connection.cursor()
                cursor.row_factory = None
                return cursor
        return connection.cursor()

    def _spelled(self, statement: str) -> str:
        return statement if self._driver in ("sqlite3", "aiosqlite") else statement.replace("?", "%s")


class SqlAlchemy(Statements):
    """Runs statements on a SQLAlchemy Connection, Session, AsyncConnection or AsyncSession."""

    async def run(self, statement: str, *args: object) -> Answer:
        """Run one statement, past SQLAlchemy's own language."""
        connection = await self._core()
        style = connection.dialect.paramstyle
        result = await settled(connection.exec_driver_sql(_styled(statement, style), args))
        rows = result.fetchall() if result.returns_rows else []
        return Answer(result.rowcount, [tuple(row) for row in rows])

    async def _core(self) -> Any:
        if hasattr(self.connection, "exec_driver_sql"):
            return self.connection
        return await settled(self.connection.connection())


def _styled(statement: str, style: str) -> str:
    if style == "qmark":
        return statement
    if style in ("format", "pyformat"):
        return statement.replace("?", "%s")
    parts = statement.split("?")  # numeric_dollar, as asyncpg has it
    return parts[0] + "".join(f"${number}{part}" for number, part in enumerate(parts[1:], 1))


def statements(connection: Any) -> Statements:
    """Return what runs statements on the caller's connection; raise TypeError for what is none that we know."""
    for kind in type(connection).__mro__:
        package, _, rest = kind.__module__.partition(".")
        if package == "sqlalchemy":
            return _on_sqlalchemy(connection, awaited=rest.startswith("ext.asyncio"))
        if package == "django" and hasattr(connection, "vendor"):
            return Statements(connection, _dialect(connection.vendor), "django", awaited=False)
        if package in DRIVERS:
            awaited = package in ("aiosqlite", "aiomysql", "asyncmy") or kind.__name__.startswith("Async")
            return Statements(connection, DRIVERS[package], package, awaited=awaited)
    raise TypeError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is no connection that fencelock knows: give it one "
        "of sqlite3, psycopg, psycopg2, PyMySQL, mysqlclient, aiosqlite, SQLAlchemy or Django"
    )


def _on_sqlalchemy(connection: Any, *, awaited: bool) -> SqlAlchemy:
    bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
    return SqlAlchemy(connection, _dialect(bind.dialect.name), "sqlalchemy", awaited=awaited)


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise TypeError(f"fencelock knows PostgreSQL, MySQL, MariaDB and SQLite, not {name}")
    return DIALECTS[name]


def need_transaction(on: Statements, what: str, name: str) -> None:
    """Raise FencelockError if nothing would hold the statements together."""
    if on.autocommits():
        raise FencelockError(
            f"{what} {name!r} needs a transaction, and this connection commits each statement by itself: begin one first, or "
            "turn autocommit off",
            name,
        )
