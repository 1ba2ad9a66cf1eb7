"""The simulated runtime behaves like the real ones, and its faults do what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fencelock.core.runtime import CancelGuard, Runtime
from fencelock.errors import LeaseLost, OutcomeUnknown
from fencelock.model import LossReason
from fencelock.primitives.lock import BaseLock
from fencelock.sim.clocks import RATE_ERROR, BootClock
from fencelock.sim.locks import Held, SimLease
from fencelock.sim.scheduler import Scheduler
from tests.sim.lab import Lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


def test_it_is_a_runtime(lab: Lab) -> None:
    """The type checker confirms that it implements the port, and that its guard is a CancelGuard."""
    runtime: Runtime = lab.runtime
    guard: Callable[[], CancelGuard] | None = runtime.cancel_guard
    assert runtime.process_wakeup() is None
    assert guard is not None


def test_sleep_is_never_short(lab: Lab) -> None:
    """A sleep lasts at least as long as requested, by the process's own clock."""

    async def work() -> float:
        before = lab.runtime.now()
        await lab.runtime.sleep(1.0)
        return lab.runtime.now() - before

    lab.start(work())
    (slept,) = lab.run(2)
    assert 1.0 <= slept <= 1.01


def test_clocks_differ_by_less_than_a_lease_allows_for() -> None:
    """Two clocks of a run never differ by more than the share that a deadline leaves for them."""
    assert (1 + RATE_ERROR) / (1 - RATE_ERROR) < 1.01
    clock = BootClock(Scheduler(0), 1.004, 50.0)
    assert clock.true(clock.now() + 1.004) == pytest.approx(1.0)


def test_event_wakes_and_times_out(lab: Lab) -> None:
    """A wait ends when the event is set, or when its time is over, and says which."""
    event = lab.runtime.event()

    async def work() -> list[bool]:
        first = await event.wait(0.5)
        second = await event.wait(5)
        third = await event.wait(0)
        event.clear()
        return [first, second, third, event.is_set()]

    lab.start(work())
    assert lab.run(1) == []
    event.set()
    assert lab.run(0.1) == [[False, True, True, False]]


def test_a_paused_process_runs_nothing_while_time_passes(lab: Lab) -> None:
    """While a process is paused none of its tasks run; afterwards its clock has advanced."""

    async def work() -> float:
        before = lab.runtime.now()
        await lab.runtime.sleep(1)
        return lab.runtime.now() - before

    lab.start(work())
    lab.run(0.5)
    lab.process.pause(5)
    assert lab.run(4.9) == []
    (took,) = lab.run(0.2)
    assert took > 5.3


def test_a_crashed_process_runs_no_clean_up(lab: Lab) -> None:
    """After a crash not even a finally block runs, until the end of the run closes the coroutines."""
    cleaned = []

    async def work() -> None:
        try:
            await lab.runtime.sleep(1)
        finally:
            cleaned.append(lab.process.dead)
            await lab.runtime.sleep(1)

    lab.start(work())
    lab.run(0.5)
    lab.process.crash()
    lab.run(5)
    assert cleaned == []
    lab.process.end()
    assert cleaned == [True]
    assert lab.process.tasks() == []


def test_cancelled_at_an_await(lab: Lab) -> None:
    """A cancellation is raised at the await where the task is suspended."""

    async def work() -> None:
        await lab.runtime.sleep(10)

    task = lab.start(work())
    lab.run(1)
    task.cancel()
    assert lab.run(0.1) == ["cancelled"]


def test_shield_ends_its_work_before_it_raises_the_cancellation(lab: Lab) -> None:
    """Work under a shield is not cancelled with its caller; the cancellation is raised afterwards."""
    steps = []

    async def inner() -> str:
        await lab.runtime.sleep(1)
        steps.append("done")
        return "answer"

    async def work() -> str:
        return await lab.runtime.shield(inner(), 5)

    task = lab.start(work())
    lab.run(0.5)
    task.cancel()
    lab.run(0.1)
    task.cancel()
    assert lab.run(0.2) == []
    assert lab.run(1) == ["cancelled"]
    assert steps == ["done"]


def test_shield_times_out(lab: Lab) -> None:
    """A shield lasts for its time-out, returns what its work returned, and raises what it raised."""

    async def inner(seconds: float) -> str:
        await lab.runtime.sleep(seconds)
        if seconds > 1:
            raise ValueError(seconds)
        return "answer"

    async def work() -> list[Any]:
        results: list[Any] = [await lab.runtime.shield(inner(0.1), 1)]
        for seconds in (1.5, 5):
            try:
                results.append(await lab.runtime.shield(inner(seconds), 2))
            except (ValueError, TimeoutError) as error:
                results.append(type(error))
        return results

    lab.start(work())
    assert lab.run(5) == [["answer", ValueError, TimeoutError]]
    lab.process.end()


def test_lost_request_and_lost_reply(lab: Lab) -> None:
    """A lost request and a lost reply both raise OutcomeUnknown; only the second was executed."""
    done: list[str] = []

    async def ask(what: str) -> None:
        await lab.network.request(lab.process, "engine", lambda: done.append(what))

    lab.network.partition("p1", "engine", 1)
    lab.start(ask("question"))
    assert isinstance(lab.run(1.1).pop(), OutcomeUnknown)
    lab.network.partition("engine", "p1", 1)
    lab.start(ask("answer"))
    assert isinstance(lab.run(1.1).pop(), OutcomeUnknown)
    assert done == ["answer"]


def test_a_lease_is_renewed(lab: Lab) -> None:
    """The production renewer renews a lease for many ttls, and ends when it is released."""

    async def work() -> bool:
        lease = await BaseLock(lab.client, "x").acquire()
        await lab.runtime.sleep(20)
        return await lease._release()

    lab.start(work())
    assert lab.run(19) == []
    assert [holder.owner for holder in lab.engine.store.inspect("x").holders] == ["p1"]
    assert lab.run(2) == [True]
    lab.run(3)
    assert lab.process.tasks() == []
    assert lab.engine.store.leftovers(0.0) == []


def test_loss_interrupts_the_body(lab: Lab) -> None:
    """If the engine cannot be reached, the body of a block is cancelled at the deadline, and the block raises LeaseLost."""

    async def work() -> None:
        async with Held(await BaseLock(lab.client, "x").acquire()):
            lab.network.partition("p1", "engine", 100)
            await lab.runtime.sleep(50)

    lab.start(work())
    (error,) = lab.run(3.1)
    assert isinstance(error, LeaseLost)
    assert lab.told == [LossReason.EXPIRED]


def test_the_validity_of_a_lease_is_recorded_in_true_time(lab: Lab) -> None:
    """A lease is valid until the deadline of its last answered renewal, although its process is paused then."""
    lease: list[SimLease] = []

    async def work() -> None:
        lease.append(await BaseLock(lab.client, "x", renew=False).acquire())
        await lab.runtime.sleep(50)

    lab.start(work())
    lab.run(0.1)
    lab.process.pause(30)
    lab.run(40)
    (op,) = lab.recorder.finish().ops
    assert op.valid_from is not None
    assert op.valid_until is not None
    assert 0.0 < op.valid_from < 0.03
    assert 2.9 < op.valid_until < 3.0


@pytest.mark.parametrize("step", range(1, 12))
def test_cancelled_at_every_await_of_an_acquire(lab: Lab, step: int) -> None:
    """Whichever await of a waiting acquire is cancelled, nothing is left on the engine and the next one succeeds."""

    async def hold() -> None:
        lease = await BaseLock(lab.client, "x").acquire()
        await lab.runtime.sleep(2)
        await lease._release()

    async def wait() -> None:
        lease = await BaseLock(second, "x").acquire()
        await lease._release()

    other, second = lab.add("p2")
    lab.start(hold())
    lab.run(0.1)
    waiter = other.spawn(wait(), "wait", lambda task: None)
    other.add_fault(step, lambda task: waiter.cancel())
    lab.run(4)
    assert waiter.done
    assert lab.engine.store.leftovers(0.0) == []
    lab.start(hold())
    lab.run(3)
    assert lab.log == [None, None]
