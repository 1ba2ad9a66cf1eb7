"""An application's own database object instead of a URL: the part that the SQL engines share.

The engine reads from the object how to connect, and opens its own connections. It takes none from the application's pool:
threads that wait for a lock may hold all connections of the pool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Runtime
from fencelock.errors import EngineUnavailable, FencelockError, InvalidType

Arguments = Mapping[str, Any]
"""The keyword arguments of a driver's `connect`."""
Find = Callable[[], Awaitable[Arguments]]
P = TypeVar("P")
L = TypeVar("L")


class AdoptedClient(Generic[P]):
    """A database as an application connects to it. `parse` converts a driver's arguments to the engine's own form."""

    def __init__(
        self, find: Find, parse: Callable[[Arguments], P], title: str, url: str, *, connects: bool = False
    ) -> None:
        self.address = title
        """A description for messages, until the server's address is known."""
        self.url = url
        """The URL for messages, without a password."""
        self.connects = connects
        """Whether `find` makes the application open a connection, which may take long."""
        self._find = find
        self._parse = parse
        self._target: P | None = None

    async def target(self, *, again: bool = False) -> P:
        """Return where and how to connect. `find` runs once, unless `again`."""
        if self._target is None or again:
            try:
                self._target = self._parse(await self._find())
            except FencelockError:
                raise
            except Exception as error:
                raise EngineUnavailable(f"{self.address} cannot say how to connect: {error}") from error
        return self._target

    async def connect(self, connect: Callable[[P], Awaitable[L]], refused: type[Exception], deadline: Deadline) -> L:
        """Connect as the application does. If that fails, call `find` again, once: passwords and addresses change.

        If `find` opens a connection, it runs again only if the server has `refused` the login, and so is reachable.
        """
        target = await self.target()
        try:
            return await connect(target)
        except EngineUnavailable as error:
            if deadline.passed or (self.connects and not isinstance(error.__cause__, refused)):
                raise
            fresh = await self.target(again=True)
            if fresh == target:
                raise
        return await connect(fresh)


def adopt_engine(
    runtime: Runtime, engine: Any, parse: Callable[[Arguments], P], read: Callable[[Any, Any], Arguments]
) -> AdoptedClient[P]:
    """Connect as an engine of SQLAlchemy does: with `read(engine, connection)` of a connection with its hooks.

    Raises InvalidType if this runtime cannot use the engine.
    """
    if not hasattr(engine, "raw_connection"):
        raise InvalidType(f"an Engine or AsyncEngine of SQLAlchemy is needed here, not {type(engine).__name__}")
    if hasattr(engine, "sync_engine") and not runtime.shares_connections:
        raise InvalidType("an AsyncEngine is for fencelock.aio.connect; fencelock.connect takes an Engine")

    async def find() -> Arguments:
        if not hasattr(engine, "sync_engine"):
            return await runtime.run_blocking(_ask_new_connection, engine, read)
        from sqlalchemy.util import greenlet_spawn

        arguments: Arguments = await greenlet_spawn(_ask_new_connection, engine.sync_engine, read)
        return arguments

    url = str(engine.url.render_as_string(hide_password=True))
    return AdoptedClient(find, parse, "the application's engine", url, connects=True)


def _ask_new_connection(engine: Any, read: Callable[[Any, Any], Arguments]) -> Arguments:
    """Connect through an empty copy of the engine's pool, which has its arguments and hooks."""
    pool = engine.pool.recreate()
    try:
        connection = pool.connect()
        try:
            return read(engine, connection)
        finally:
            connection.close()
    finally:
        pool.dispose()


def adopt_django(connection: Any, parse: Callable[[Arguments], P], scheme: str) -> AdoptedClient[P]:
    """Connect as Django's connection does: with its settings."""

    async def find() -> Arguments:
        arguments: Arguments = connection.get_connection_params()
        return arguments

    host, database = (connection.settings_dict.get(name) or "" for name in ("HOST", "NAME"))
    return AdoptedClient(find, parse, "Django's connection", f"{scheme}://{host}/{database}")


async def ready(arguments: Arguments) -> Arguments:
    """Return arguments that are already known; an awaitable for `find`."""
    return arguments
