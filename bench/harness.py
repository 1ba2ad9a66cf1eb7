"""Interleaved rounds, medians with their spread, and tables."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[int], None]
"""Does the thing so many times."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds for one repetition: the median round, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Goal:
    """What the issue asks for: `value` should be at most, or at least, `bound`."""

    text: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def interleaved(contestants: Mapping[str, Run], rounds: int, repetitions: int) -> dict[str, Timing]:
    """Time all of them, round by round, so that a slow moment of the machine hits every one."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(max(1, repetitions // 10))
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, run in contestants.items():
            start = time.perf_counter()
            run(repetitions)
            samples[name].append((time.perf_counter() - start) / repetitions * 1e6)
    progress("")
    return {name: timing(values) for name, values in samples.items()}


def timing(values: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show(title: str, timings: Mapping[str, Timing], base: str) -> None:
    """Print a table with the ratio to one of the contestants."""
    print(f"\n{title}")
    print(f"  {'':34} {'median':>10} {'quartiles':>21} {'ratio to ' + base:>22}")
    for name, t in timings.items():
        print(f"  {name:34} {t.median:8.1f} µs {t.low:8.1f} … {t.high:7.1f} µs {t.median / timings[base].median:20.2f}")


def show_goals(goals: Sequence[Goal]) -> None:
    print("\nGoals")
    for goal in goals:
        sign, word = ("✓", "met") if goal.met else ("✗", "missed")
        relation = "≤" if goal.at_most else "≥"
        print(f"  {sign} {goal.text}: {goal.value:.2f} (goal {relation} {goal.bound:g}) {word}")
