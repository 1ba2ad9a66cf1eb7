"""Ctrl-C while the keeper is started: it arrives as what it is, and later leases are kept."""

from __future__ import annotations

import dis
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, pairwise
from types import FrameType
from typing import Any

import pytest

import fencelock
from fencelock.core.keeper import Keeper
from fencelock.worlds.blocking import BlockingWorld

STARTING: list[Callable[..., Any]] = [
    Keeper.add,
    BlockingWorld.spawn,
    threading.Thread.start,
    threading.Event.wait,
    threading.Condition.wait,
]


def looks(function: Callable[..., Any]) -> set[int]:
    """Return where in a function Python looks for signals: as it begins, and after each call."""
    steps = list(dis.get_instructions(function))
    return {step.offset for before, step in pairwise(steps) if before.opname in {"RESUME", "CALL"}}


LOOKS = {function.__code__: looks(function) for function in STARTING}


def acquire(locks: fencelock.Locks, step: int) -> fencelock.Lease | None:
    """Acquire a lock and interrupt the beginning of its keeper at the given step; return the lease if it was over before."""
    left = step

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code not in LOOKS:
            return None
        frame.f_trace_opcodes = True
        if kind == "opcode" and frame.f_lasti in LOOKS[frame.f_code]:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    lock = locks.lock("x", ttl=30)
    sys.settrace(trace)
    try:
        return lock.acquire()
    except KeyboardInterrupt:
        return None
    finally:
        sys.settrace(None)


@pytest.mark.filterwarnings("ignore:the lease on .x. .* was dropped:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine 'Keeper._run' was never awaited:RuntimeWarning")
def test_interrupted_at_any_step() -> None:
    """Wherever the beginning of a keeper is interrupted, that is a KeyboardInterrupt, and the next lease is renewed."""
    kept: list[tuple[int, fencelock.Lease, float]] = []
    clients: list[fencelock.Locks] = []
    for step in count(1):
        clients.append(locks := fencelock.connect(f"memory://keeper-{step}"))
        over = acquire(locks, step)
        lease = locks.lock("y", ttl=3).acquire()
        kept.append((step, lease, lease.remaining + time.monotonic()))
        if over is not None:
            break
    assert step > 10
    for step, lease, first in kept:
        while lease.remaining + time.monotonic() < first + 0.5:
            assert not lease.is_lost(), f"interrupted at step {step}, and the next lease was not renewed"
            time.sleep(0.05)
    for locks in clients:
        locks.close()
