"""SQLAlchemy's connections and sessions, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fencelock.errors import InvalidType
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, Answer, AwaitedLink, BlockingLink, bind
from fencelock.sqlio.drivers import DRIVERS, NOTHING, aiosqlite_commits, find, kind_of, modules_of

DIALECTS = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}


def alchemy(thing: Any, modules: list[str]) -> BlockingLink | AwaitedLink:
    """Return the link for a Connection or a Session of either colour; an Engine has no transaction and is refused."""
    if hasattr(thing, "dbapi_connection"):  # straight from a pool: a connection of the driver's in a wrapper
        return find(thing.dbapi_connection)
    awaited = any(module.startswith("sqlalchemy.ext.asyncio") for module in modules)
    if not hasattr(thing, "commit"):
        raise InvalidType(
            f"a Connection or a Session of SQLAlchemy's is needed, inside its transaction, not {kind_of(thing)}: "
            "with engine.begin() as connection"
        )
    bind = thing.get_bind() if hasattr(thing, "get_bind") else thing
    dialect = DIALECTS.get(bind.dialect.name)
    if dialect is None:
        raise InvalidType(
            f"SQLAlchemy's {bind.dialect.name} is none of the databases that we know: PostgreSQL, MySQL, SQLite"
        )
    return (_AwaitedAlchemy if awaited else _BlockingAlchemy)(thing, dialect, bind.dialect.paramstyle)


BEGIN = 'take the connection of `engine.begin()`, or a session, without isolation_level="AUTOCOMMIT"'


class _Alchemy:
    begin = BEGIN

    def __init__(self, thing: Any, dialect: str, paramstyle: str) -> None:
        self._thing = thing
        self._paramstyle = paramstyle
        self.dialect = dialect


class _BlockingAlchemy(_Alchemy):
    awaited: Literal[False] = False

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, self._paramstyle)
        return _answer(self._connection().exec_driver_sql(text, values))

    async def commits_each(self) -> bool:
        connection = self._connection()
        if not connection.in_transaction():
            connection.begin()  # as the first statement would, with whatever the application does on that occasion
        return _commits_each(connection)

    def _connection(self) -> Any:
        return self._thing if hasattr(self._thing, "exec_driver_sql") else self._thing.connection()


class _AwaitedAlchemy(_Alchemy):
    awaited: Literal[True] = True

    async def execute(self, sql: str, args: Mapping[str, Any] = NOTHING) -> Answer:
        text, values = bind(sql, args, self._paramstyle)
        connection = await self._connection()
        return _answer(await connection.exec_driver_sql(text, values))

    async def commits_each(self) -> bool:
        connection = await self._connection()
        if not connection.in_transaction():
            await connection.begin()
        beneath = (await connection.get_raw_connection()).driver_connection
        if type(beneath).__module__.partition(".")[0] == "aiosqlite" and await aiosqlite_commits(beneath):
            return True
        return _commits_each(connection.sync_connection)

    def refuse(self, why: str, /) -> None:
        from sqlalchemy import event

        def refused(*_: Any) -> None:
            raise RuntimeError(why)

        if hasattr(self._thing, "exec_driver_sql"):
            target, events = self._thing.sync_connection, ["before_cursor_execute", "commit"]
        else:
            session = self._thing if hasattr(self._thing, "sync_session") else self._thing()  # a scoped one
            target, events = session.sync_session, ["do_orm_execute", "before_flush", "before_commit"]
        for name in events:
            event.listen(target, name, refused)

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
    told = _told_by_dialect(connection.dialect, adapter)
    if told is None:
        told = _told_by_adapter(adapter)
    return told is not False  # where nobody knows: better refused than written without a fence


def _told_by_dialect(dialect: Any, adapter: Any) -> bool | None:
    """Return whether SQLAlchemy takes it for one that commits each statement; None is for: it cannot tell."""
    if not hasattr(dialect, "detect_autocommit_setting"):
        return None
    try:
        return bool(dialect.detect_autocommit_setting(adapter))
    except NotImplementedError:  # SQLAlchemy's word for it
        return None


def _told_by_adapter(adapter: Any) -> bool | None:
    """Return whether SQLAlchemy's adapter of a driver says that it commits each statement, or None."""
    if hasattr(adapter, "get_autocommit"):
        return bool(adapter.get_autocommit())
    autocommit, level = getattr(adapter, "autocommit", None), getattr(adapter, "isolation_level", None)
    if isinstance(autocommit, bool):
        return autocommit
    return level.lower() == "autocommit" if isinstance(level, str) else None
