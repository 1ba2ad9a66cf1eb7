"""Dedicated sessions, one per claim: exclusive use, interrupts, and the removal of idle ones."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from fencelock.core.clock import Deadline
from fencelock.core.dedicated import SWEEP_AT, DedicatedSession, DedicatedSessions
from fencelock.core.runtime import Runtime
from fencelock.model import Claim
from fencelock.runtime.asyncio import AsyncioRuntime
from fencelock.runtime.blocking import BlockingRuntime, run_sync


class Chair(DedicatedSession):
    """A seat without a server."""

    def __init__(self, runtime: Runtime, *, silent: bool = True, alive: bool = True) -> None:
        super().__init__(runtime, Claim("x", 30), 0.3)
        self.silent = silent
        self.alive = alive

    def is_silent(self) -> bool:
        """Return what we were told."""
        return self.silent

    def lives(self) -> bool:
        """Return what we were told."""
        return self.alive


class Chairs(DedicatedSessions[Chair]):
    """DedicatedSessions without connections."""

    def drop(self, seat: Chair) -> None:
        """Forget it."""
        self.pop(seat.claim.id, None)

    async def look_up(self, sessions: Sequence[Chair], deadline: Deadline) -> list[bool]:
        """Return what we were told."""
        return [session.alive for session in sessions]


def at_step(step: int, do: Callable[[], object], work: Callable[[], object]) -> bool:
    """Work, and do something at the given step of it, as a signal handler would; return whether it was over before."""
    left = step

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if kind == "opcode":
            left -= 1
            if left == 0:
                sys.settrace(None)
                do()
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return left > 0


def interrupt() -> None:
    """Do what Ctrl-C does."""
    raise KeyboardInterrupt


async def test_cancelled_at_the_moment_of_the_handover() -> None:
    """A caller that is cancelled as it gets the session passes it on to the next caller."""
    seat = Chair(AsyncioRuntime())
    assert seat.try_take()
    task = asyncio.ensure_future(seat.take(60))
    await asyncio.sleep(0.01)
    seat.give()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        seat.give()
    assert await seat.take(0)


def test_one_at_a_time() -> None:
    """However many threads want it, one has the turn at a time, and everybody gets it."""
    seat = Chair(BlockingRuntime())
    inside = 0
    seen: list[int] = []

    def work() -> None:
        nonlocal inside
        for _ in range(200):
            assert run_sync(seat.take(60))
            inside += 1
            seen.append(inside)
            inside -= 1
            seat.give()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1] * 800


def test_caller_times_out_waiting_for_the_session() -> None:
    """A caller that waits for the session in vain gets its error, at once if it has no time."""
    seat = Chair(BlockingRuntime())
    assert seat.try_take()
    assert run_sync(seat.take(-1)) is False
    assert run_sync(seat.take(0.01)) is False
    seat.give()
    assert run_sync(seat.take(-1)) is True


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # who is interrupted awaits nothing
def test_interrupted_at_any_step_of_waiting() -> None:
    """Wherever somebody is interrupted who waits for its turn, the next gets it when it is given back."""
    for step in count(1):
        seat = Chair(BlockingRuntime())
        assert seat.try_take()
        over = False
        with suppress(KeyboardInterrupt):
            over = at_step(step, interrupt, lambda seat=seat: run_sync(seat.take(0.001)))  # type: ignore[misc]
        seat.give()
        assert run_sync(seat.take(20)) is True, f"interrupted at step {step}"
        if over:
            break
    assert step > 20


def test_signal_handler_at_any_step() -> None:
    """A handler that takes and gives back the turn, in the middle of others who do, neither hangs nor harms them."""

    def pair(seat: DedicatedSession) -> None:
        if seat.try_take():
            seat.give()

    for step in count(1):
        seat = Chair(BlockingRuntime())
        if at_step(step, lambda seat=seat: pair(seat), lambda seat=seat: pair(seat)):  # type: ignore[misc]
            break
        assert seat.try_take(), f"nobody gave it back, at step {step}"
    assert step > 20


def test_ended_sessions_are_removed() -> None:
    """Sessions that have ended are removed, unless a caller uses them; the next removal waits until there are many more."""
    runtime = BlockingRuntime()
    seats = Chairs(BlockingRuntime())
    alive, ended, waiting, at_work = (
        Chair(runtime),
        Chair(runtime, alive=False),
        Chair(runtime, silent=False),
        Chair(runtime),
    )
    waiting.alive = at_work.alive = False
    assert at_work.try_take()
    for seat in (alive, ended, waiting, at_work, *(Chair(runtime) for _ in range(SWEEP_AT))):
        seats[seat.claim.id] = seat
    seats.sweep()
    assert not seats.is_current(ended)
    assert all(seats.is_current(seat) for seat in (alive, waiting, at_work))
    assert seats.sweep_at == 2 * (SWEEP_AT + 3)
    assert alive.try_take(), "it was given back"


def test_turn_on_a_seat_that_is_no_longer_the_claims() -> None:
    """The turn is not had on a seat whose session may be somebody else's by now."""
    seats = Chairs(BlockingRuntime())
    seat = Chair(BlockingRuntime())
    assert not seats.try_take(seat)
    seats[seat.claim.id] = seat
    assert seats.try_take(seat)
    assert not seats.try_take(seat)
