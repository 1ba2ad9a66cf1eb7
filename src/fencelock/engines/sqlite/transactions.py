"""Runs steps in transactions: in the caller's thread if nothing is in the way, otherwise in another one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Runtime
from fencelock.engines.sqlite.database import Database, DatabaseBusy
from fencelock.errors import EngineUnavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BUSY_SLICE = 0.1
"""Seconds that a thread waits for the write lock at a time. A cancellation waits for that long at most."""
BUSY_TIMEOUT = 10.0
"""Seconds to wait for the write lock in all, unless the caller has less time."""


class Transactions:
    """The coroutines behind which `Database` works."""

    def __init__(self, runtime: Runtime, database: Database) -> None:
        self._runtime = runtime
        self._database = database

    async def read(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step that only reads."""
        return await self._run(BUSY_TIMEOUT, self._database.read, step, *args)

    async def write(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts, seconds: float = BUSY_TIMEOUT) -> T:
        """Run a step in a transaction. Raise EngineUnavailable if another one is in the way for that many seconds."""
        return await self._run(seconds, self._database.write, step, *args)

    async def write_synced(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step in a transaction that a power cut does not undo."""
        return await self._run(BUSY_TIMEOUT, self._database.write_synced, step, *args)

    async def _run(self, seconds: float, action: Callable[[float, *Ts], T], *args: *Ts) -> T:
        try:
            return action(0, *args)  # a change of threads would take longer than the transaction
        except DatabaseBusy:
            pass  # continue after the block, so that later errors do not have this one as their context
        until = Deadline(self._runtime.now, seconds)
        while True:
            try:
                return await self._runtime.run_blocking(action, BUSY_SLICE, *args)
            except DatabaseBusy as error:
                if until.passed:
                    raise EngineUnavailable(
                        f"{self._database.path}: another process has kept it locked for {seconds:.3g} s; is one "
                        "stopped in the middle of a transaction?"
                    ) from error.__cause__
