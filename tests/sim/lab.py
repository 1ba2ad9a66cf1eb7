"""A few simulated processes on one engine, without faults, for tests that inject their own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fencelock.model import LossReason
from fencelock.sim.locks import SimClient
from fencelock.sim.memory_engine import SimMemoryEngine, SimulatedMemory
from fencelock.sim.network import Network, NetworkFaults
from fencelock.sim.process import Process
from fencelock.sim.recorder import Recorder
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scheduler import Scheduler
from fencelock.sim.task import Cancelled, Task


class Lab:
    """One process and its client; `add` makes more of them."""

    def __init__(self, seed: int = 0) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, NetworkFaults(delay=0.01))
        self.engine = SimulatedMemory(self.network)
        self.recorder = Recorder(self.scheduler, self.engine, 1.0)
        self.log: list[Any] = []
        """What the tasks of `start` returned or raised."""
        self.told: list[LossReason] = []
        self.clients: list[SimClient] = []
        self.process, self.client = self.add("p1")
        self.runtime = SimRuntime(self.process)

    def add(self, label: str) -> tuple[Process, SimClient]:
        """Return a new process and its client."""
        process = Process(self.scheduler, label)
        runtime = SimRuntime(process)
        engine = SimMemoryEngine(runtime, self.network, self.engine)
        self.clients.append(
            SimClient(
                runtime, engine, self.recorder, ttl=3.0, owner=label, on_lost=lambda _, why: self.told.append(why)
            )
        )
        return process, self.clients[-1]

    def start(self, work: Coroutine[Any, Any, Any], process: Process | None = None) -> Task:
        """Start a task, by default in the first process."""
        return (process or self.process).spawn(work, "work", self._ended)

    def _ended(self, task: Task) -> None:
        self.log.append("cancelled" if isinstance(task.error, Cancelled) else task.error or task.result)

    def run(self, seconds: float) -> list[Any]:
        """Let time pass; return the log."""
        self.scheduler.run(self.scheduler.time + seconds)
        return self.log

    def close(self) -> None:
        """End all processes."""
        for client in self.clients:
            client._process.end()
            client.renewer.stop(LossReason.CLOSED)
