"""Simulated Redis: the production engine and the production scripts on a simulated server."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

from fencelock.core.engine import Engine
from fencelock.core.runtime import Command, Connector, Runtime
from fencelock.engines.redis.connector import CONNECT_TIMEOUT, RedisConnector
from fencelock.engines.redis.engine import RedisEngine
from fencelock.model import Claim
from fencelock.runtime.blocking import run_sync
from fencelock.sim.connection import as_parsed
from fencelock.sim.history import Charge, Leftover, RecordWrite, readable
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session
from fencelock.sim.redis_data import Words
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

NAMESPACE = "fencelock"
COARSE = 1_000_000
"""µs: the step of a clock that is set back when data is lost, so that tokens repeat."""


class TicketingRedis(Redis):
    """A server that numbers claims in order of arrival and logs what it writes, for the checker."""

    def __init__(self, wall: Callable[[], int], run_id: str) -> None:
        self.tickets: dict[tuple[str, int], int] = {}
        self.log: list[tuple[int, Words]] = []
        """When SET changed a record or a rate limit, in µs of the server, and its arguments."""
        self._last = 0
        self._places: dict[bytes, int] = {}
        self._leaving: dict[bytes, int] = {}
        super().__init__(wall, run_id)

    def request(self, command: Command | bytes, session: Session | None = None) -> list[Any]:
        """Execute a command. A claim that leaves the queue and holds the lock does so within one command."""
        self._leaving.clear()
        return super().request(command, session)

    def _do_rpush(self, words: Words) -> int:
        if b":queue:" in words[0]:
            self._last += 1
            self._places[words[1]] = self._last
        return super()._do_rpush(words)

    def _do_lrem(self, words: Words) -> int:
        removed = super()._do_lrem(words)
        if removed and b":queue:" in words[0]:
            self._leaving[words[2]] = self._places.pop(words[2])
        return removed

    def _do_set(self, words: Words) -> Any:
        if b":lock:" in words[0]:
            id, token, *_ = words[1].split(b":", 2)
            self._granted(words[0].partition(b":lock:")[2], id, token)
        if b":record:" in words[0] or b":rate:" in words[0]:
            self.log.append((self._wall(), words))
        return super()._do_set(words)

    def _do_hset(self, words: Words) -> int:
        if b":holders:" in words[0]:
            self._granted(words[0].partition(b":holders:")[2], words[1], words[2].split(b":", 2)[1])
        return super()._do_hset(words)

    def _granted(self, name: bytes, id: bytes, token: bytes) -> None:
        grant = name.decode(), int(token)  # names in different buckets may get the same token
        if grant not in self.tickets:
            self._last += 1
            self.tickets[grant] = self._leaving.get(id, self._last)


class SimulatedRedis:
    """One server."""

    reply_timeout = CONNECT_TIMEOUT

    def __init__(self, network: Network, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = network.scheduler.random
        self._host = SimulatedHost(network, "redis", TicketingRedis)
        self._server = cast("TicketingRedis", self._host.redis)
        self._start = self._host.wall.us()
        if scenario.rewinds:
            self._host.wall.step = COARSE
        self.labels: Sequence[str] = (self._host.label,)
        self.hosts: Sequence[SimulatedHost] = (self._host,)
        self._connector = connector("redis")
        self._probe = RedisEngine(outside(self.hosts), self._connector, NAMESPACE)
        self.tickets: Mapping[tuple[str, int], int] = self._server.tickets

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production engine; its tasks share a connection, as in asyncio, or do not, as with threads."""
        runtime.shares_connections = self._rng.random() < 0.5
        return RedisEngine(runtime, self._connector, NAMESPACE)

    def has(self, claim: Claim) -> bool:
        """Return whether a claim waits or holds the lock."""
        id = claim.id.encode()
        return self.token(claim) is not None or any(
            id in value for value in self._server.contents().values() if isinstance(value, dict)
        )

    def token(self, claim: Claim) -> int | None:
        """Return the token with which a claim holds its name, or None."""
        id = claim.id.encode()
        for key, value in self._server.contents().items():
            if b":lock:" in key and value.startswith(id):
                return int(value.split(b":", 2)[1])
            if b":holders:" in key and id in value:
                return int(value[id].split(b":", 2)[1])
        return None

    @property
    def log(self) -> list[RecordWrite | Charge]:
        """The writes of records and the charges of rate limits."""
        return [self._logged(at, *words) for at, words in self._server.log]

    def _logged(self, at: int, key: bytes, value: bytes, *expiry: bytes) -> RecordWrite | Charge:
        _, rate, limit = key.decode().partition(":rate:")
        if rate:
            return Charge(limit, at, int(value))
        token, _, text = value.split(b":", 2)
        expires = self._host.wall.true(at + 1000 * int(expiry[1]))
        record = key.decode().partition(":record:")[2]
        stored = readable(b64decode(text[1:]) if text else None)
        return RecordWrite(record, self._host.wall.true(at), int(token), stored, expires)

    def leftovers(self, at: float) -> list[Leftover]:
        """Return the claims that `inspect` finds."""
        return inspect_all(self._probe, self._scenario.names, at)

    def wipe(self) -> None:
        """Lose all data, with a restart or without one; tokens repeat if the clock is set back, too."""
        if self._scenario.rewinds:
            self._host.wall.shift -= self._host.wall.us() - self._start
        if self._rng.random() < 0.5:
            self._host.redis.wipe()
        else:
            self._host.crash(self._rng.random(), wipe=True)

    def force(self, name: str) -> None:
        """Release a name by force."""
        run_sync(self._probe.force_release(name))

    def jump(self, seconds: float) -> bool:
        """Set the clock by which leases expire, only in scenarios that promise no exclusion."""
        if self._scenario.jumps:
            self._host.wall.jump(seconds)
        return self._scenario.jumps


def connector(label: str) -> RedisConnector:
    """Return a production connector. Simulated connections use it only to decode errors."""
    return RedisConnector(label, _never, _never)


def inspect_all(client_engine: Engine, names: Sequence[str], at: float) -> list[Leftover]:
    """Return the holders and waiters that an engine finds under the names."""
    found = []
    for name in names:
        snapshot = run_sync(client_engine.inspect(name))
        found += [Leftover(name, holder.owner, "holder", at) for holder in snapshot.holders]
        found += [Leftover(name, waiter.owner, "waiter", at) for waiter in snapshot.waiters]
    return found


def outside(hosts: Sequence[SimulatedHost]) -> Runtime:
    """Return a runtime for the checker: it reaches every server immediately, whatever the faults are."""
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
    raise AssertionError("the simulator does not connect to real servers")
