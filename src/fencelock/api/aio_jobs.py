"""The asyncio API of jobs: `once` and `schedule`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from functools import update_wrapper
from types import TracebackType
from typing import Any

from fencelock.api.aio_lock import Lease, Lost
from fencelock.core.validation import check_coroutine_function
from fencelock.core.watch import StopSignal, check_stop
from fencelock.primitives.api_hints import AsyncioOnly, NoBlock
from fencelock.primitives.once import BaseOnce
from fencelock.primitives.runs import Run
from fencelock.primitives.schedule import BaseSchedule


class Slot:
    """A slot that this process runs now. Its lease is renewed until the work ends.

    >>> from fencelock.aio import connect
    >>> async def main():
    ...     async with connect("memory://aio-slot") as locks, locks.once("billing", "2026-07-01") as slot:
    ...         return slot.slot, slot.attempt, slot.token > 0, slot.lost.is_set()
    >>> asyncio.run(main())
    ('2026-07-01', 1, True, False)
    """

    __slots__ = ("_lease", "_run")

    def __init__(self, lease: Lease, run: Run) -> None:
        self._lease = lease
        self._run = run

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._run.name

    @property
    def slot(self) -> str:
        """The slot: the text that `once` was given, or the time of a schedule's slot, as in 2026-07-01T02:00:00Z."""
        return self._run.slot

    @property
    def time(self) -> datetime | None:
        """The time of a schedule's slot, in UTC; the time of the call for `trigger`; None for `once`."""
        return self._run.time

    @property
    def attempt(self) -> int:
        """1 for the first run of the slot; more if earlier ones failed or were abandoned."""
        return self._run.attempt

    @property
    def token(self) -> int:
        """The fencing token: above the token of every earlier run."""
        return self._lease.token

    @property
    def lease(self) -> Lease:
        """The lease of the run, for fences."""
        return self._lease

    @property
    def lost(self) -> Lost:
        """The event that the lease is lost; the work is cancelled then. `is_set()`, its truth value, and `wait(timeout)`."""
        return self._lease.lost

    def check(self) -> None:
        """Raise LeaseLost if the lease is lost."""
        self._lease.check()

    def __repr__(self) -> str:
        return f"<Slot {self.name!r} {self.slot} attempt={self.attempt} token={self.token}>"


class Once(AsyncioOnly):
    """One run per name and slot in the whole fleet. The `with` block gets a Slot, or None if it must not run.

    >>> from fencelock.aio import connect
    >>> async def bill(slot):
    ...     pass
    >>> async def main():
    ...     async with connect("memory://aio-once") as locks:
    ...         billing = locks.once("billing", "2026-07-01")
    ...         return await billing.run(bill), await billing.run(bill)
    >>> asyncio.run(main())
    (True, False)
    """

    __slots__ = ("_once",)

    def __init__(self, once: BaseOnce[Lease]) -> None:
        self._once = once

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._once.name

    @property
    def slot(self) -> str:
        """The slot."""
        return self._once.slot

    async def run(self, work: Callable[[Slot], Awaitable[object]]) -> bool:
        """Call `work(slot)` unless the slot ran or is running elsewhere; return whether this call ran it.

        If `work` raises, the run counts as failed and the error comes out.
        """
        check_coroutine_function(work, "work", "slot")
        return await self._once.run(_caller(work))

    async def __aenter__(self) -> Slot | None:
        claimed = await self._once.enter()
        return None if claimed is None else Slot(claimed.lease, claimed.run)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._once.leave(error)

    def __repr__(self) -> str:
        return f"<Once {self.name!r} {self.slot}>"


class Schedule(NoBlock):
    """A job that runs once per slot in the whole fleet.

    >>> from fencelock.aio import connect
    >>> async def report(slot):
    ...     pass
    >>> async def main():
    ...     async with connect("memory://aio-schedule") as locks:
    ...         hourly = locks.schedule("report", every=3600)
    ...         runs = await hourly.run_due(report)
    ...         return [run.outcome.value for run in runs], await hourly.run_due(report)
    >>> asyncio.run(main())
    (['succeeded'], [])
    """

    __slots__ = ("_schedule",)

    def __init__(self, schedule: BaseSchedule[Lease]) -> None:
        self._schedule = schedule

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self._schedule.name

    async def run(self, work: Callable[[Slot], Awaitable[object]], stop: StopSignal | None = None) -> None:
        """Call `work(slot)` for each slot when it is due and no other process has it, until `stop` is set.

        Errors of `work` are logged and recorded, and the schedule goes on. While the engine cannot be reached, nothing runs:
        that is logged, and the slot is retried within `within`. `stop` never interrupts `work`; its task is
        cancelled when the lease is lost.
        """
        check_coroutine_function(work, "work", "slot")
        await self._schedule.run(_caller(work), check_stop(stop))

    async def run_due(self, work: Callable[[Slot], Awaitable[object]], *, early: float = 30.0) -> list[Run]:
        """Run what is due now, and return it: for crontab, APScheduler, Celery or Kubernetes.

        A slot up to `early` seconds ahead is due if it is nearer than the one before: the caller may follow another clock. If
        `work` raises, the first error comes out after all due slots have run. An engine that cannot be reached is an error,
        and nothing runs.
        """
        check_coroutine_function(work, "work", "slot")
        return await self._schedule.run_due(_caller(work), early)

    async def trigger(self, work: Callable[[Slot], Awaitable[object]]) -> Run | None:
        """Run now, beside the slots. With overlap="skip", return None if another run is in progress; else wait for it."""
        check_coroutine_function(work, "work", "slot")
        return await self._schedule.trigger(_caller(work))

    async def history(self, limit: int = 20) -> list[Run]:
        """Return the last runs, newest first: where, when, and how they ended. At most 50 are kept."""
        return await self._schedule.history(limit)

    def next(self) -> datetime:
        """Return the time of the next slot in UTC, by this machine's clock. It asks no server.

        A slot that `run_due` of this object ran early, or found to have run early, is not the next one.
        """
        return self._schedule.next()

    def __call__(self, work: Callable[[Slot], Awaitable[object]]) -> Callable[[], Coroutine[Any, Any, list[Run]]]:
        """Decorate a function of a slot: each call of the result runs what is due, as `run_due` does."""
        check_coroutine_function(work, "work", "slot")

        async def call() -> list[Run]:
            return await self.run_due(work)

        return _named_after(work, call)

    def __repr__(self) -> str:
        return f"<Schedule {self.name!r}>"


def _caller(work: Callable[[Slot], Awaitable[object]]) -> Callable[[Lease, Run], Awaitable[object]]:
    async def call(lease: Lease, run: Run) -> None:
        await work(Slot(lease, run))

    return call


def _named_after(
    work: Callable[[Slot], Awaitable[object]], call: Callable[[], Coroutine[Any, Any, list[Run]]]
) -> Callable[[], Coroutine[Any, Any, list[Run]]]:
    """Name a function after the one that it calls, but for the signature: schedulers look at it."""
    update_wrapper(call, work, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del call.__wrapped__  # type: ignore[attr-defined]
    return call
