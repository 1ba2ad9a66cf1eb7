"""Redis in the simulated world: the production backend and the production scripts, on a simulated server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

from fencelock.core.engine import Engine
from fencelock.core.runtime import Command, Connector, Runtime
from fencelock.engines.redis.connector import CONNECT_TIMEOUT, RedisConnector
from fencelock.engines.redis.engine import RedisEngine
from fencelock.model import Claim
from fencelock.runtime.blocking import run_sync
from fencelock.sim.connection import as_parsed
from fencelock.sim.history import Left
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session
from fencelock.sim.redis_data import Words
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

NAMESPACE = "fencelock"
COARSE = 1_000_000
"""µs: the step of a clock that goes back when data is lost, so that tokens are counted up, and repeat."""


class Watched(Redis):
    """A server that numbers the claims in the order in which they came, for the checker."""

    def __init__(self, wall: Callable[[], int], run_id: str) -> None:
        self.tickets: dict[int, int] = {}
        self._last = 0
        self._places: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        super().__init__(wall, run_id)

    def request(self, command: Command | bytes, session: Session | None = None) -> list[Any]:
        """Forget who left the line during the command before: who left to hold the lock did so in one step."""
        self._leaving.clear()
        return super().request(command, session)

    def _do_zadd(self, words: Words) -> int:
        if b":queue:" in words[0]:
            self._last += 1
            self._places[words[2]] = self._last
        return super()._do_zadd(words)

    def _do_zrem(self, words: Words) -> int:
        gone = super()._do_zrem(words)
        if gone and b":queue:" in words[0]:
            self._leaving[words[1]] = self._places.pop(words[1])
        return gone

    def _do_hset(self, words: Words) -> int:
        if b":holders:" in words[0]:
            token = int(words[2].split(b":", 2)[1])
            if token not in self.tickets:
                self._last += 1
                self.tickets[token] = self._leaving.get(words[1], self._last)
        return super()._do_hset(words)


class SimulatedRedis:
    """One server."""

    patience = CONNECT_TIMEOUT

    def __init__(self, network: Network, scenario: Scenario) -> None:
        self._scenario = scenario
        self._chance = network.scheduler.random
        self._host = SimulatedHost(network, "redis", Watched)
        self._server = cast("Watched", self._host.redis)
        self._start = self._host.wall.us()
        if scenario.rewinds:
            self._host.wall.step = COARSE
        self.labels: Sequence[str] = (self._host.label,)
        self.hosts: Sequence[SimulatedHost] = (self._host,)
        self._connector = connector("redis")
        self._probe = RedisEngine(outside(self.hosts), self._connector, NAMESPACE)
        self.tickets: Mapping[int, int] = self._server.tickets

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production backend; as in asyncio its tasks share a connection, or as in threads they do not."""
        runtime.shares_connections = self._chance.random() < 0.5
        return RedisEngine(runtime, self._connector, NAMESPACE)

    def has(self, claim: Claim) -> bool:
        """Return whether a claim is in line, or holds the lock."""
        id = claim.id.encode()
        return any(id in value for value in self._server.contents().values() if isinstance(value, dict))

    def left(self, at: float) -> list[Left]:
        """Return whom the production code finds."""
        return look(self._probe, self._scenario.names, at)

    def wipe(self) -> None:
        """Lose all data, with the server or without; tokens repeat if the clock goes back as well."""
        if self._scenario.rewinds:
            self._host.wall.shift -= self._host.wall.us() - self._start
        if self._chance.random() < 0.5:
            self._host.redis.wipe()
        else:
            self._host.crash(self._chance.random(), wipe=True)

    def force(self, name: str) -> None:
        """Release by force."""
        run_sync(self._probe.force_release(name))

    def jump(self, seconds: float) -> bool:
        """Leases run out by this clock: it is set only where nothing is promised of them."""
        if self._scenario.jumps:
            self._host.wall.jump(seconds)
        return self._scenario.jumps


def connector(label: str) -> RedisConnector:
    """Return the production dialer, which never dials here: simulated wires ask it for nothing but how errors look."""
    return RedisConnector(label, _never, _never)


def look(client_engine: Engine, names: Sequence[str], at: float) -> list[Left]:
    """Return whom a backend finds under some names."""
    found = []
    for name in names:
        snapshot = run_sync(client_engine.inspect(name))
        found += [Left(name, holder.owner, "holder", at) for holder in snapshot.holders]
        found += [Left(name, waiter.owner, "waiter", at) for waiter in snapshot.waiters]
    return found


def outside(hosts: Sequence[SimulatedHost]) -> Runtime:
    """Return a world for whoever looks at servers from outside: every answer is there at once, whatever goes wrong."""
    return cast("Runtime", _Outside({host.label: host for host in hosts}))


class _Outside:
    shares_connections = False

    def __init__(self, hosts: dict[str, SimulatedHost]) -> None:
        self._hosts = hosts

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        pass

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:  # noqa: ARG002
        run_sync(work)

    async def connect(self, connector: Connector, *_: Callable[..., None]) -> _Direct:
        return _Direct(self._hosts[connector.address], connector)

    async def request_all(
        self, requests: Sequence[tuple[_Direct, Command | bytes]], timeout: float, _: object
    ) -> list[Any]:
        return [await connection.request(command, timeout) for connection, command in requests]


class _Direct:
    open = True
    pending = ()
    oldest_pending_since = None

    def __init__(self, host: SimulatedHost, connector: Connector) -> None:
        self._host = host
        self._connector = connector

    async def request(self, command: Command | bytes, _: float) -> Any:
        if command[0] == "SUBSCRIBE":
            return [b"subscribe", b"", 0]
        return as_parsed(self._connector, self._host.redis.request(command)[0])

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _never() -> Any:
    raise AssertionError("nobody dials a real server in the simulated world")
