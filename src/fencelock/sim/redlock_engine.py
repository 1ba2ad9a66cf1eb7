"""Simulated Redlock: the production engine and the production scripts on several simulated servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fencelock.core.engine import Engine
from fencelock.engines.redlock.engine import RedlockEngine
from fencelock.model import Claim
from fencelock.sim.clocks import RATE_ERROR, WallClock
from fencelock.sim.history import Charge, RecordWrite
from fencelock.sim.network import Network
from fencelock.sim.redis_engine import NAMESPACE, RedisServers
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

SKEWS = (0.0, 0.01, 1.0, 1000.0)
"""Seconds by which clocks may be wrong: no promise depends on them as long as no data is lost."""

PERIOD = 60.0
"""Seconds after which a node begins to collect names; some runs begin shortly before."""


class SimulatedRedlock(RedisServers):
    """Three or five independent nodes."""

    fields = MappingProxyType({"lock": 2, "waiters": 2})
    tickets: Mapping[tuple[str, int], int] = MappingProxyType({})  # it is not fair
    log: Sequence[RecordWrite | Charge] = ()  # it has no records

    def __init__(self, network: Network, scenario: Scenario) -> None:
        rng = network.scheduler.random
        self._skew = 0.0 if scenario.wipes else rng.choice(SKEWS)
        self._walls: list[WallClock] = []
        """The clocks of the clients."""
        super().__init__(network, scenario, [f"node-{number + 1}" for number in range(rng.choice(scenario.nodes))])
        self._late = rng.uniform(0, PERIOD)
        for host in self.hosts:
            self._set(host.wall)

    def _set(self, wall: WallClock) -> WallClock:
        wall.jump(self._late + self._rng.uniform(-self._skew, self._skew))
        return wall

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production engine, with the process's own wall clock."""
        runtime.shares_connections = self._rng.random() < 0.5
        rate = 1.0 if self._scenario.wipes else 1 + self._rng.uniform(-RATE_ERROR, RATE_ERROR)
        wall = self._set(WallClock(self._network.scheduler, rate))
        self._walls.append(wall)
        return RedlockEngine(runtime, self._connectors, NAMESPACE, wall.us)

    def token(self, claim: Claim) -> int | None:  # noqa: ARG002
        """Return None: it is needed after a downgrade only, and Redlock has no readers."""
        return None

    def jump(self, seconds: float, /) -> bool:
        """Set the clock of a client. Leases expire by the clocks of the nodes, which may be wrong but are never set."""
        if self._scenario.wipes:
            return False
        self._rng.choice(self._walls).jump(seconds)
        return True
