"""Eight processes on one name: grants per second, fairness, how long the slowest wait, how much of the time it is held.

An engine brings a table of contestants; each makes its lock in each process, at the place that it is given.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from bench.harness import progress

PROCESSES = 8
AT_MOST = 50_000
"""Turns that one process can have in a second."""
Make = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Hold:
    """One turn of one process, in seconds of the machine's monotonic clock."""

    asked: float
    granted: float
    left: float


Turns = tuple[float, list[Hold]]
"""Of one process: when its time was over, and all its turns."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one contestant."""

    per_second: float
    uneven: float
    """How far the process that is farthest from the mean is from it, as a share of the mean."""
    busy: float
    """The share of the time in which somebody was in the body."""
    p50: float
    p99: float
    longest: float


def worker(make: Make, place: str, begin: Any, seconds: float, body: float, results: Any) -> None:
    try:
        results.put(turns(make(place), begin, seconds, body))
    except Exception:
        results.put(None)
        raise


def turns(lock: AbstractContextManager[Any], begin: Any, seconds: float, body: float) -> Turns:
    # Room for all that will be measured: objects that pile up, and the garbage collector that looks through them, would be
    # measured with it.
    times = array("d", bytes(8 * 3 * int(AT_MOST * seconds)))
    count = 0
    with lock:
        pass  # connected, imported, warmed up
    begin.wait(60)
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        with lock:
            granted = time.monotonic()
            if body:
                time.sleep(body)
            left = time.monotonic()
        times[count], times[count + 1], times[count + 2] = asked, granted, left
        count += 3
    return end, [Hold(*times[at : at + 3]) for at in range(0, count, 3)]


def contend(make: Make, place: str, seconds: float, body: float = 0.0) -> Outcome:
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(PROCESSES), context.Queue()
    args = (make, place, begin, seconds, body, results)
    # Daemons: should one of them fail, the others must not keep us from ending.
    processes = [context.Process(target=worker, args=args, daemon=True) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    everybody: list[Turns] = []
    for _ in processes:
        taken: Turns | None = results.get()
        if taken is None:
            raise RuntimeError("a process failed; it has said why")
        everybody.append(taken)
    for process in processes:
        process.join()
    return outcome(everybody, seconds)


def outcome(everybody: list[Turns], seconds: float) -> Outcome:
    # A wait that was asked for in time counts however late it ends; a grant counts only within the time.
    counts = [sum(hold.granted < end for hold in holds) for end, holds in everybody]
    held = sum(max(0.0, min(hold.left, end) - hold.granted) for end, holds in everybody for hold in holds)
    waits = sorted((hold.granted - hold.asked) * 1000 for _, holds in everybody for hold in holds)
    mean = statistics.mean(counts)
    return Outcome(
        per_second=sum(counts) / seconds,
        uneven=max(abs(count - mean) for count in counts) / mean,
        busy=held / seconds,
        p50=waits[len(waits) // 2],
        p99=waits[int(len(waits) * 0.99)],
        longest=waits[-1],
    )


def compare(
    title: str, contestants: Mapping[str, Make], place: str, *, rounds: int, seconds: float = 2.0, body: float = 0.0
) -> dict[str, Outcome]:
    """Run all of them, round by round, and print the table; the medians."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, make in contestants.items():
            progress(f"round {number + 1} of {rounds}: {name}")
            outcomes[name].append(contend(make, place, seconds, body))
    progress("")
    print(f"\n{title} (medians of {rounds} runs of {seconds:g} s)")
    busy = f"{'busy':>7}" if body else ""
    width = max(map(len, contestants))
    print(
        f"  {'':{width}} {'grants/s':>9} {'spread':>14} {'uneven':>8}{busy} {'wait p50':>10} {'p99':>9} {'longest':>10}"
    )
    middle: dict[str, Outcome] = {}
    for name, runs in outcomes.items():
        rates = sorted(run.per_second for run in runs)
        m = middle[name] = Outcome(
            *(statistics.median(getattr(run, field) for run in runs) for field in Outcome.__slots__)
        )
        busy = f"{m.busy:7.0%}" if body else ""
        print(
            f"  {name:{width}} {m.per_second:9.0f} {rates[0]:6.0f} … {rates[-1]:5.0f} {m.uneven:8.1%}{busy} {m.p50:7.2f} ms"
            f" {m.p99:6.2f} ms {m.longest:7.1f} ms"
        )
    return middle
