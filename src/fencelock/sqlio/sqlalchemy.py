"""The adapter of SQLAlchemy's connections and sessions, blocking and asyncio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fencelock.errors import InvalidType
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, ConnectionAdapter, Result, bind, kind_of
from fencelock.sqlio.drivers import DRIVERS, NO_ARGS, BaseAdapter, find_adapter, modules_of, resolve

DIALECTS = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}
HOW_TO_BEGIN = 'take the connection of `engine.begin()`, or a session, without isolation_level="AUTOCOMMIT"'


def sqlalchemy_adapter(thing: Any, modules: list[str]) -> ConnectionAdapter:
    """Return the adapter of a Connection or a Session; raise InvalidType for an Engine, which has no transaction."""
    if hasattr(thing, "dbapi_connection"):  # from a pool of SQLAlchemy: it wraps a connection of the driver
        return find_adapter(thing.dbapi_connection)
    if not hasattr(thing, "commit"):
        raise InvalidType(
            f"a Connection or a Session of SQLAlchemy is needed, inside its transaction, not {kind_of(thing)}: "
            "with engine.begin() as connection"
        )
    bound = thing.get_bind() if hasattr(thing, "get_bind") else thing
    dialect = DIALECTS.get(bound.dialect.name)
    if dialect is None:
        raise InvalidType(f"SQLAlchemy's {bound.dialect.name} is not supported: use PostgreSQL, MySQL or SQLite")
    awaited = any(module.startswith("sqlalchemy.ext.asyncio") for module in modules)
    return SqlalchemyAdapter(thing, dialect, bound.dialect.paramstyle, awaited=awaited)


class SqlalchemyAdapter(BaseAdapter):
    """A Connection or a Session, or their asyncio twins."""

    def __init__(self, session: Any, dialect: str, paramstyle: str, *, awaited: bool) -> None:
        super().__init__(session, dialect, HOW_TO_BEGIN, awaited=awaited)
        self._paramstyle = paramstyle

    async def execute(self, sql: str, args: Mapping[str, Any] = NO_ARGS) -> Result:
        """Run one statement."""
        text, values = bind(sql, args, self._paramstyle)
        result = await resolve((await self._bound()).exec_driver_sql(text, values))
        rowcount = result.rowcount
        rows = [tuple(row) for row in result.fetchall()] if result.returns_rows else []
        return Result(rows, rowcount)

    async def is_autocommit(self) -> bool:
        """Return whether each statement commits by itself."""
        connection = await self._bound()
        if not connection.in_transaction():
            await resolve(connection.begin())  # as the first statement would, with the application's own event handlers
        if self.awaited:
            await connection.get_raw_connection()
            connection = connection.sync_connection
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            return True
        pooled = connection.connection
        for module in modules_of(pooled.driver_connection):
            driver = DRIVERS.get(module.partition(".")[0])
            if driver is not None:
                return bool(await resolve(driver.is_autocommit(pooled.driver_connection)))
        return _detect_autocommit(connection.dialect, pooled.dbapi_connection)

    async def _bound(self) -> Any:
        """Return the Connection: itself, or that of a Session."""
        if hasattr(self._connection, "exec_driver_sql"):
            return self._connection
        return await resolve(self._connection.connection())


def _detect_autocommit(dialect: Any, adapter: Any) -> bool:
    """Ask SQLAlchemy's dialect, or its adapter of asyncpg, aiomysql and others. If neither can tell, it is autocommit."""
    if hasattr(dialect, "detect_autocommit_setting"):
        try:
            return bool(dialect.detect_autocommit_setting(adapter))
        except NotImplementedError:
            pass
    if hasattr(adapter, "get_autocommit"):
        return bool(adapter.get_autocommit())
    autocommit, level = getattr(adapter, "autocommit", None), getattr(adapter, "isolation_level", None)
    if isinstance(autocommit, bool):
        return autocommit
    return level.lower() == "autocommit" if isinstance(level, str) else True
