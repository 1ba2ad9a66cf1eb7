"""A SQL fence as a door: a transaction of its own for each `enter`, for those who have none to put the check into."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from fencelock.fences import Fenced
from fencelock.fences.sql import SqlFence
from fencelock.sqlio import link


class SqlDoor:
    """Keeps the highest token of each resource in a database, for a resource that is elsewhere.

    `connect` gives a connection, of any kind that SqlFence takes, with autocommit off: a driver's `connect`, a pool's, or a
    SQLAlchemy session factory. It is closed after each `enter`. If it is one to be awaited, so is `enter`.

    >>> import sqlite3, tempfile, types
    >>> door = SqlDoor(lambda: sqlite3.connect(f"{folder}/fences.db"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     door.enter("printer", types.SimpleNamespace(token=34, id="b"))
    ...     door.enter("printer", types.SimpleNamespace(token=33, id="a"))
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'printer' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    """

    def __init__(self, connect: Callable[[], Any], fence: SqlFence | None = None) -> None:
        self._connect = connect
        self._fence = fence or SqlFence()

    def enter(self, resource: str, lease: Fenced) -> Any:
        """Keep older tokens out from now on, or raise StaleToken."""
        opened = self._connect()
        if isawaitable(opened) or link(opened).awaited:
            return self._enter_awaited(opened, resource, lease)
        try:
            self._fence.check(opened, resource, lease)
            opened.commit()
        finally:
            with suppress(Exception):  # it may be what failed
                if hasattr(lease, "remaining"):
                    self._fence.restore(opened)  # it may go back to a pool
            opened.close()
        return None

    async def _enter_awaited(self, opened: Any, resource: str, lease: Fenced) -> None:
        connection = await opened if isawaitable(opened) else opened
        try:
            await self._fence.check(connection, resource, lease)
            await connection.commit()
        finally:
            with suppress(Exception):
                if hasattr(lease, "remaining"):
                    await self._fence.restore(connection)
            await connection.close()
