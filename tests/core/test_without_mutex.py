"""What a grant and a release do without the mutex: wherever another thread comes in between, nothing is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine
from itertools import count
from types import CodeType, FrameType
from typing import Any

import pytest

import fencelock
from fencelock.core.keeper import Keeper
from fencelock.core.lease import LeaseCore
from fencelock.worlds.blocking import BlockingWorld

BLOCKED = 0.02
"""Seconds after which a thread that did not end is taken to wait for the mutex."""


def amid(work: Callable[[], Any], code: CodeType, step: int, other: Callable[[], Any]) -> tuple[Any, Any, bool]:
    """Do the work, and the other in another thread when the code has come to a step; return both results, and if it has."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(other()))
    left = step

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode":
            left -= 1
            if left == 0:
                thread.start()
                thread.join(BLOCKED)
        return trace

    sys.settrace(trace)
    try:
        result = work()
    finally:
        sys.settrace(None)
    begun = left <= 0
    if not begun:
        thread.start()
    thread.join()
    return result, results[0], begun


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers plan, but nobody acts on it."""

    def spawn(_: BlockingWorld, work: Coroutine[Any, Any, None], name: str) -> None:
        work.close()

    monkeypatch.setattr(BlockingWorld, "spawn", spawn)


@pytest.mark.usefixtures("no_keeper")
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("past", [False, True])
def test_lease_that_comes_amid_a_plan(others: int, past: bool) -> None:
    """A lease is planned for, or its keeper is woken or begins anew, whatever step of a plan it comes at."""
    for step in count(1):
        with fencelock.connect(f"memory://amid-{others}-{past}-{step}") as locks:
            keeper = locks._client.keeper
            held = [locks.lock("long", ttl=60).acquire() for _ in range(others)]
            if not held:
                locks.lock("gone", ttl=60).acquire().release()
            if past:
                keeper._planned = 0.0  # it has just woken up as it had planned

            def plan(keeper: Keeper = keeper, locks: fencelock.Locks = locks) -> None:
                with locks._client.mutex:
                    if keeper._plan() is None:
                        assert keeper._wake is not None
                        keeper._ended(keeper._wake)

            short = locks.lock("short", ttl=0.3)
            _, lease, begun = amid(plan, Keeper._plan.__code__, step, short.acquire)
            woken = keeper._wake is not None and keeper._wake.is_set()
            assert woken or keeper._planned <= lease._due, f"at step {step} the lease was overlooked"
            if not begun:
                assert step > 20
                return


@pytest.mark.parametrize("amid_release", [True, False])
def test_holder_that_comes_as_another_leaves(amid_release: bool) -> None:
    """Whoever enters a lease while another thread releases it has it, or is told that it is too late."""
    outcomes = set()
    for step in count(1):
        with fencelock.connect(f"memory://leaving-{amid_release}-{step}") as locks:
            lease = locks.lock("x").acquire()
            if amid_release:
                ours, entered, begun = amid(lease.release, LeaseCore._give_back.__code__, step, lease._again)
            else:
                entered, ours, begun = amid(lease._again, LeaseCore._again.__code__, step, lease.release)
            judge(locks, lease, ours, entered)
            outcomes.add(entered)
            if not begun:
                break
    assert step > 20
    assert outcomes == {True, False}


def judge(locks: fencelock.Locks, lease: fencelock.Lease, ours: bool, entered: bool) -> None:
    """See that the lease is held by whoever entered it, and by nobody else."""
    assert ours
    assert bool(locks.inspect("x").holders) == entered
    assert (lease.remaining > 0) == entered
    assert (lease.id in locks._client.keeper) == entered
    assert lease.release() == entered
    assert not locks.inspect("x").holders
    assert not locks._client.under_way


def test_two_releases_at_once() -> None:
    """One of two threads that release a lease does it, whatever step the other comes at."""
    for step in count(1):
        with fencelock.connect(f"memory://twice-{step}") as locks:
            lease = locks.lock("x").acquire()
            first, second, begun = amid(lease.release, LeaseCore._give_back.__code__, step, lease.release)
            assert first != second, f"at step {step} it was released {first + second} times"
            assert lease.reason is None
            assert not locks._client.under_way
            if not begun:
                break
