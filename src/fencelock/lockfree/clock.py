"""A hybrid logical clock: stamps that follow the wall clock as far as it goes, and cause and effect in any case."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from fencelock.errors import FencelockError, InvalidArgument

AHEAD_MAX = 60.0
"""Seconds by which a stamp of others may lie ahead of us: one broken clock must not carry all others away for years."""


class ClockAhead(FencelockError, ValueError):
    """A stamp from elsewhere lies too far in the future: the clock of whoever made it is wrong, or ours is."""


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

    >>> here, there = HybridClock("here"), HybridClock("there", now=lambda: 0.0)       # a clock that stands still in 1970
    >>> first = here.tick()
    >>> there.observe(first, ahead_max=float("inf"))
    >>> there.tick() > first                                                           # what came after is above it
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
        """Take in a stamp from elsewhere, so that the next one is above it; raise ClockAhead if it is absurd."""
        with self._mutex:
            ahead = stamp.millis / 1000 - self._now()
            if ahead > ahead_max:
                raise ClockAhead(
                    f"a stamp of {stamp.replica!r} is {ahead:.0f} s ahead of this clock, more than {ahead_max:g} s: set the "
                    "clocks right, and do not merge what it stands for"
                )
            self._last = max(self._last, (stamp.millis, stamp.step))
