"""The simulated engines, and what a run needs of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from fencelock.core.engine import Engine
from fencelock.model import Claim
from fencelock.sim.history import Charge, Leftover, RecordWrite
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario


class SimulatedEngine(Protocol):
    """One engine: its servers, clients of it, and its state as the checker sees it."""

    labels: Sequence[str]
    """The labels of its servers on the network."""
    hosts: Sequence[SimulatedHost]
    """Its servers that can be paused and restarted."""
    tickets: Mapping[tuple[str, int], int]
    """The place of each grant in the order of arrival, by name and token; empty if the engine is not fair."""

    @property
    def log(self) -> Sequence[RecordWrite | Charge]:
        """The writes of records and the charges of rate limits that the engine has accepted."""
        ...

    reply_timeout: float
    """Seconds for which background work may wait for a reply that never comes."""

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production engine for a process."""
        ...

    def has(self, claim: Claim) -> bool:
        """Return whether the engine has anything of a claim."""
        ...

    def token(self, claim: Claim) -> int | None:
        """Return the token with which a claim holds its name, or None."""
        ...

    def leftovers(self, at: float) -> list[Leftover]:
        """Return all claims that the engine has."""
        ...

    def wipe(self) -> None:
        """Lose all data."""
        ...

    def jump(self, seconds: float, /) -> bool:
        """Set the wall clock, if the scenario allows it; return whether it did."""
        ...


_MAKERS = {
    "memory": ("fencelock.sim.memory_engine", "SimulatedMemory"),
    "redis": ("fencelock.sim.redis_engine", "SimulatedRedis"),
    "redlock": ("fencelock.sim.redlock_engine", "SimulatedRedlock"),
}


def make(network: Network, scenario: Scenario) -> SimulatedEngine:
    """Return the engine of a scenario. Drivers are imported only here."""
    module, name = _MAKERS[scenario.engine]
    maker: Callable[[Network, Scenario], SimulatedEngine] = getattr(import_module(module), name)
    return maker(network, scenario)
