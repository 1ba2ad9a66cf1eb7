"""Eight processes on one name with an empty body: grants per second, fairness, how long the slowest wait."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bench.harness import Goal, progress

PROCESSES = 8
Make = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one contestant."""

    per_second: float
    uneven: float
    """How far the process that is farthest from the mean is from it, as a share of the mean."""
    p50: float
    p99: float
    longest: float


def fencelock_lock(folder: str) -> AbstractContextManager[Any]:
    import fencelock

    return fencelock.connect(f"sqlite://{folder}/contended.db").lock("name")


def filelock_lock(folder: str) -> AbstractContextManager[Any]:
    import filelock

    return filelock.FileLock(f"{folder}/contended.lock", poll_interval=0.01)


def worker(make: Make, folder: str, begin: Any, seconds: float, results: Any) -> None:
    lock = make(folder)
    waits: list[float] = []
    with lock:
        pass  # connected, imported, warmed up
    begin.wait()
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        with lock:
            waits.append(time.monotonic() - asked)
    results.put(waits)


def contend(make: Make, folder: str, seconds: float) -> Outcome:
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=worker, args=(make, folder, begin, seconds, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    everybody: list[list[float]] = [results.get() for _ in processes]
    for process in processes:
        process.join()
    counts = [len(waits) for waits in everybody]
    mean = statistics.mean(counts)
    waits = sorted(wait * 1000 for waits in everybody for wait in waits)
    return Outcome(
        per_second=sum(counts) / seconds,
        uneven=max(abs(count - mean) for count in counts) / mean,
        p50=waits[len(waits) // 2],
        p99=waits[int(len(waits) * 0.99)],
        longest=waits[-1],
    )


def main(folder: str, rounds: int, seconds: float = 2.0) -> list[Goal]:
    contestants: dict[str, Make] = {
        "fencelock (first come, first served)": fencelock_lock,
        "filelock (10 ms poll, barges)": filelock_lock,
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, make in contestants.items():
            progress(f"round {number + 1} of {rounds}: {name}")
            outcomes[name].append(contend(make, folder, seconds))
    progress("")
    print(f"\nSQLite, {PROCESSES} processes on one name, empty body (medians of {rounds} runs of {seconds:g} s)")
    print(f"  {'':38} {'grants/s':>9} {'spread':>14} {'uneven':>8} {'wait p50':>10} {'p99':>9} {'longest':>9}")
    middle: dict[str, Outcome] = {}
    for name, runs in outcomes.items():
        rates = sorted(run.per_second for run in runs)
        m = middle[name] = Outcome(
            *(statistics.median(getattr(run, field) for run in runs) for field in Outcome.__slots__)
        )
        print(
            f"  {name:38} {m.per_second:9.0f} {rates[0]:6.0f} … {rates[-1]:5.0f} {m.uneven:8.1%} {m.p50:7.2f} ms"
            f" {m.p99:6.2f} ms {m.longest:6.1f} ms"
        )
    ours, theirs = middle.values()
    return [
        Goal("contended grants per second ÷ filelock's", ours.per_second / theirs.per_second, 0.4, at_most=False),
        Goal("contended: the most uneven process, % of the mean", ours.uneven * 100, 10),
        Goal("contended: wait p99, ms", ours.p99, 10),
    ]
