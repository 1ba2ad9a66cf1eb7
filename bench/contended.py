"""Eight processes on one name: grants per second, fairness, how long the slowest wait, how much of the time it is held.

An engine brings a table of contestants; each makes its lock in each process, at the place that it is given. They take turns
for half a second each: what slows the machine down, for seconds or minutes, slows those who are compared alike. Each turn
begins with a run-in that is not counted: eight processes that have slept since their last turn, and begin at the same moment,
are not what contention is like from then on.
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
HEATS = 4
"""Turns of each contestant in a round."""
HEAT = 0.5
"""Seconds that are counted of each."""
RUN_IN = 0.1
"""Seconds before those, in which nobody counts."""
AT_MOST = 50_000
"""Grants that one process can have in a second."""
AHEAD = 0.02
"""Seconds in which all processes of a contestant hear when they are to begin."""
ENDING = 5.0
"""Seconds in which they end by themselves: not if one has failed that the others wait for."""
Make = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Hold:
    """One grant of one process, in seconds of the machine's monotonic clock."""

    asked: float
    granted: float
    left: float


Held = tuple[float, list[Hold]]
"""Of one process: when its time was over, and all that it held."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one contestant has done in all its heats."""

    per_second: float
    """In the median heat."""
    uneven: float
    """How far the process that is farthest from the mean is from it, as a share of the mean, in all heats together."""
    busy: float
    """The share of the time in which somebody was in the body, in the median heat."""
    p50: float
    p99: float
    longest: float
    heats: Sequence[float]
    """Grants per second in each, in order."""

    def over(self, base: Outcome) -> float:
        """Return the ratio to another: the median of the heats' own, as what slows a heat down slows both."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.heats, base.heats, strict=True))


class Team:
    """The processes of one contestant. They stay: to start new ones would put seconds between those who are compared."""

    def __init__(self, make: Make, place: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(PROCESSES):
            line, theirs = context.Pipe()
            process = context.Process(target=member, args=(make, place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(line)
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until all are connected, imported and warmed up."""
        self._hear()

    def play(self, seconds: float, body: float) -> list[Held]:
        """Have all of them contend for so long, the run-in included."""
        end = time.monotonic() + AHEAD + seconds
        for line in self._lines:
            line.send((end, seconds, body))
        held: list[Held] = self._hear()
        return held

    def _hear(self) -> list[Any]:
        try:
            return [line.recv() for line in self._lines]
        except EOFError:
            raise RuntimeError("a process failed; it has said why") from None

    def close(self) -> None:
        for line in self._lines:
            line.close()
        until = time.monotonic() + ENDING
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()


def member(make: Make, place: str, line: Any) -> None:
    lock = make(place)
    with lock:
        pass
    line.send(None)
    while True:
        try:
            end, seconds, body = line.recv()
        except EOFError:
            return
        line.send((end, contend(lock, end, seconds, body)))


def contend(lock: AbstractContextManager[Any], end: float, seconds: float, body: float) -> list[Hold]:
    # Room for all that will be measured: objects that pile up, and the garbage collector that looks through them, would be
    # measured with it.
    times = array("d", bytes(8 * 3 * int(AT_MOST * seconds)))
    count = 0
    time.sleep(max(0.0, end - seconds - time.monotonic()))
    while (asked := time.monotonic()) < end:
        with lock:
            granted = time.monotonic()
            if body:
                time.sleep(body)
            left = time.monotonic()
        times[count], times[count + 1], times[count + 2] = asked, granted, left
        count += 3
    return [Hold(*times[at : at + 3]) for at in range(0, count, 3)]


def outcome(heats: Sequence[Sequence[Held]], seconds: float) -> Outcome:
    # A wait that was asked for in time counts however late it ends; a grant counts only within the time.
    counts = [[sum(end - seconds <= hold.granted < end for hold in holds) for end, holds in heat] for heat in heats]
    held = [
        sum(max(0.0, min(hold.left, end) - max(hold.granted, end - seconds)) for end, holds in heat for hold in holds)
        for heat in heats
    ]
    waits = sorted(
        (hold.granted - hold.asked) * 1000
        for heat in heats
        for end, holds in heat
        for hold in holds
        if hold.asked >= end - seconds
    )
    totals = [sum(process) for process in zip(*counts, strict=True)]
    mean = statistics.mean(totals)
    rates = [sum(heat) / seconds for heat in counts]
    return Outcome(
        per_second=statistics.median(rates),
        uneven=max(abs(total - mean) for total in totals) / mean,
        busy=statistics.median(held) / seconds,
        p50=waits[len(waits) // 2],
        p99=waits[int(len(waits) * 0.99)],
        longest=waits[-1],
        heats=rates,
    )


def compare(
    title: str,
    contestants: Mapping[str, Make],
    place: str,
    *,
    rounds: int,
    body: float = 0.0,
    warm_up: float = 0.0,
) -> dict[str, Outcome]:
    """Run all of them, heat by heat, and print the table. Nothing is measured in the seconds of `warm_up`."""
    heats: dict[str, list[list[Held]]] = {name: [] for name in contestants}
    with ExitStack() as stack:
        progress("starting everybody")
        teams = {name: stack.enter_context(closing(Team(make, place))) for name, make in contestants.items()}
        for name, team in teams.items():
            team.ready()
            if warm_up:
                progress(f"warming up: {name}")
                team.play(warm_up, body)
        for number in range(rounds * HEATS):
            for name, team in teams.items():
                progress(f"heat {number + 1} of {rounds * HEATS}: {name}")
                heats[name].append(team.play(RUN_IN + HEAT, body))
    progress("")
    outcomes = {name: outcome(held, HEAT) for name, held in heats.items()}
    print(f"\n{title} ({rounds * HEATS} heats of {HEAT:g} s)")
    busy = f"{'busy':>7}" if body else ""
    width = max(map(len, contestants))
    print(
        f"  {'':{width}} {'grants/s':>9} {'quartiles':>14} {'uneven':>8}{busy} {'wait p50':>10} {'p99':>9} {'longest':>10}"
    )
    for name, o in outcomes.items():
        low, _, high = statistics.quantiles(o.heats, n=4)
        busy = f"{o.busy:7.1%}" if body else ""
        print(
            f"  {name:{width}} {o.per_second:9.0f} {low:6.0f} … {high:5.0f} {o.uneven:8.1%}{busy} {o.p50:7.2f} ms"
            f" {o.p99:6.2f} ms {o.longest:7.1f} ms"
        )
    return outcomes
