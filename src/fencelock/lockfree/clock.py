"""A hybrid logical clock: its stamps follow the wall clock where possible, and cause and effect always."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from fencelock.errors import FencelockError, InvalidArgument

AHEAD_MAX = 60.0
"""Seconds by which another replica's stamp may be ahead: one wrong clock must not move all others years ahead."""


class ClockAhead(FencelockError, ValueError):
    """The stamp of another replica lies too far in the future: its clock is wrong, or the local one is."""


class Stamp(NamedTuple):
    """A moment at a replica. Stamps have a total order; no two replicas make the same one.

    >>> Stamp(1000, 0, "b") < Stamp(1000, 1, "a") < Stamp(1001, 0, "a")
    True
    """

    millis: int
    step: int
    replica: str


class HybridClock:
    """Makes stamps for one replica; each is above every stamp that this clock has made or seen. Safe to share by threads.

    >>> here, there = HybridClock("here"), HybridClock("there", now=lambda: 0.0)       # a clock that stopped in 1970
    >>> first = here.tick()
    >>> there.observe(first, ahead_max=float("inf"))
    >>> there.tick() > first                                                           # a later stamp is above it
    True
    """

    def __init__(self, replica: str, *, now: Callable[[], float] = time.time) -> None:
        if not replica:
            raise InvalidArgument("a clock needs the name of its replica: two without one would make the same stamps")
        self.replica = replica
        self._now = now
        self._mutex = Lock()
        self._last = (0, 0)

    def tick(self) -> Stamp:
        """Return a new stamp."""
        with self._mutex:
            millis = int(self._now() * 1000)
            last, count = self._last
            self._last = (millis, 0) if millis > last else (last, count + 1)
            return Stamp(*self._last, self.replica)

    def observe(self, stamp: Stamp, *, ahead_max: float = AHEAD_MAX) -> None:
        """Remember the stamp of another replica, so that the next one is above it; raise ClockAhead if it is far ahead."""
        with self._mutex:
            ahead = stamp.millis / 1000 - self._now()
            if ahead > ahead_max:
                raise ClockAhead(
                    f"a stamp of {stamp.replica!r} is {ahead:.0f} s ahead of this clock, more than {ahead_max:g} s: "
                    "correct the clocks, and do not merge its data"
                )
            self._last = max(self._last, (stamp.millis, stamp.step))
