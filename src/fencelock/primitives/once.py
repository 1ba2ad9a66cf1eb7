"""`once`: one run per name and slot in the whole fleet. A lock keeps others out, and a record remembers the run."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from datetime import datetime
from typing import Generic, Unpack

from fencelock.core.acquire import attach_name
from fencelock.core.block import take_last
from fencelock.core.client import Client, L
from fencelock.core.records import Record, records_of
from fencelock.core.validation import check_seconds
from fencelock.errors import InvalidArgument, LeaseLost
from fencelock.primitives import runs
from fencelock.primitives.keys import slot_key
from fencelock.primitives.lock import BaseLock, CommonOptions
from fencelock.primitives.runs import ClaimedRun, Outcome, Run

MIN_KEEP = 60.0
KEEP = 90 * 86400.0


class BaseOnce(Generic[L]):
    """`once` of both APIs, as coroutines. It checks its arguments when it is made."""

    def __init__(
        self,
        client: Client[L],
        name: str,
        slot: str,
        *,
        keep: float = KEEP,
        attempts: int = 1,
        again: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        self.name = name
        self.slot = slot
        self._client = client
        self._key = slot_key("once", name, slot)
        self._records = records_of(client.engine, f"once({name!r})", name)
        seconds = check_seconds(keep, "keep", name, zero=False)
        if seconds is None or seconds < MIN_KEEP:
            raise InvalidArgument(f"{name!r}: keep must be at least {MIN_KEEP:g} seconds, not {keep!r:.40}", name)
        self._keep = seconds
        self._attempts = runs.check_attempts(attempts, name)
        self._again = again
        self._lock = BaseLock(client, self._key, timeout=0.0, **options)
        self.current_task = client.runtime.current_task
        self._entered: list[tuple[Hashable, ClaimedRun[L] | None]] = []

    async def begin(self) -> ClaimedRun[L] | None:
        """Claim the slot and record that; return None if it ran, has no attempt left, or is running elsewhere."""
        if not self._may_run(self._decode(await self._read())):
            return None
        task = self.current_task()
        lease = await self._lock.try_acquire()
        if lease is None:
            return None
        lease._blocks.enter(lease, task)
        try:
            block = await self._claim(lease)
            if block is not None:
                lease.check()  # a job must not start under a lease that ended during the write
                return block
        except BaseException as error:
            await lease._exit_block(error)
            raise
        with suppress(LeaseLost):
            await lease._exit_block(None)
        return None

    async def _claim(self, lease: L) -> ClaimedRun[L] | None:
        while True:
            record = await self._read()
            last = self._decode(record)
            if last is not None and last.outcome is Outcome.RUNNING:
                last = last._replace(outcome=Outcome.ABANDONED)  # this lease is the only one, so its worker is gone
            if not self._may_run(last):
                return None
            attempt = 1 if last is None else last.attempt + 1
            run = runs.new_run(self.name, self.slot, None, attempt, lease, self.now())
            expect = 0 if record is None else record.version
            written = await runs.write_and_resolve(
                self._client, self._records, lease, _encoded(run), self._keep, expect
            )
            if written is not None:
                return ClaimedRun(self._records, lease, run, written.version, _encoded, self._keep)
            lease.check()  # a worker that lost its lease has recorded its outcome meanwhile, or a new holder has claimed

    def _may_run(self, last: Run | None) -> bool:
        """Return whether a slot may run. Without the lock, nobody knows whether a run in progress has been abandoned."""
        if last is None or last.outcome is Outcome.RUNNING:
            return last is None or self._again or last.attempt < self._attempts
        return self._again or (last.outcome is not Outcome.SUCCEEDED and last.attempt < self._attempts)

    async def run(self, work: Callable[[L, Run], Awaitable[object]]) -> bool:
        """Call `work` if the slot is free to run; return whether it ran."""
        claimed = await self.begin()
        if claimed is None:
            return False
        if (error := await claimed.perform(work, self.now)) is not None:
            raise error
        return True

    async def enter(self) -> ClaimedRun[L] | None:
        """Begin a `with` block."""
        block = await self.begin()
        self._entered.append((self.current_task(), block))
        return block

    async def leave(self, error: BaseException | None, popped: list[ClaimedRun[L] | None] | None = None) -> None:
        """End the last `with` block of this thread or task.

        It is in `popped` before it is removed: a caller that Ctrl-C interrupts finds it there, or with `pop_own_block`.
        """
        _, block = take_last(self._entered, self.current_task, popped)
        if block is not None:
            await block.end(error, self.now())

    def pop_own_block(self) -> ClaimedRun[L] | None:
        """Remove and return the run of the last `with` block of this thread or task, or None."""
        task = self.current_task()
        if all(entered != task for entered, _ in self._entered.copy()):
            return None
        return take_last(self._entered, self.current_task)[1]

    async def _read(self) -> Record | None:
        self._client._check_open(self.name)
        with attach_name(self._key):
            return await self._records.read(self._key)

    def _decode(self, record: Record | None) -> Run | None:
        return None if record is None else runs.decode(self.name, json.loads(record.value), self.slot)

    def now(self) -> datetime:
        """Return the time by the wall clock, for what people read later; it decides nothing."""
        return runs.as_datetime(int(time.time() * 1e6))


def _encoded(run: Run) -> bytes:
    return json.dumps(runs.encode(run), ensure_ascii=False).encode(errors="replace")
