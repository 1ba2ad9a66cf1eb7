"""Redis in the simulated world: the production backend and the production scripts, on a simulated server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

from fencelock.backends.redis.dial import DIAL_SECONDS, RedisDialer
from fencelock.backends.redis.engine import RedisBackend
from fencelock.core.backend import Backend
from fencelock.core.world import Command, Dialer, World
from fencelock.model import Claim
from fencelock.sim.history import Left
from fencelock.sim.host import Host
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session
from fencelock.sim.redis_data import Words
from fencelock.sim.scenario import Scenario
from fencelock.sim.wire import as_parsed
from fencelock.sim.world import SimWorld
from fencelock.worlds.blocking import drive

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

    def ask(self, command: Command | bytes, session: Session | None = None) -> list[Any]:
        """Forget who left the line during the command before: who left to hold the lock did so in one step."""
        self._leaving.clear()
        return super().ask(command, session)

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


class RedisEngine:
    """One server."""

    patience = DIAL_SECONDS

    def __init__(self, network: Network, scenario: Scenario) -> None:
        self._scenario = scenario
        self._chance = network.scheduler.random
        self._host = Host(network, "redis", Watched)
        self._server = cast("Watched", self._host.redis)
        self._start = self._host.wall.us()
        if scenario.rewinds:
            self._host.wall.step = COARSE
        self.labels: Sequence[str] = (self._host.label,)
        self.hosts: Sequence[Host] = (self._host,)
        self._dialer = dialer("redis")
        self._probe = RedisBackend(outside(self.hosts), self._dialer, NAMESPACE)
        self.tickets: Mapping[int, int] = self._server.tickets

    def connect(self, world: SimWorld) -> Backend:
        """Return the production backend; as in asyncio its tasks share a connection, or as in threads they do not."""
        world.shares_wires = self._chance.random() < 0.5
        return RedisBackend(world, self._dialer, NAMESPACE)

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
        drive(self._probe.force_release(name))

    def jump(self, seconds: float) -> bool:
        """Leases run out by this clock: it is set only where nothing is promised of them."""
        if self._scenario.jumps:
            self._host.wall.jump(seconds)
        return self._scenario.jumps


def dialer(label: str) -> RedisDialer:
    """Return the production dialer, which never dials here: simulated wires ask it for nothing but how errors look."""
    return RedisDialer(label, _never, _never)


def look(backend: Backend, names: Sequence[str], at: float) -> list[Left]:
    """Return whom a backend finds under some names."""
    found = []
    for name in names:
        snapshot = drive(backend.inspect(name))
        found += [Left(name, holder.owner, "holder", at) for holder in snapshot.holders]
        found += [Left(name, waiter.owner, "waiter", at) for waiter in snapshot.waiters]
    return found


def outside(hosts: Sequence[Host]) -> World:
    """Return a world for whoever looks at servers from outside: every answer is there at once, whatever goes wrong."""
    return cast("World", _Outside({host.label: host for host in hosts}))


class _Outside:
    shares_wires = False

    def __init__(self, hosts: dict[str, Host]) -> None:
        self._hosts = hosts

    def now(self) -> float:
        return 0.0

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:  # noqa: ARG002
        drive(work)

    async def wire(self, dialer: Dialer, *_: Callable[..., None]) -> _Direct:
        return _Direct(self._hosts[dialer.address], dialer)

    async def fan(self, asked: Sequence[tuple[_Direct, Command | bytes]], timeout: float, _: object) -> list[Any]:
        return [await wire.ask(command, timeout) for wire, command in asked]


class _Direct:
    open = True
    owed = ()
    waiting_since = None

    def __init__(self, host: Host, dialer: Dialer) -> None:
        self._host = host
        self._dialer = dialer

    async def ask(self, command: Command | bytes, _: float) -> Any:
        if command[0] == "SUBSCRIBE":
            return [b"subscribe", b"", 0]
        return as_parsed(self._dialer, self._host.redis.ask(command)[0])

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


def _never() -> Any:
    raise AssertionError("nobody dials a real server in the simulated world")
