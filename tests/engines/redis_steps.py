"""What tests that interrupt, hold up or hurry clients of Redis share."""

from __future__ import annotations

from typing import Any

import fencelock
from tests.contract.subject import SOON


def backend_of(locks: fencelock.Locks) -> Any:
    """Return the engine of a client."""
    return locks._client.engine


def held(lock: fencelock.Lock) -> None:
    """Take the lock and give it back."""
    with lock:
        pass


def assert_in_step(locks: fencelock.Locks) -> None:
    """See that everything that is asked gets its own answer, also where several ask at the same time."""
    idle = backend_of(locks)._pool._idle
    assert len(idle) == len(set(idle))
    assert not locks.inspect("0").holders
    for number in range(5):
        with locks.lock(f"{number}", timeout=SOON) as lease:
            assert [holder.token for holder in locks.inspect(f"{number}").holders] == [lease.token]
