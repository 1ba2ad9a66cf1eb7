"""Ctrl-C while the renewer is started raises KeyboardInterrupt, and later leases are renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

import fencelock
from fencelock.core.renewer import LeaseRenewer
from fencelock.runtime.blocking import BlockingRuntime
from tests.interrupts import interrupted_at

STARTING: list[Callable[..., Any]] = [
    LeaseRenewer.add,
    LeaseRenewer.look_at,
    BlockingRuntime.spawn,
    threading.Thread.start,
    threading.Event.wait,
    threading.Condition.wait,
]


def acquire(locks: fencelock.Locks, step: int) -> fencelock.Lease | None:
    """Acquire a lock and interrupt the start of its renewer at the given step; return the lease if it was over before."""
    leases: list[fencelock.Lease] = []
    lock = locks.lock("x", ttl=30)
    interrupted_at(step, STARTING, lambda: leases.append(lock.acquire()))
    return leases.pop() if leases else None


@pytest.mark.filterwarnings("ignore:the lease on .x. .* was dropped:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine 'LeaseRenewer._run' was never awaited:RuntimeWarning")
def test_renewer_start_interrupted_at_any_step() -> None:
    """When the start of a renewer is interrupted at any step, KeyboardInterrupt comes out, and the next lease is renewed."""
    kept: list[tuple[int, fencelock.Lease, float]] = []
    clients: list[fencelock.Locks] = []
    for step in count(1):
        clients.append(locks := fencelock.connect(f"memory://renewer-{step}"))
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
