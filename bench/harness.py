"""Interleaved rounds, medians with their spread, and tables."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

Run = Callable[[int], None]
"""Runs the measured operation this many times."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds for one repetition: the median round, the quartiles around it, the best, and all of them in order."""

    median: float
    low: float
    high: float
    best: float
    rounds: Sequence[float]

    def over(self, base: Timing) -> float:
        """Return the ratio to another contestant: the median of the ratios per round, as a slow round slows both."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, base.rounds, strict=True))


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of the project: `value` should be at most, or at least, `bound`."""

    text: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def interleaved(contestants: Mapping[str, Run], rounds: int, repetitions: int) -> dict[str, Timing]:
    """Time all contestants, round by round, so that a slow period of the machine affects every one of them."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(max(1, repetitions // 10))
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, run in contestants.items():
            time.sleep(0.01)  # threads of the contestant before end outside the measurement
            start = time.perf_counter()
            run(repetitions)
            samples[name].append((time.perf_counter() - start) / repetitions * 1e6)
    progress("")
    return {name: timing(values) for name, values in samples.items()}


def with_lock(lock: AbstractContextManager[Any]) -> Run:
    return with_new_lock(lambda: lock)


def with_new_lock(make: Callable[[], AbstractContextManager[Any]]) -> Run:
    """Return a run that makes a new lock for each acquire and release, as users of this package do."""

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            with make():
                pass

    return run


def with_async_lock(lock: AbstractAsyncContextManager[Any], loop: asyncio.AbstractEventLoop) -> Run:
    async def pairs(repetitions: int) -> None:
        for _ in range(repetitions):
            async with lock:
                pass

    return lambda repetitions: loop.run_until_complete(pairs(repetitions))


def timing(values: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Timing(median, low, high, min(values), values)


def one_core() -> AbstractContextManager[None]:
    """Run this process, and what it starts, on one core: on many machines, waking another takes most of a round trip."""
    return _pinned(max)


def other_core() -> AbstractContextManager[None]:
    """Run this process on another core than the servers that it started in `one_core`: they usually run elsewhere."""
    return _pinned(min)


@contextmanager
def _pinned(choose: Callable[[set[int]], int]) -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {choose(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show(title: str, timings: Mapping[str, Timing], base: str) -> None:
    """Print a table with the ratio to one of the contestants."""
    print(f"\n{title}")
    width = max(map(len, timings))
    print(f"  {'':{width}} {'median':>11} {'quartiles':>22} {'best':>11}   ratio to {base} (of the best)")
    for name, t in timings.items():
        ratio, best = t.over(timings[base]), t.best / timings[base].best
        print(
            f"  {name:{width}} {t.median:8.1f} µs {t.low:8.1f} … {t.high:8.1f} µs {t.best:8.1f} µs {ratio:9.2f} ({best:.2f})"
        )


def show_goals(goals: Sequence[Goal]) -> None:
    print("\nGoals")
    for goal in goals:
        sign, word = ("✓", "met") if goal.met else ("✗", "missed")
        relation = "≤" if goal.at_most else "≥"
        print(f"  {sign} {goal.text}: {goal.value:.2f} (goal {relation} {goal.bound:g}) {word}")
