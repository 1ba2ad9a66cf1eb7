"""Interleavings that lock libraries get wrong: something happens at every await of a call, one await after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from fencelock.core.group import BaseGroup
from fencelock.model import Claim, Mode
from fencelock.primitives.lock import BaseLock
from fencelock.primitives.multi import BaseMultiLock, modes_of
from fencelock.sim.check import Invariants, check
from fencelock.sim.locks import Held, SimClient
from tests.sim import variants
from tests.sim.lab import Lab

STEPS = 40
"""More awaits than any of the calls below has."""


def at_each_step(play: Callable[[Lab, int], bool]) -> int:
    """Play with a fault at step 1, 2, …, until the step is never reached; return how many steps there were."""
    for step in range(1, STEPS):
        lab = Lab(step)
        try:
            if not play(lab, step):
                return step - 1
        finally:
            lab.close()
    pytest.fail(f"a call has more than {STEPS} steps")


async def hold(client: SimClient, seconds: float, mode: Mode = Mode.EXCLUSIVE) -> int:
    """Acquire, hold the lock for a while, and release it."""
    async with Held(await BaseLock(client, "x", mode).acquire()) as lease:
        await client.runtime.sleep(seconds)
        return lease.token


def violations(lab: Lab, free_at_most: float = 10.0) -> list[str]:
    return [str(violation) for violation in check(lab.recorder.finish(), Invariants(free_at_most=free_at_most))]


def test_release_at_every_moment_of_an_acquire() -> None:
    """Whenever the holder's release reaches the engine, the waiter gets the lock soon: no wake-up is missed."""
    for moment in range(60):
        lab = Lab(moment)
        process, waiter = lab.add("p2")
        claim = Claim("x", 30.0)
        assert lab.engine.store.attempt(claim, enqueue=False).token is not None
        lab.start(hold(waiter, 0.0), process)
        lab.scheduler.after(moment / 1000, partial(lab.engine.store.release, claim))
        lab.run(moment / 1000 + 0.2)
        got = list(lab.log)
        lab.close()
        assert got, f"the waiter has not got the lock, which was released after {moment} ms"


def test_a_waiter_that_is_stopped_for_longer_than_its_ttl() -> None:
    """At whichever await a waiter is stopped: if its claim expires, it does not win later, but queues again."""

    def play(lab: Lab, step: int) -> bool:
        process, waiter = lab.add("p2")
        other, third = lab.add("p3")
        stopped = []

        def stop(_: object) -> None:
            stopped.append(lab.scheduler.time)
            process.pause(7.0)

        process.add_fault(step, stop)
        lab.start(hold(lab.client, 1.0))
        lab.run(0.1)
        lab.start(hold(waiter, 1.0), process)
        lab.start(hold(third, 5.0), other)
        lab.run(25.0)
        assert len(lab.log) == 3
        assert violations(lab) == []
        return bool(stopped)

    assert at_each_step(play) >= 5


def test_a_reader_that_is_stopped_for_longer_than_its_ttl() -> None:
    """At whichever await a reader is stopped: its late renewal does not bring it back beside the writer behind it."""

    def play(lab: Lab, step: int) -> bool:
        process, writer = lab.add("p2")
        stopped = []

        def stop(_: object) -> None:
            stopped.append(lab.scheduler.time)
            lab.process.pause(4.0)

        lab.process.add_fault(step, stop)
        lab.start(hold(lab.client, 6.0, Mode.SHARED))
        lab.run(0.5)
        lab.start(hold(writer, 2.0), process)
        lab.run(30.0)
        assert len(lab.log) == 2
        assert violations(lab) == []
        return bool(stopped)

    assert at_each_step(play) >= 5


async def hold_all(client: SimClient, names: tuple[str, ...], seconds: float) -> int:
    """Acquire a multi-lock, hold it for a while, and release it."""
    multi: BaseMultiLock[BaseGroup] = BaseMultiLock(client, BaseGroup, modes_of(names, (), ()))
    async with Held(await multi.acquire()) as group:
        await client.runtime.sleep(seconds)
        return len(group)


@pytest.mark.parametrize("between", [None, 1, 2, 3, 4])
def test_multi_lock_cancelled_at_every_await(between: int | None) -> None:
    """Whichever await of a multi-lock is cancelled, and cancelled again some awaits later, it leaves nothing behind."""

    def play(lab: Lab, step: int) -> bool:
        process, other = lab.add("p2")
        cancelled = []

        def cancel(_: object) -> None:
            cancelled.append(lab.scheduler.time)
            task.cancel()

        lab.start(hold_all(other, ("b",), 0.5), process)
        lab.run(0.1)
        lab.process.add_fault(step, cancel)
        if between is not None:
            lab.process.add_fault(step + between, cancel)
        task = lab.start(hold_all(lab.client, ("c", "a", "b"), 0.1))
        lab.run(1.5)
        assert task.done
        assert lab.engine.store.leftovers(0.0) == []
        lab.start(hold_all(other, ("a", "b", "c"), 0.0), process)
        lab.run(0.3)
        assert lab.log[-1] == 3
        return bool(cancelled)

    assert at_each_step(play) >= 8


SEEN: dict[Callable[[], AbstractContextManager[None]], Callable[[], None]] = {
    variants.cancelled_release_of_a_group_stops: lambda: test_multi_lock_cancelled_at_every_await(None),
    variants.failed_multi_keeps_its_leases: lambda: test_multi_lock_cancelled_at_every_await(None),
    variants.wakeups_are_missed: test_release_at_every_moment_of_an_acquire,
    variants.late_grant_is_believed: test_a_waiter_that_is_stopped_for_longer_than_its_ttl,
    variants.dead_reader_is_renewed: test_a_reader_that_is_stopped_for_longer_than_its_ttl,
}


@pytest.mark.parametrize("variant", SEEN, ids=lambda variant: variant.__name__)
def test_the_interleavings_find_the_mistake(variant: Callable[[], AbstractContextManager[None]]) -> None:
    """Each of these tests fails if the code has the mistake that the test is there for."""
    with variant(), pytest.raises(AssertionError):
        SEEN[variant]()
