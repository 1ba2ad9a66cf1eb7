"""Eight processes on one name: grants per second, fairness, how long the slowest wait, how much of the time it is held.

The caller passes a table of contestants: for each, a function that makes its lock from a URL (or a folder). Each
contestant has eight worker processes. In each round every contestant runs for half a second, one after the other, so that
a slow period of the machine affects all of them equally. Each run begins with a run-in that is not counted, because eight
processes that wake up at the same moment do not yet show steady contention.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any

from bench.harness import progress

PROCESSES = 8
ROUNDS_FACTOR = 4
"""Rounds here for each round of `--rounds`."""
RUN_SECONDS = 0.5
"""Seconds of a contestant's run that are counted."""
RUN_IN = 0.1
"""Seconds at the start of each run that are not counted."""
MAX_GRANTS_PER_SECOND = 50_000
"""Upper bound of the grants of one process."""
START_DELAY = 0.02
"""Seconds from the command to the start of a run, so that all workers receive the command before it."""
END_TIMEOUT = 5.0
"""Seconds that workers have to end before they are killed. A worker may wait for a lock that a failed one holds."""
Make = Callable[[str], AbstractContextManager[Any]]
"""Makes a lock from a URL."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One grant of one process, in seconds of the machine's monotonic clock."""

    requested: float
    granted: float
    released: float


WorkerResult = tuple[float, list[Hold]]
"""The end time of one worker's run, and its grants."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one contestant in all rounds."""

    per_second: float
    """Grants per second in the median round."""
    uneven: float
    """The largest deviation of one process's grants from the mean of all processes, divided by the mean, over all rounds."""
    busy: float
    """The share of the time in which a process was in the body, in the median round."""
    p50: float
    p99: float
    longest: float
    rounds: Sequence[float]
    """Grants per second in each round, in order."""

    def over(self, base: Outcome) -> float:
        """Return the ratio to another contestant: the median of the ratios per round, as a slow round slows both."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.rounds, base.rounds, strict=True))


class Workers:
    """The processes of one contestant. They run through all rounds: to start new ones in each round would take seconds."""

    def __init__(self, make: Make, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(PROCESSES):
            pipe, worker_pipe = context.Pipe()
            process = context.Process(target=work, args=(make, url, worker_pipe), daemon=True)
            process.start()
            worker_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        """Wait until each worker has imported its lock, connected and acquired it once."""
        self._receive()

    def run(self, seconds: float, body: float) -> list[WorkerResult]:
        """Let all workers contend for `seconds`, the run-in included, and return what each of them did."""
        end = time.monotonic() + START_DELAY + seconds
        for pipe in self._pipes:
            pipe.send((end, seconds, body))
        results: list[WorkerResult] = self._receive()
        return results

    def _receive(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise RuntimeError("a worker process failed; its traceback is above") from None

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + END_TIMEOUT
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()


def work(make: Make, url: str, pipe: Any) -> None:
    """Run one worker process: contend once for each command that arrives on the pipe, until the pipe is closed."""
    lock = make(url)
    with lock:
        pass
    pipe.send(None)
    while True:
        try:
            end, seconds, body = pipe.recv()
        except EOFError:
            return
        pipe.send((end, contend(lock, end, seconds, body)))


def contend(lock: AbstractContextManager[Any], end: float, seconds: float, body: float) -> list[Hold]:
    # One array, allocated before the run: new objects, and the garbage collections that they cause, would be part of the
    # measured time.
    times = array("d", bytes(8 * 3 * int(MAX_GRANTS_PER_SECOND * seconds)))
    count = 0
    time.sleep(max(0.0, end - seconds - time.monotonic()))
    while (requested := time.monotonic()) < end:
        with lock:
            granted = time.monotonic()
            if body:
                time.sleep(body)
            released = time.monotonic()
        times[count], times[count + 1], times[count + 2] = requested, granted, released
        count += 3
    return [Hold(*times[at : at + 3]) for at in range(0, count, 3)]


def outcome(rounds: Sequence[Sequence[WorkerResult]], seconds: float) -> Outcome:
    # A wait counts if it began in the counted seconds, however late it ends; a grant counts only if it lies within them.
    counts = [
        [sum(end - seconds <= hold.granted < end for hold in holds) for end, holds in results] for results in rounds
    ]
    held = [
        sum(
            max(0.0, min(hold.released, end) - max(hold.granted, end - seconds))
            for end, holds in results
            for hold in holds
        )
        for results in rounds
    ]
    waits = sorted(
        (hold.granted - hold.requested) * 1000
        for results in rounds
        for end, holds in results
        for hold in holds
        if hold.requested >= end - seconds
    )
    totals = [sum(process) for process in zip(*counts, strict=True)]
    mean = statistics.mean(totals)
    rates = [sum(grants) / seconds for grants in counts]
    return Outcome(
        per_second=statistics.median(rates),
        uneven=max(abs(total - mean) for total in totals) / mean,
        busy=statistics.median(held) / seconds,
        p50=waits[len(waits) // 2],
        p99=waits[int(len(waits) * 0.99)],
        longest=waits[-1],
        rounds=rates,
    )


def compare(
    title: str,
    contestants: Mapping[str, Make],
    url: str,
    *,
    rounds: int,
    body: float = 0.0,
    warm_up: float = 0.0,
) -> dict[str, Outcome]:
    """Run all contestants, round by round, and print the table. Each runs for `warm_up` seconds first, not counted."""
    total = rounds * ROUNDS_FACTOR
    results: dict[str, list[list[WorkerResult]]] = {name: [] for name in contestants}
    with ExitStack() as stack:
        progress("starting the workers")
        all_workers = {name: stack.enter_context(closing(Workers(make, url))) for name, make in contestants.items()}
        for name, workers in all_workers.items():
            workers.wait_until_ready()
            if warm_up:
                progress(f"warming up: {name}")
                workers.run(warm_up, body)
        for number in range(total):
            for name, workers in all_workers.items():
                progress(f"round {number + 1} of {total}: {name}")
                results[name].append(workers.run(RUN_IN + RUN_SECONDS, body))
    progress("")
    outcomes = {name: outcome(of_contestant, RUN_SECONDS) for name, of_contestant in results.items()}
    print(f"\n{title} ({total} rounds of {RUN_SECONDS:g} s)")
    busy = f"{'busy':>7}" if body else ""
    width = max(map(len, contestants))
    print(
        f"  {'':{width}} {'grants/s':>9} {'quartiles':>14} {'uneven':>8}{busy} {'wait p50':>10} {'p99':>9} {'longest':>10}"
    )
    for name, o in outcomes.items():
        low, _, high = statistics.quantiles(o.rounds, n=4)
        busy = f"{o.busy:7.1%}" if body else ""
        print(
            f"  {name:{width}} {o.per_second:9.0f} {low:6.0f} … {high:5.0f} {o.uneven:8.1%}{busy} {o.p50:7.2f} ms"
            f" {o.p99:6.2f} ms {o.longest:7.1f} ms"
        )
    return outcomes
