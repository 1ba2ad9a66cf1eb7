"""The engine over the database: first come, first served; the lock is handed over, and the next holder's bell rung."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, TypeVarTuple

from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT, reply_timeout
from fencelock.core.runtime import ProcessWakeup, Runtime
from fencelock.core.wakeup import WakeupSender
from fencelock.engines.sqlite.database import Database, Occupied
from fencelock.engines.sqlite.queue import Queue, Taken
from fencelock.engines.sqlite.records import SqliteRecords
from fencelock.errors import EngineUnavailable
from fencelock.model import (
    Claim,
    Grant,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiting,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TRAITS = Traits(engine="sqlite", guarantee=TokenGuarantee.DURABLE, fair=True, push=True, loss_pushed=False)

OCCUPIED_SLICE = 0.1
"""How long a thread waits for the write lock before it looks up: the longest that a cancellation has to wait."""
OCCUPIED_PATIENCE = 10.0
POLL_WITH_BELL = 1.0
POLL_FIRST, POLL_LAST = 0.002, 0.1
ABANDONED_KEPT = 10_000
"""How many claims are remembered as given up: as many as may be waiting when a client is closed."""


class SqliteEngine:
    """`fencelock.core.engine.Backend` on a SQLite database."""

    traits = TRAITS
    url: str | None = None
    """What the default URL stands for; None if a path was given."""

    def __init__(self, runtime: Runtime, database: Database, namespace: str) -> None:
        self._runtime = runtime
        self._database = database
        self._queue = Queue(database, namespace, self._bell)
        self._bells: dict[str, ProcessWakeup | None] = {}
        self._wakeup_sender = WakeupSender()
        self.records = SqliteRecords(self._read, self._keep, database.mint, namespace)

    # ------------------------------------------------------------------ the protocol

    async def attempt(
        self,
        claim: Claim,
        *,
        queue: bool,
        patience: float | None = None,
        ticket: int | None = None,
    ) -> Grant | Waiting:
        """Take the lock or a place in line, in one transaction."""
        sent = self._runtime.now()
        rings: list[str] = []
        first = ticket is None
        try:
            try:
                taken: Taken | None = self._database.write(0, self._queue.take, rings, claim, queue, ticket)
            except Occupied:
                taken = None  # and out of this block, so that no error to come has this one as its context
            if taken is None:
                seconds = OCCUPIED_PATIENCE if patience is None else max(patience, MIN_REPLY_TIMEOUT)
                taken = await self._later(min(seconds, OCCUPIED_PATIENCE), self._queue.take, claim, queue, ticket)
        except BaseException:
            if first:
                self._silence(claim)  # it has no place in line to be called from
            raise
        token, ticket, retry_in = taken
        if rings:
            self._ring(rings)
        if token is None:
            return Waiting(claim, sent, retry_in, ticket)
        if self._bells:
            self._silence(claim)
        return Grant(claim, token, sent, ticket)

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Sleep until the bell rings; look now and then, as rings may get lost."""
        claim, ticket = waiting.claim, waiting.handle
        bell = self._bells.get(claim.id)
        if waiting.retry_in is not None:
            timeout = min(timeout, waiting.retry_in)
        end = None if patience is None else self._runtime.now() + patience
        until = Deadline(self._runtime.now, timeout)
        poll = POLL_FIRST
        while not until.passed:
            if bell is not None:
                await bell.wait(until.at_most(POLL_WITH_BELL))
            else:
                await self._runtime.sleep(until.at_most(poll * (0.5 + self._runtime.random() / 2)))
                poll = min(poll * 2, POLL_LAST)
            found = await self._read(self._queue.peek, claim, ticket)
            if found is None or found[1]:
                break
            if found[0] is not None:
                self._silence(claim)
                return Grant(claim, found[0], waiting.since, ticket)
        left = None if end is None else end - self._runtime.now()
        return await self.attempt(claim, queue=True, patience=left, ticket=ticket)

    async def abandon(self, claim: Claim) -> None:
        """Leave the queue, or give back the lock."""
        # close() abandons what other threads and tasks still ask for: they must not line up again behind its back.
        self._queue.abandoned[claim.id] = None
        if len(self._queue.abandoned) > ABANDONED_KEPT:
            self._queue.abandoned.pop(next(iter(self._queue.abandoned)), None)
        self._silence(claim)
        await self._write(self._queue.leave, claim, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all in one transaction."""
        rings: list[str] = []
        try:
            return self._database.write(0, self._queue.renew, rings, grants)
        except Occupied:
            pass
        seconds = min(reply_timeout(grant.claim.ttl, MIN_REPLY_TIMEOUT) for grant in grants)
        return await self._later(seconds, self._queue.renew, grants)

    async def release(self, grant: Grant) -> bool:
        """Give back the lock and hand it over, in one transaction."""
        rings: list[str] = []
        try:
            released = self._database.write(0, self._queue.leave, rings, grant.claim, grant.handle)
        except Occupied:
            pass
        else:
            if rings:
                self._ring(rings)
            return released
        return await self._later(OCCUPIED_PATIENCE, self._queue.leave, grant.claim, grant.handle)

    async def inspect(self, name: str) -> Snapshot:
        """Read the queue."""
        return await self._read(self._queue.snapshot, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for name in await self._read(self._queue.names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders, skip a token, hand over."""
        return await self._write(self._queue.force, name)

    async def close(self) -> None:
        """Close the connection; the last one out tidies the log, which may take a sync."""
        await self._runtime.run_blocking(self._database.close)
        self._wakeup_sender.close()
        self._close_bells()

    def before_fork(self) -> None:
        """Have no connection open."""
        self._database.before_fork()

    def after_fork(self, *, child: bool) -> None:
        """Open anew when needed."""
        self._database.after_fork(child=child)
        if child:
            self._close_bells()
            self._wakeup_sender.close()
            self._wakeup_sender = WakeupSender()

    # ------------------------------------------------------------------ bells, and running a step

    def _bell(self, claim: Claim) -> str | None:
        if claim.id not in self._bells:
            try:
                self._bells[claim.id] = self._runtime.process_wakeup()
            except OSError:  # no descriptor left: look now and then instead
                self._bells[claim.id] = None
        bell = self._bells[claim.id]
        return None if bell is None else bell.address

    def _silence(self, claim: Claim) -> None:
        bell = self._bells.pop(claim.id, None)
        if bell is not None:
            bell.close()

    def _close_bells(self) -> None:
        for id in list(self._bells):
            if (bell := self._bells.pop(id, None)) is not None:
                bell.close()

    async def _later(self, seconds: float, step: Callable[[sqlite3.Cursor, list[str], *Ts], T], *args: *Ts) -> T:
        """Run a step where it may wait for other processes, for so long."""
        rings: list[str] = []
        try:
            return await self._insist(seconds, self._database.write, step, rings, *args)
        finally:
            self._ring(rings)  # also if we are cancelled: by then the step is done

    def _ring(self, rings: list[str]) -> None:
        """Ring whom a step handed a lock. One ring too many, after a step that was rolled back, does no harm."""
        for address in rings:
            self._wakeup_sender.ring(address)

    async def _write(self, step: Callable[[sqlite3.Cursor, list[str], *Ts], T], *args: *Ts) -> T:
        """Run a step right here, which is shorter than a change of threads, or later if somebody is in the way."""
        rings: list[str] = []
        try:
            result = self._database.write(0, step, rings, *args)
        except Occupied:
            pass
        else:
            self._ring(rings)
            return result
        return await self._later(OCCUPIED_PATIENCE, step, *args)

    async def _read(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        try:
            return self._database.read(0, step, *args)
        except Occupied:
            pass
        return await self._insist(OCCUPIED_PATIENCE, self._database.read, step, *args)

    async def _keep(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        """Run a step that a power cut must not undo: where a sync holds up nobody."""
        return await self._insist(OCCUPIED_PATIENCE, self._database.keep, step, *args)

    async def _insist(self, seconds: float, action: Callable[[float, *Ts], T], *args: *Ts) -> T:
        until = Deadline(self._runtime.now, seconds)
        while True:
            try:
                return await self._runtime.run_blocking(action, OCCUPIED_SLICE, *args)
            except Occupied as error:
                if until.passed:
                    raise EngineUnavailable(
                        f"{self._database.path}: another process has kept it locked for {seconds:.3g} s; is one "
                        "stopped in the middle of a transaction?"
                    ) from error.__cause__
