"""SQLAlchemy's connections and sessions, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, Answer, Link, render
from fencelock.sqlio.drivers import DRIVERS, NOTHING, find, kind_of, modules_of

DIALECTS = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}


def alchemy(thing: Any, modules: list[str]) -> Link:
    """Return the link for a Connection or a Session of either colour; an Engine has no transaction and is refused."""
    if hasattr(thing, "dbapi_connection"):  # straight from a pool: a connection of the driver's in a wrapper
        return find(thing.dbapi_connection)
    awaited = any(module.startswith("sqlalchemy.ext.asyncio") for module in modules)
    if not hasattr(thing, "commit"):
        raise TypeError(
            f"a Connection or a Session of SQLAlchemy's is needed, inside its transaction, not {kind_of(thing)}: "
            "with engine.begin() as connection"
        )
    bind = thing.get_bind() if hasattr(thing, "get_bind") else thing
    dialect = DIALECTS.get(bind.dialect.name)
    if dialect is None:
        raise TypeError(
            f"SQLAlchemy's {bind.dialect.name} is none of the databases that we know: PostgreSQL, MySQL, SQLite"
        )
    return (_AwaitedAlchemy if awaited else _BlockingAlchemy)(thing, dialect, bind.dialect.paramstyle)


class _BlockingAlchemy:
    awaited = False

    def __init__(self, thing: Any, dialect: str, paramstyle: str) -> None:
        self._thing = thing
        self._paramstyle = paramstyle
        self.dialect = dialect

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, names = render(sql, self._paramstyle)
        return _answer(self._connection().exec_driver_sql(text, tuple(args[name] for name in names)))

    async def commits_each(self) -> bool:
        connection = self._connection()
        if not connection.in_transaction():
            connection.begin()  # as the first statement would, with whatever the application does on that occasion
        return _commits_each(connection)

    def _connection(self) -> Any:
        return self._thing if hasattr(self._thing, "exec_driver_sql") else self._thing.connection()


class _AwaitedAlchemy:
    awaited = True

    def __init__(self, thing: Any, dialect: str, paramstyle: str) -> None:
        self._thing = thing
        self._paramstyle = paramstyle
        self.dialect = dialect

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, names = render(sql, self._paramstyle)
        connection = await self._connection()
        return _answer(await connection.exec_driver_sql(text, tuple(args[name] for name in names)))

    async def commits_each(self) -> bool:
        connection = await self._connection()
        if not connection.in_transaction():
            await connection.begin()
        return _commits_each(connection.sync_connection)

    async def _connection(self) -> Any:
        return self._thing if hasattr(self._thing, "exec_driver_sql") else await self._thing.connection()


def _answer(result: Any) -> Answer:
    touched = result.rowcount
    rows = [tuple(row) for row in result.fetchall()] if result.returns_rows else []
    return Answer(rows, touched)


def _commits_each(connection: Any) -> bool:
    """Return whether the driver's connection below commits each statement, as with isolation_level="AUTOCOMMIT"."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    pooled = connection.connection
    for module in modules_of(pooled.driver_connection):
        driver = DRIVERS.get(module.partition(".")[0])
        if driver is not None:
            # SQLite's own rule begins with the first write, which is what the caller runs next.
            return driver.idle(pooled.driver_connection)
    # asyncpg, aiomysql and others: SQLAlchemy knows how to ask, or its adapter does, by one name or another.
    adapter = pooled.dbapi_connection
    for asked in (getattr(connection.dialect, "detect_autocommit_setting", None), _ask_adapter):
        with suppress(NotImplementedError):
            if asked is not None:
                return bool(asked(adapter))
    return True  # nobody knows: better refused than written without a fence


def _ask_adapter(adapter: Any) -> bool:
    if hasattr(adapter, "get_autocommit"):
        return bool(adapter.get_autocommit())
    autocommit, level = getattr(adapter, "autocommit", None), getattr(adapter, "isolation_level", None)
    if isinstance(autocommit, bool):
        return autocommit
    if isinstance(level, str):
        return level.lower() == "autocommit"
    raise NotImplementedError
