"""Play many seeds on all cores, and add up the results."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from multiprocessing import get_context

from fencelock.sim.history import Outcome
from fencelock.sim.run import Result, play
from fencelock.sim.scenario import scenario_of

BATCH = 50
"""How many seeds a process plays at a time; garbage is collected once per batch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed with a violation."""

    seed: int
    scenario: str
    variant: str | None
    violations: tuple[str, ...]
    engine: str = "memory"
    primitive: str = "lock"

    @property
    def command(self) -> str:
        """The command that replays it."""
        variant = "" if self.variant is None else f" --variant {self.variant}"
        engine = "" if self.engine == "memory" else f" --engine {self.engine}"
        primitive = "" if self.primitive == "lock" else f" --primitive {self.primitive}"
        return f"python -m fencelock.sim{engine}{primitive} --seed {self.seed} --scenario {self.scenario}{variant}"


@dataclass(slots=True)
class Summary:
    """The results of many seeds."""

    seeds: int = 0
    grants: int = 0
    accepted: int = 0
    refused: int = 0
    events: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Summary) -> None:
        """Add the results of other seeds."""
        self.seeds += other.seeds
        self.grants += other.grants
        self.accepted += other.accepted
        self.refused += other.refused
        self.events += other.events
        self.failures += other.failures

    def __str__(self) -> str:
        return (
            f"{self.seeds} seeds: {self.grants} grants, {self.accepted} writes accepted and {self.refused} refused, "
            f"{self.events} events, {len(self.failures)} seeds failed"
        )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def broken(variant: str | None) -> AbstractContextManager[object]:
    """Return the context manager `module:name`, which breaks the code on purpose to test the checker."""
    if variant is None:
        return nullcontext()
    module, _, name = variant.partition(":")
    make: Callable[[], AbstractContextManager[object]] = getattr(import_module(module), name)
    return make()


def play_many(
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    engine: str = "memory",
    primitive: str = "lock",
    scenario: str | None = None,
    variant: str | None = None,
    progress: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Play the seeds and return the results, with failures in the order of their seeds."""
    todo = list(seeds)
    batches = [todo[at : at + BATCH] for at in range(0, len(todo), BATCH)]
    batch = partial(play_batch, engine=engine, primitive=primitive, scenario=scenario, variant=variant)
    summary = Summary()
    if jobs == 1:
        for seeds in batches:
            summary.add(batch(seeds))
            progress(summary)
    else:
        # Spawned, not forked: a forked copy of a process with real leases would lose them first.
        # With low priority: nothing here depends on real time, but other processes may.
        with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=os.nice, initargs=(10,)) as pool:
            for future in as_completed([pool.submit(batch, seeds) for seeds in batches]):
                summary.add(future.result())
                progress(summary)
    summary.failures.sort(key=lambda failure: failure.seed)
    return summary


def play_batch(seeds: list[int], *, engine: str, primitive: str, scenario: str | None, variant: str | None) -> Summary:
    """Play some seeds in this process."""
    summary = Summary()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with broken(variant):
            for seed in seeds:
                _count(summary, play(seed, scenario_of(seed, engine, scenario, primitive)), variant)
    finally:
        if collecting:
            gc.enable()
        gc.collect()
    return summary


def _count(summary: Summary, result: Result, variant: str | None) -> None:
    history, scenario = result.history, result.scenario
    accepted = sum(write.accepted for write in history.writes)
    summary.seeds += 1
    summary.grants += sum(op.valid_from is not None for op in history.ops)
    summary.grants += sum(reservation.outcome is Outcome.OK for reservation in history.reservations)
    summary.accepted += accepted
    summary.refused += len(history.writes) - accepted
    summary.events += result.events
    if result.violations:
        violations = tuple(map(str, result.violations))
        failure = Failure(result.seed, scenario.name, variant, violations, scenario.engine, scenario.primitive)
        summary.failures.append(failure)
