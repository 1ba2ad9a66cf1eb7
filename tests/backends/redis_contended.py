"""Clients of Redis who believe that others are there, for tests of what they do differently then."""

from __future__ import annotations

from typing import Any

import fencelock
from tests.contract.subject import SOON


def backend_of(locks: fencelock.Locks) -> Any:
    """Return the engine of a client."""
    return locks._client.backend


def meet_others(locks: fencelock.Locks) -> None:
    """Have a client believe that others were there a moment ago."""
    backend = backend_of(locks)
    assert backend._contended in (True, False)
    backend._contended = True


def held(lock: fencelock.Lock) -> None:
    """Take the lock and give it back."""
    with lock:
        pass


def contended(locks: fencelock.Locks, name: str, ttl: float = 30) -> fencelock.Lease:
    """Return a lease of a client who has met others, on a server that can be asked to say what it is to say."""
    meet_others(locks)
    assert locks.lock(name, ttl=ttl, timeout=SOON).acquire().release()
    meet_others(locks)
    lease = locks.lock(name, ttl=ttl, timeout=SOON).acquire()
    meet_others(locks)
    return lease


def assert_in_step(locks: fencelock.Locks) -> None:
    """See that everything that is asked gets its own answer, also where several ask at the same time."""
    idle = backend_of(locks)._links._idle
    assert len(idle) == len(set(idle))
    assert not locks.inspect("0").holders
    for number in range(5):
        with locks.lock(f"{number}", timeout=SOON) as lease:
            assert [holder.token for holder in locks.inspect(f"{number}").holders] == [lease.token]
