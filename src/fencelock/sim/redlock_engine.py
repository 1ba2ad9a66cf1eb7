"""Simulated Redlock: the production engine and the production scripts on several simulated servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fencelock.core.engine import Engine
from fencelock.engines.redis.connector import CONNECT_TIMEOUT
from fencelock.engines.redlock.engine import RedlockEngine
from fencelock.model import Claim
from fencelock.runtime.blocking import run_sync
from fencelock.sim.clocks import RATE_ERROR, WallClock
from fencelock.sim.history import Charge, Leftover, RecordWrite
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.redis_engine import NAMESPACE, connector, outside
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

SKEWS = (0.0, 0.01, 1.0, 1000.0)
"""Seconds by which clocks may be wrong: no promise depends on them as long as no data is lost."""

PERIOD = 60.0
"""Seconds after which a node begins to collect names; some runs begin shortly before."""


class SimulatedRedlock:
    """Three or five independent nodes."""

    reply_timeout = CONNECT_TIMEOUT
    tickets: Mapping[tuple[str, int], int] = {}  # it is not fair
    log: Sequence[RecordWrite | Charge] = ()  # it has no records

    def __init__(self, network: Network, scenario: Scenario) -> None:
        self._network = network
        self._scenario = scenario
        self._rng = network.scheduler.random
        self._skew = 0.0 if scenario.wipes else self._rng.choice(SKEWS)
        self._walls: list[WallClock] = []
        """The clocks of the clients."""
        count = self._rng.choice(scenario.nodes)
        self.labels: Sequence[str] = tuple(f"node-{number}" for number in range(1, count + 1))
        self.hosts: Sequence[SimulatedHost] = tuple(SimulatedHost(network, label) for label in self.labels)
        self._late = self._rng.uniform(0, PERIOD)
        for host in self.hosts:
            self._set(host.wall)
        self._connectors = [connector(label) for label in self.labels]
        self._probe = RedlockEngine(outside(self.hosts), self._connectors, NAMESPACE)

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

    def has(self, claim: Claim) -> bool:
        """Return whether a claim waits on a node or holds it."""
        id = claim.id.encode()
        return any(
            id in value if isinstance(value, dict) else isinstance(value, bytes) and value.startswith(id)
            for host in self.hosts
            for value in host.redis.contents().values()
        )

    def token(self, claim: Claim) -> int | None:  # noqa: ARG002
        """Return None: it is needed after a downgrade only, and Redlock has no readers."""
        return None

    def leftovers(self, at: float) -> list[Leftover]:
        """Return the holders and waiters of every node."""
        found = []
        for host in self.hosts:
            now = host.wall.us() // 1000
            for key, value in host.redis.contents().items():
                kind, _, name = key.decode().removeprefix(f"{NAMESPACE}:redlock:").partition(":")
                if kind == "lock":
                    found.append(Leftover(name, value.split(b":", 2)[2].decode(), f"holder of {host.label}", at))
                elif kind == "waiters":
                    for ends, _, owner in (waiter.split(b":", 2) for waiter in value.values()):
                        if int(ends) > now:
                            found.append(Leftover(name, owner.decode(), f"waiter on {host.label}", at))
        return found

    def wipe(self) -> None:
        """Lose the data of one node, with a restart or without one."""
        host = self._rng.choice(self.hosts)
        if self._rng.random() < 0.5:
            host.redis.wipe()
        else:
            host.crash(self._rng.random(), wipe=True)

    def force(self, name: str) -> None:
        """Release a name by force."""
        run_sync(self._probe.force_release(name))

    def jump(self, seconds: float, /) -> bool:
        """Set the clock of a client. Leases expire by the clocks of the nodes, which may be wrong but are never set."""
        if self._scenario.wipes:
            return False
        self._rng.choice(self._walls).jump(seconds)
        return True
