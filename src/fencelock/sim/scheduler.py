"""Virtual time: a heap of events and one random generator. All that happens in a run is a function of the seed."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random


class Timer:
    """A planned event; `cancel` removes it."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[], object]) -> None:
        self.fn: Callable[[], object] | None = fn

    def cancel(self) -> None:
        """Remove the event."""
        self.fn = None


class Scheduler:
    """`time` is the true time. No process sees it; each has its own clock."""

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.time = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def after(self, seconds: float, fn: Callable[[], object]) -> Timer:
        """Call the function after so many seconds of true time."""
        return self.at(self.time + seconds, fn)

    def at(self, time: float, fn: Callable[[], object]) -> Timer:
        """Call the function at this true time, after the events that were planned for it before."""
        timer = Timer(fn)
        self._order += 1
        heappush(self._heap, (time, self._order, timer))
        return timer

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Run the events up to a time; return whether `stop()` ended it before."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, timer = heappop(heap)
            if timer.fn is None:
                continue
            self.time = when
            self.events += 1
            timer.fn()
            if stop is not None and stop():
                return True
        self.time = max(self.time, until)
        return stop is not None and stop()
