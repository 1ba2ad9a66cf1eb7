"""The engines that can be simulated: what a run needs of each, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Protocol

from fencelock.core.engine import Engine
from fencelock.model import Claim
from fencelock.sim.history import Leftover
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario


class SimulatedEngine(Protocol):
    """One engine: its servers, a way to them, and what can be seen of it from outside."""

    labels: Sequence[str]
    """Its servers on the network."""
    hosts: Sequence[SimulatedHost]
    """Those that can be stopped and started."""
    tickets: Mapping[int, int]
    """In which order claims came, by token; empty where that means nothing."""

    reply_timeout: float
    """Seconds for which what runs in the background may still wait for an answer that never comes."""

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production backend for a process."""
        ...

    def has(self, claim: Claim) -> bool:
        """Return whether anything is kept for a claim."""
        ...

    def token(self, claim: Claim) -> int | None:
        """Return the token with which a claim holds its name, or None."""
        ...

    def leftovers(self, at: float) -> list[Leftover]:
        """Return whatever is kept for claims."""
        ...

    def wipe(self) -> None:
        """Lose all data."""
        ...

    def force(self, name: str) -> None:
        """Release by force."""
        ...

    def jump(self, seconds: float, /) -> bool:
        """Set the wall clock, if that is fair in this scenario; return whether it was."""
        ...


_MAKERS = {
    "memory": ("fencelock.sim.memory_engine", "SimulatedMemory"),
    "redis": ("fencelock.sim.redis_engine", "SimulatedRedis"),
    "redlock": ("fencelock.sim.redlock_engine", "SimulatedRedlock"),
}


def make(network: Network, scenario: Scenario) -> SimulatedEngine:
    """Return the engine that a scenario is played on; drivers are imported only here."""
    module, name = _MAKERS[scenario.engine]
    maker: Callable[[Network, Scenario], SimulatedEngine] = getattr(import_module(module), name)
    return maker(network, scenario)
