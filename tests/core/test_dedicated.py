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


class FakeSession(DedicatedSession):
    """A session without a server."""

    def __init__(self, runtime: Runtime, *, idle: bool = True, alive: bool = True) -> None:
        super().__init__(runtime, Claim("x", 30), 0.3)
        self.idle = idle
        self.alive = alive

    def is_idle(self) -> bool:
        """Return the given answer."""
        return self.idle

    def is_alive(self) -> bool:
        """Return the given answer."""
        return self.alive


class FakeSessions(DedicatedSessions[FakeSession]):
    """DedicatedSessions without connections."""

    def drop(self, session: FakeSession) -> None:
        """Remove it."""
        self.pop(session.claim.id, None)

    async def look_up(self, sessions: Sequence[FakeSession], deadline: Deadline) -> list[bool]:
        """Return the given answer."""
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


async def test_caller_cancelled_as_it_gets_the_session_passes_it_on() -> None:
    """A caller that is cancelled as it gets the session passes it on to the next caller."""
    session = FakeSession(AsyncioRuntime())
    assert session.try_take()
    task = asyncio.ensure_future(session.take(60))
    await asyncio.sleep(0.01)
    session.give()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
        session.give()
    assert await session.take(0)


def test_one_thread_at_a_time_uses_the_session() -> None:
    """However many threads want the session, one uses it at a time, and every thread gets it."""
    session = FakeSession(BlockingRuntime())
    inside = 0
    seen: list[int] = []

    def work() -> None:
        nonlocal inside
        for _ in range(200):
            assert run_sync(session.take(60))
            inside += 1
            seen.append(inside)
            inside -= 1
            session.give()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1] * 800


def test_caller_times_out_waiting_for_the_session() -> None:
    """A caller that does not get the session in time gets its error, at once if it has no time."""
    session = FakeSession(BlockingRuntime())
    assert session.try_take()
    assert run_sync(session.take(-1)) is False
    assert run_sync(session.take(0.01)) is False
    session.give()
    assert run_sync(session.take(-1)) is True


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # who is interrupted awaits nothing
def test_caller_interrupted_while_it_waits_blocks_no_other() -> None:
    """When a waiting caller is interrupted at any step, the next caller still gets the session."""
    for step in count(1):
        session = FakeSession(BlockingRuntime())
        assert session.try_take()
        over = False
        with suppress(KeyboardInterrupt):
            over = at_step(step, interrupt, lambda session=session: run_sync(session.take(0.001)))  # type: ignore[misc]
        session.give()
        assert run_sync(session.take(20)) is True, f"interrupted at step {step}"
        if over:
            break
    assert step > 20


def test_signal_handler_may_use_the_session_at_any_step() -> None:
    """A signal handler may use the session while its thread acquires or releases it; neither hangs."""

    def pair(session: DedicatedSession) -> None:
        if session.try_take():
            session.give()

    for step in count(1):
        session = FakeSession(BlockingRuntime())
        if at_step(step, lambda session=session: pair(session), lambda session=session: pair(session)):  # type: ignore[misc]
            break
        assert session.try_take(), f"nobody gave it back, at step {step}"
    assert step > 20


def test_ended_sessions_are_removed() -> None:
    """Ended sessions that no caller uses are removed; the next removal waits until there are many more."""
    runtime = BlockingRuntime()
    sessions = FakeSessions(BlockingRuntime())
    alive, ended, waiting, at_work = (
        FakeSession(runtime),
        FakeSession(runtime, alive=False),
        FakeSession(runtime, idle=False),
        FakeSession(runtime),
    )
    waiting.alive = at_work.alive = False
    assert at_work.try_take()
    for session in (alive, ended, waiting, at_work, *(FakeSession(runtime) for _ in range(SWEEP_AT))):
        sessions[session.claim.id] = session
    sessions.sweep()
    assert not sessions.is_current(ended)
    assert all(sessions.is_current(session) for session in (alive, waiting, at_work))
    assert sessions.sweep_at == 2 * (SWEEP_AT + 3)
    assert alive.try_take(), "it was given back"


def test_session_is_taken_only_if_registered_and_free() -> None:
    """A caller does not get a session that is no longer registered for its claim, or that another caller uses."""
    sessions = FakeSessions(BlockingRuntime())
    session = FakeSession(BlockingRuntime())
    assert not sessions.try_take(session)
    sessions[session.claim.id] = session
    assert sessions.try_take(session)
    assert not sessions.try_take(session)
