"""A thread that holds several permits of one semaphore."""

from __future__ import annotations

import pytest

from fencelock import LeaseLost, WouldDeadlock, connect
from fencelock.model import LossReason


def test_a_permit_is_found_after_a_lost_and_a_later_one_are_left() -> None:
    with connect("memory://permits-of-one-thread") as locks:
        semaphore = locks.semaphore("s", 5)
        first, second = semaphore.acquire(), semaphore.acquire()
        with pytest.raises(LeaseLost), first, second:
            first._lose(LossReason.GONE)
            with semaphore.acquire():
                pass
            with pytest.raises(WouldDeadlock):
                locks.lock("s", timeout=0.1).acquire()
