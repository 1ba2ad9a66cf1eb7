"""Play one seed: build what the scenario describes, run it to its end, and return its history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from fencelock.core.group import BaseGroup
from fencelock.errors import EngineUnavailable
from fencelock.fences.memory import MemoryFence
from fencelock.model import LossReason
from fencelock.sim import engines
from fencelock.sim.check import Violation, check
from fencelock.sim.history import History, Leftover
from fencelock.sim.locks import SimClient, SimLease
from fencelock.sim.network import Network
from fencelock.sim.process import Process
from fencelock.sim.program import Observe, Worker, random_campaign, random_use
from fencelock.sim.record_program import Options, RecordWorker, random_record_job
from fencelock.sim.recorder import Recorder
from fencelock.sim.resource import Resource
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import RECORDED, Scenario, scenario_of
from fencelock.sim.scheduler import Scheduler
from fencelock.sim.task import Task

logging.getLogger("fencelock").addHandler(logging.NullHandler())  # losses and outages are part of the run

HORIZON = 2000.0
"""Virtual seconds after which a run counts as stuck."""

MAX_EVENTS = 50_000
"""Events after which a run counts as stuck: a client repeats a request without an end."""

FAULT_SECONDS = 6.0
"""Virtual seconds within which engines and networks fail; most runs last about as long."""

CLUSTER_PROBABILITY = 0.4
"""The probability that a fault follows closely on the last one: pairs of faults find the most."""

MIN_REPLY_TIMEOUT = 0.05
"""Seconds for tasks to handle the last message."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed."""

    seed: int
    scenario: Scenario
    history: History
    violations: list[Violation]
    events: int


def play(seed: int, scenario: Scenario | None = None) -> Result:
    """Play a seed and check its history."""
    scenario = scenario or scenario_of(seed)
    run = Run(seed, scenario)
    try:
        history, stuck = run.finish()
    finally:
        run.close()
    violations = check(history, scenario.invariants)
    if stuck:
        violations.append(Violation("end", "", f"{stuck} workers have not ended after {run.ended:.0f} s"))
    return Result(seed, scenario, history, violations, run.scheduler.events)


class Run:
    """One run: it creates the engine, the network, the resources and the processes, and injects the faults."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.scenario = scenario
        # The time within which every message has arrived and has its reply.
        self._settled = max(4 * scenario.faults.delay, scenario.faults.slowest) + MIN_REPLY_TIMEOUT
        self.scheduler = Scheduler(f"{scenario.name}:{seed}")
        self.network = Network(self.scheduler, scenario.faults)
        self.engine = engines.make(self.network, scenario)
        self.recorder = Recorder(self.scheduler, self.engine, self._settled)
        log = self.recorder.history.writes.append
        fence = MemoryFence() if scenario.fence else None
        self.resources = {name: Resource(self.network, f"data:{name}", fence, log) for name in scenario.names}
        self.processes: list[Process] = []
        self.clients: list[SimClient] = []
        self._operators: list[Process] = []
        """Processes that release a name by force."""
        self._limits = self._rng.choice(((2,), (3,), (1, 2), (1, 2, 4)))
        self._options = Options(Random(seed), scenario)
        self._working = 0
        self.ended = 0.0
        for number in range(1, scenario.processes + 1):
            self._start(f"p{number}")
        self._plan()

    def _start(self, label: str) -> None:
        process = Process(self.scheduler, label)
        runtime = SimRuntime(process, self.network)
        client_engine = self.engine.connect(runtime)
        client = SimClient(runtime, client_engine, self.recorder, owner=label, on_lost=partial(self._lost, label))
        for jobs in self._jobs(label):
            process.spawn(self._worker(client, runtime).work(jobs), "worker", self._done)
            self._working += 1
        self.processes.append(process)
        self.clients.append(client)

    def _worker(self, client: SimClient, runtime: SimRuntime) -> Worker:
        if self.scenario.primitive in RECORDED:
            return RecordWorker(client, runtime, self.recorder, self._options)
        return Worker(client, runtime, self.resources, self.recorder)

    def _jobs(self, label: str) -> Sequence[Sequence[Any]]:
        """Return what each task of a process does."""
        rng, scenario = self._rng, self.scenario
        if scenario.primitive == "election":
            observers: list[list[Any]] = [
                [Observe(scenario.names[0], f"{label}/{task}/{job}", 6.0 * rng.random(), 0.1) for job in range(2)]
                for task in range(rng.randint(1, 2))
            ]
            return [[random_campaign(rng, scenario, label) for _ in range(scenario.jobs)], *observers]
        if scenario.primitive in RECORDED:
            return [[random_record_job(rng, scenario) for _ in range(scenario.jobs)] for _ in range(scenario.tasks)]
        limit = rng.choice(self._limits)  # processes may disagree, as during a deploy
        return [[random_use(rng, scenario, limit) for _ in range(scenario.jobs)] for _ in range(scenario.tasks)]

    @property
    def _rng(self) -> Random:
        return self.scheduler.random

    # ------------------------------------------------------------------ faults

    def _plan(self) -> None:
        scenario, rng = self.scenario, self._rng
        faults = [self._cancel] * scenario.cancels + [self._pause] * scenario.pauses + [self._crash] * scenario.crashes
        rng.shuffle(faults)
        process, step = self.processes[0], 0
        for fault in faults:
            if step and rng.random() < CLUSTER_PROBABILITY:
                step += rng.randint(1, 8)
            else:
                process, step = rng.choice(self.processes), rng.randint(1, scenario.steps)
            process.add_fault(step, partial(fault, process))
        events = (
            [self._partition] * scenario.partitions + [self._wipe] * scenario.wipes + [self._force] * scenario.forces
        )
        events += [self._stall] * scenario.stalls + [self._restart] * scenario.restarts
        for event in [*events, self._jump]:
            self.scheduler.after(rng.random() * FAULT_SECONDS, partial(self._inject, event))

    def _inject(self, fault: Callable[[], None]) -> None:
        """Let a fault happen, unless the run is over."""
        if not self.network.faults_cleared:
            fault()

    def _cancel(self, process: Process, task: Task) -> None:
        if task.name == "worker" and not task.done:
            self.recorder.note(process.label, "is cancelled")
            task.cancel()

    def _pause(self, process: Process, _: Task) -> None:
        seconds = self._rng.random() * self._rng.choice((0.7, 2.0)) * self._rng.choice(self.scenario.ttls)
        self.recorder.note(process.label, f"is stopped for {seconds:.3f} s")
        process.pause(seconds)

    def _crash(self, process: Process, _: Task) -> None:
        self.recorder.note(process.label, "crashes")
        self._working -= sum(task.name == "worker" for task in process.tasks())
        process.crash()
        if not (self.engine.hosts and (self.scenario.partitions or self.scenario.stalls)):
            self.recorder.died(process, self.scenario.invariants.ttl)  # else what it sent may be held back for longer

    def _partition(self) -> None:
        seconds = self._rng.random() * 2 * max(self.scenario.ttls)
        everybody = self._rng.random() < 0.3
        for process in self.processes if everybody else [self._rng.choice(self.processes)]:
            what = self._rng.choice(("cannot reach the engine", "cannot be reached", "is partitioned from the engine"))
            self.recorder.note(process.label, f"{what} for {seconds:.3f} s")
            for label in self._some(self.engine.labels):
                if what != "cannot be reached":
                    self.network.partition(process.label, label, seconds)
                if what != "cannot reach the engine":
                    self.network.partition(label, process.label, seconds)

    def _some(self, labels: Sequence[str]) -> Sequence[str]:
        return labels if len(labels) == 1 else self._rng.sample(labels, self._rng.randint(1, len(labels)))

    def _stall(self) -> None:
        host, seconds = self._rng.choice(self.engine.hosts), self._rng.random() * 2 * max(self.scenario.ttls)
        self.recorder.note(host.label, f"is stopped for {seconds:.3f} s")
        host.pause(seconds)

    def _restart(self) -> None:
        host, seconds = self._rng.choice(self.engine.hosts), self._rng.random() * max(self.scenario.ttls)
        self.recorder.note(host.label, f"goes down for {seconds:.3f} s")
        host.crash(seconds)

    def _wipe(self) -> None:
        self.recorder.note("the engine", "loses its data")
        self.engine.wipe()

    def _force(self) -> None:
        name = self._rng.choice(self.scenario.names)
        self.recorder.note("operator", f"releases {name!r} by force")
        process = Process(self.scheduler, "operator")
        self._operators.append(process)
        process.spawn(self._force_release(SimRuntime(process, self.network), name), "force")

    async def _force_release(self, runtime: SimRuntime, name: str) -> None:
        engine = self.engine.connect(runtime)
        with suppress(EngineUnavailable):
            await engine.force_release(name)
        await engine.close()

    def _jump(self) -> None:
        seconds = self._rng.uniform(-1000, 1000)
        if self.engine.jump(seconds):
            self.recorder.note("operator", f"sets a wall clock by {seconds:+.0f} s")

    def _lost(self, label: str, lost: SimLease | BaseGroup, reason: LossReason) -> None:
        tokens = ", ".join(str(lease.token) for lease in lost._leases())
        self.recorder.note(label, f"is told that token {tokens} is lost: {reason}")

    # ------------------------------------------------------------------ the end

    def _done(self, task: Task) -> None:
        self._working -= 1
        if task.error is not None:
            raise task.error

    def finish(self) -> tuple[History, int]:
        """Run, clear all faults, look for leftovers; return the history and how many workers never ended."""
        self.scheduler.run(HORIZON, lambda: self._is_over() or self.scheduler.events > MAX_EVENTS)
        stuck, self.ended = self._working, self.scheduler.time
        self.network.clear_faults()
        for host in self.engine.hosts:
            host.clear_faults()
        for process in self.processes:
            process.clear_faults()
        # At `quiet`, every message has arrived, however slow it was.
        quiet = self.scheduler.time + self._settled
        self._look(quiet)
        self._look(quiet + self.scenario.invariants.ttl)
        self.scheduler.run(self.scheduler.time + self.engine.reply_timeout)
        self._look_for_tasks()
        history = self.recorder.finish()
        history.quiet = quiet
        return history, stuck

    def _is_over(self) -> bool:
        """Return whether all workers have ended, and all builds that they began."""
        return self._working == 0 and not any(client.flights for client in self.clients if not client._process.dead)

    def _look(self, at: float) -> None:
        """Record the claims that the engine has at a time."""
        self.scheduler.run(at)
        self.recorder.history.leftovers += self.engine.leftovers(at)

    def _look_for_tasks(self) -> None:
        """Record the tasks that still run: a renewer without leases ends when it next looks at them."""
        for process in self.processes + self._operators:
            for error in process.errors:
                raise RuntimeError(f"a background task of {process.label} failed") from error
            if not process.dead:
                for task in process.tasks():
                    self.recorder.history.add(Leftover("", process.label, f"task ({task.name})", self.scheduler.time))

    def close(self) -> None:
        """Close every coroutine that is left."""
        for process in self.processes + self._operators:
            process.end()
        for client in self.clients:
            client.renewer.stop(LossReason.CLOSED)
