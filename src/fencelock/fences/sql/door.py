"""A SQL fence as a door: a transaction of its own for each `enter`, for those who have none to put the check into."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fencelock.fences import Fenced
from fencelock.fences.core import bearer, resource_of
from fencelock.fences.sql import SqlFence
from fencelock.sqlio import finish, settled
from fencelock.sqlio.lent import check_connect, is_awaited, lent


class SqlDoor:
    """Keeps the highest token of each resource in a database, for a resource that is elsewhere.

    `connect` gives a connection, of any kind that SqlFence takes, with autocommit off, or a context manager around one: a
    function that calls a driver's `connect`, `pool.connection` or `pool.getconn` of psycopg's pool, SQLAlchemy's
    `engine.connect` or a session factory. After each `enter` it is closed, or given back. With a pool that wants its
    connections back by hand, as psycopg2's, write a context manager. If it is one to be awaited, so is `enter`: one that
    nobody awaits lets everybody in, and nothing but Python's warning says so.

    >>> import sqlite3, tempfile, types
    >>> door = SqlDoor(lambda: sqlite3.connect(f"{folder}/fences.db"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     door.enter(types.SimpleNamespace(token=34, id="b"), "printer")
    ...     door.enter(types.SimpleNamespace(token=33, id="a"), "printer")
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'printer' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    """

    def __init__(self, connect: Callable[[], Any], fence: SqlFence | None = None) -> None:
        self._connect = check_connect(connect, "SqlDoor")
        self._fence = fence or SqlFence()

    def enter(self, lease: Fenced, resource: str | None = None) -> Any:
        """Keep older tokens out from now on, or raise StaleToken."""
        name = resource_of(bearer(lease), resource)
        given = self._connect()
        work = self._enter(given, lease, name)
        return work if is_awaited(given) else finish(work)

    async def _enter(self, given: Any, lease: Fenced, resource: str) -> None:
        async with lent(given) as connection:
            try:
                await settled(self._fence.check(connection, lease, resource))
                await settled(connection.commit())
            finally:
                with suppress(Exception):  # it may be what failed
                    await settled(self._fence.restore(connection))  # it may go back to a pool
