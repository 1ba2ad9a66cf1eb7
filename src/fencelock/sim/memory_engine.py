"""The memory engine behind a network: the production store and the production client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import ParamSpec, TypeVar, cast

from fencelock.core.rates import RateRequest, Reservation
from fencelock.core.records import Written
from fencelock.engines.memory import MemoryEngine, MemoryStore, QueuedClaim
from fencelock.engines.memory_records import StoredValues
from fencelock.errors import ClientClosed
from fencelock.model import Claim, Snapshot
from fencelock.sim.clocks import BootClock, WallClock
from fencelock.sim.history import Charge, Leftover, RecordWrite, readable
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scenario import Scenario

T = TypeVar("T")
P = ParamSpec("P")


class LoggedValues(StoredValues):
    """Records and rate limits that log what is written, for the checker."""

    def __init__(self, clock: BootClock, mint: Callable[[], int]) -> None:
        super().__init__(clock.now, mint)
        self._clock = clock
        self.log: list[RecordWrite | Charge] = []

    def write(self, key: str, value: bytes | None, token: int, ttl: float, expect: int | None) -> Written:
        """Write a record, and log it."""
        written = super().write(key, value, token, ttl, expect)
        if written.done:
            at, expires = self._clock.true(self._now()), self._clock.true(self._now() + ttl)
            self.log.append(RecordWrite(key, at, token, readable(value), expires))
        return written

    def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge rate limits, and log it."""
        before = dict(self._rates)
        reservation = super().reserve(requests, max_wait)
        self._log_charges(before, reservation.wait)
        return reservation

    def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Refund rate limits, and log it."""
        before = dict(self._rates)
        super().refund(requests, reservation)
        self._log_charges(before)

    def _log_charges(self, before: Mapping[str, int], wait: float | None = None) -> None:
        changed = [(key, number) for key, number in self._rates.items() if before.get(key) != number]
        self.log += [Charge(key, int(self._now() * 1e6), number, wait) for key, number in changed]


class SimStore(MemoryStore):
    """A store that numbers claims in order of arrival, for the checker."""

    def __init__(self, clock: BootClock, wall: Callable[[], int]) -> None:
        super().__init__(clock.now, wall)
        self.values: LoggedValues = LoggedValues(clock, self._mint)
        self.values.reset(self._mutex)
        self.tickets: dict[tuple[str, int], int] = {}
        """By name and token."""
        self._places: dict[str, tuple[QueuedClaim, int]] = {}
        self._read: list[tuple[float, Snapshot]] = []
        self._last = 0

    def _advance(self, name: str, now: float) -> tuple[QueuedClaim | None, float | None]:
        for entry in self._queues.get(name, ()):
            # A claim that expired and is enqueued again has the same id and a new ticket.
            if self._places.get(entry.id, (None, 0))[0] is not entry:
                self._last += 1
                self._places[entry.id] = entry, self._last
        update = super()._advance(name, now)
        for entry in self._queues.get(name, ()):
            if entry.token is not None:
                self.tickets.setdefault((name, entry.token), self._places[entry.id][1])
        return update

    def inspect_member(self, name: str, lag: float, rng: Random) -> Snapshot:
        """Return the state of a name, or one that was read up to `lag` seconds ago, as from a member that is behind."""
        now = self._now()
        self._read = [(at, state) for at, state in self._read if at > now - lag]
        self._read.append((now, self.inspect(name)))
        return rng.choice([state for _, state in self._read if state.name == name])

    def has(self, claim: Claim) -> bool:
        """Return whether the store has an entry of a claim."""
        return self._find(claim) is not None

    def token(self, claim: Claim) -> int | None:
        """Return the token with which a claim holds its name, or None."""
        entry = self._find(claim)
        return None if entry is None else entry.token

    def wipe(self) -> None:
        """Lose all data, the counter included."""
        self.reset()
        self._counter = self._wall()

    def leftovers(self, at: float) -> list[Leftover]:
        """Return all claims in the store."""
        found = []
        for name in self.names(""):
            snapshot = self.inspect(name)
            found += [Leftover(name, holder.owner, "holder", at) for holder in snapshot.holders]
            found += [Leftover(name, waiter.owner, "waiter", at) for waiter in snapshot.waiters]
        return found


class SimulatedMemory:
    """`fencelock.sim.engines.SimulatedEngine`: a store and the clocks of its host."""

    labels: Sequence[str] = ("engine",)
    hosts: Sequence[SimulatedHost] = ()
    reply_timeout = 0.0

    def __init__(self, network: Network, scenario: Scenario | None = None) -> None:
        self._network = network
        self._scenario = scenario
        self.lag = 0.0 if scenario is None else scenario.lag
        self._wall = WallClock(network.scheduler)
        self._wall.stands = scenario is not None and scenario.rewinds
        self.store = SimStore(BootClock.random(network.scheduler), self._wall.us)
        self.tickets: Mapping[tuple[str, int], int] = self.store.tickets
        self.has = self.store.has
        self.token = self.store.token
        self.leftovers = self.store.leftovers
        self.wipe = self.store.wipe
        self.log = self.store.values.log

    def connect(self, runtime: SimRuntime) -> SimMemoryEngine:
        """Return a client of the store."""
        return SimMemoryEngine(runtime, self._network, self)

    def jump(self, seconds: float) -> bool:
        """Set the wall clock. Leases expire by a boot clock, so only tokens after a loss of data depend on it."""
        if self._scenario is not None and self._scenario.wipes:
            return False
        self._wall.jump(seconds)
        return True


class SimMemoryEngine(MemoryEngine):
    """A client that reaches the store over the network."""

    def __init__(self, runtime: SimRuntime, network: Network, engine: SimulatedMemory) -> None:
        super().__init__(runtime, engine.store)
        self._process = runtime.process
        self._network = network
        (self._server,) = engine.labels
        self._lag = engine.lag
        self._rng = network.scheduler.random

    async def _call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        # Charges run once, as on a real connection; all other requests are safe to repeat.
        once = fn in (self._store.values.reserve, self._store.values.refund)
        return await self._network.request(self._process, self._server, partial(fn, *args, **kwargs), once=once)

    async def inspect(self, name: str) -> Snapshot:
        """Return the state of a name, perhaps an older one if members of the engine lag."""
        if not self._lag:
            return await super().inspect(name)
        return await self._call(cast("SimStore", self._store).inspect_member, name, self._lag, self._rng)

    def _remote_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        arrive = partial(self._process.deliver, wake)
        return partial(self._network.send, self._server, self._process.label, arrive)
