"""Simulated Redis: the production engine and the production scripts on a simulated server."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from fencelock.core.engine import Engine
from fencelock.core.runtime import Command
from fencelock.engines.redis.connector import CONNECT_TIMEOUT, RedisConnector
from fencelock.engines.redis.engine import RedisEngine
from fencelock.model import Claim
from fencelock.sim.history import Charge, Leftover, RecordWrite, readable
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session
from fencelock.sim.redis_data import Words
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

NAMESPACE = "fencelock"
CLAIMS = re.compile(r":(lock|holders|waiters):(.*)", re.DOTALL)
"""Which keys hold claims: the kind of the key, and the name."""
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


class RedisServers:
    """Simulated servers on which the production scripts keep claims: what Redis and Redlock have in common."""

    reply_timeout = CONNECT_TIMEOUT
    fields: Mapping[str, int]
    """How many fields are before the owner, in the value of each kind of key that holds claims."""

    def __init__(
        self, network: Network, scenario: Scenario, labels: Sequence[str], make: Callable[..., Redis] = Redis
    ) -> None:
        self._network = network
        self._scenario = scenario
        self._rng = network.scheduler.random
        self.labels = labels
        self.hosts: Sequence[SimulatedHost] = tuple(SimulatedHost(network, label, make) for label in labels)
        self._connectors = [connector(label) for label in labels]

    def has(self, claim: Claim) -> bool:
        """Return whether a claim waits on a server or holds it."""
        id = claim.id.encode()
        return any(
            id in value if isinstance(value, dict) else isinstance(value, bytes) and value.startswith(id)
            for host in self.hosts
            for value in host.redis.contents().values()
        )

    def leftovers(self, at: float) -> list[Leftover]:
        """Return the holders and waiters of every server."""
        found = []
        for host in self.hosts:
            for key, value in host.redis.contents().items():
                if (place := CLAIMS.search(key.decode())) is None:
                    continue
                kind, name = place.groups()
                role = f"{'waiter' if kind == 'waiters' else 'holder'} of {host.label}"
                for claim in [value] if kind == "lock" else host.unexpired(value):
                    owner, _, _ = claim.decode().split(":", self.fields[kind])[-1].partition("\n")
                    found.append(Leftover(name, owner, role, at))
        return found

    def wipe(self) -> None:
        """Lose the data of one server, with a restart or without one."""
        host = self._rng.choice(self.hosts)
        if self._rng.random() < 0.5:
            host.redis.wipe()
        else:
            host.crash(self._rng.random(), wipe=True)


class SimulatedRedis(RedisServers):
    """One server."""

    fields = MappingProxyType({"lock": 3, "holders": 4, "waiters": 5})

    def __init__(self, network: Network, scenario: Scenario) -> None:
        super().__init__(network, scenario, ("redis",), TicketingRedis)
        (self._host,), (self._connector,) = self.hosts, self._connectors
        self._server = cast("TicketingRedis", self._host.redis)
        self._start = self._host.wall.us()
        if scenario.rewinds:
            self._host.wall.step = COARSE
        self.tickets: Mapping[tuple[str, int], int] = self._server.tickets

    def connect(self, runtime: SimRuntime) -> Engine:
        """Return the production engine; its tasks share a connection, as in asyncio, or do not, as with threads."""
        runtime.shares_connections = self._rng.random() < 0.5
        return RedisEngine(runtime, self._connector, NAMESPACE)

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

    def wipe(self) -> None:
        """Lose all data; tokens repeat if the clock is set back, too."""
        if self._scenario.rewinds:
            self._host.wall.shift -= self._host.wall.us() - self._start
        super().wipe()

    def jump(self, seconds: float) -> bool:
        """Set the clock by which leases expire, only in scenarios that promise no exclusion."""
        if self._scenario.jumps:
            self._host.wall.jump(seconds)
        return self._scenario.jumps


def connector(label: str) -> RedisConnector:
    """Return a production connector. Simulated connections use it only to decode errors."""
    return RedisConnector(label, _never, _never)


def _never() -> Any:
    raise AssertionError("the simulator does not connect to real servers")
