"""Helpers of the tests that interrupt or delay clients of Redis."""

from __future__ import annotations

from typing import Any

import fencelock
from tests.support.waiting import SOON


def engine_of(locks: fencelock.Locks) -> Any:
    """Return the engine of a client."""
    return locks._client.engine


def held(lock: fencelock.Lock) -> None:
    """Take the lock and give it back."""
    with lock:
        pass


def assert_in_step(locks: fencelock.Locks) -> None:
    """Check that each request gets its own reply."""
    idle = engine_of(locks)._pool._idle
    assert len(idle) == len(set(idle))
    assert not locks.inspect("0").holders
    for number in range(5):
        with locks.lock(f"{number}", timeout=SOON) as lease:
            assert [holder.token for holder in locks.inspect(f"{number}").holders] == [lease.token]
