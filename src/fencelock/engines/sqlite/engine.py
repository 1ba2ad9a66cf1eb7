"""The engine on the database: first come, first served; a release grants the lock to the next waiter and wakes it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, TypeVarTuple

from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT, not_held, reply_timeout
from fencelock.core.runtime import ProcessWakeup, Runtime
from fencelock.core.wakeup import WakeupSender
from fencelock.engines.sqlite.database import Database
from fencelock.engines.sqlite.queue import Queue
from fencelock.engines.sqlite.rates import SqliteRates
from fencelock.engines.sqlite.records import SqliteRecords
from fencelock.engines.sqlite.transactions import BUSY_TIMEOUT, Transactions
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TRAITS = Traits(engine="sqlite", guarantee=TokenGuarantee.DURABLE, fair=True, loss_pushed=False)

POLL_WITH_WAKEUP = 1.0
POLL_FIRST, POLL_LAST = 0.002, 0.1
ABANDONED_KEPT = 10_000
"""How many abandoned claims are remembered: more than wait at the same time when a client is closed."""


class SqliteEngine:
    """`fencelock.core.engine.Engine` on a SQLite database."""

    traits = TRAITS
    url: str | None = None
    """The URL with the absolute path, for messages."""

    def __init__(self, runtime: Runtime, database: Database, namespace: str) -> None:
        self._runtime = runtime
        self._database = database
        self._queue = Queue(database, namespace, self._wakeup_address)
        self._wakeups: dict[str, ProcessWakeup | None] = {}
        """What wakes each waiting claim, by its id; None if there is no descriptor for it."""
        self._wakeup_sender = WakeupSender()
        self._transactions = Transactions(runtime, database)
        self.rates = SqliteRates(self._transactions, database.now, namespace)
        self.records = SqliteRecords(self._transactions, database.mint, namespace)

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock or enqueue the claim, in one transaction."""
        sent = self._runtime.now()
        is_enqueued = claim.id in self._wakeups
        seconds = deadline.at_most(BUSY_TIMEOUT)
        try:
            token, ticket, retry_in = await self._write(self._queue.attempt, claim, enqueue, seconds=seconds)
        except BaseException:
            if not is_enqueued:
                self._close_wakeups(claim.id)  # the transaction that would have enqueued the claim failed
            raise
        if token is None:
            return Waiting(claim, sent, retry_in, ticket)
        self._close_wakeups(claim.id)
        return Grant(claim, token, sent, ticket)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait for the wake-up; read the queue now and then, as a wake-up may be lost."""
        claim, ticket = waiting.claim, waiting.engine_state
        wakeup = self._wakeups.get(claim.id)
        until = Deadline(self._runtime.now, timeout)
        poll = POLL_FIRST
        while not until.passed:
            if wakeup is not None:
                await wakeup.wait(until.at_most(POLL_WITH_WAKEUP))
            else:
                await self._runtime.sleep(until.at_most(poll * (0.5 + self._runtime.random() / 2)))
                poll = min(poll * 2, POLL_LAST)
            found = await self._transactions.read(self._queue.peek, claim, ticket)
            if found is None or found[1]:
                break  # the claim or a holder has expired
            if found[0] is not None:
                self._close_wakeups(claim.id)
                return Grant(claim, found[0], waiting.since, ticket)
        return None

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        # close() abandons claims that other threads and tasks still attempt: they must not enqueue them again.
        self._queue.abandoned[claim.id] = None
        if len(self._queue.abandoned) > ABANDONED_KEPT:
            self._queue.abandoned.pop(next(iter(self._queue.abandoned)), None)
        self._close_wakeups(claim.id)
        await self._write(self._queue.abandon, claim)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all in one transaction."""
        seconds = min(reply_timeout(grant.claim.ttl, MIN_REPLY_TIMEOUT) for grant in grants)
        return await self._transactions.write(self._queue.renew, grants, seconds=seconds)

    async def release(self, grant: Grant) -> bool:
        """Release the lock and grant it to the next waiter, in one transaction."""
        return await self._write(self._queue.release, grant)

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one and admit the readers behind it, in one transaction."""
        sent = self._runtime.now()
        if not await self._write(self._queue.downgrade, grant):
            raise not_held(grant)
        return grant.downgraded(sent)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return await self._transactions.read(self._queue.snapshot, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over the names that were in use at the time of the call."""
        for name in await self._transactions.read(self._queue.names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Remove the holders, skip a token, and grant the lock to the next waiter."""
        return await self._write(self._queue.force_release, name)

    async def close(self) -> None:
        """Close the connection. The last one of all processes moves the log into the database, which may sync."""
        await self._runtime.run_blocking(self._database.close)
        self._wakeup_sender.close()
        self._close_wakeups(*self._wakeups)

    def before_fork(self) -> None:
        """Close the connection before the fork."""
        self._database.before_fork()

    def after_fork_in_parent(self) -> None:
        """Allow a new connection."""
        self._database.after_fork_in_parent()

    def after_fork(self) -> None:
        """Drop the parent's wake-ups, and open a new connection when one is needed."""
        self._database.after_fork()
        self._close_wakeups(*self._wakeups)
        self._wakeup_sender.close()
        self._wakeup_sender = WakeupSender()

    # ------------------------------------------------------------------ wake-ups

    def _wakeup_address(self, claim: Claim) -> str | None:
        if claim.id not in self._wakeups:
            try:
                self._wakeups[claim.id] = self._runtime.process_wakeup()
            except OSError:  # no free descriptor: the wait polls instead
                self._wakeups[claim.id] = None
        wakeup = self._wakeups[claim.id]
        return None if wakeup is None else wakeup.address

    def _close_wakeups(self, *ids: str) -> None:
        for id in ids:
            if (wakeup := self._wakeups.pop(id, None)) is not None:
                wakeup.close()

    async def _write(
        self, step: Callable[[sqlite3.Cursor, list[str], *Ts], T], *args: *Ts, seconds: float = BUSY_TIMEOUT
    ) -> T:
        """Run a step of the queue, and wake the claims that it granted the lock."""
        wakeups: list[str] = []
        try:
            return await self._transactions.write(step, wakeups, *args, seconds=seconds)
        finally:
            # Also after a cancellation: the step is done by then. A wake-up after a rolled-back step does no harm.
            for address in wakeups:
                self._wakeup_sender.wake(address)
