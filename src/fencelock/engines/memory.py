"""The memory engine: the reference. It works within one process and stores nothing outside of it.

`MemoryStore` is the "server": each method is one atomic step on the store's clock, like a script in a real server.
`MemoryEngine` is the client. The simulated runtime puts a network between the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import ParamSpec, TypeVar

from fencelock.core.clock import Deadline, boottime, wall_us
from fencelock.core.rates import RateRequest, Reservation, decide
from fencelock.core.records import Entry as Stored
from fencelock.core.records import Record, Written
from fencelock.core.runtime import Event, Runtime
from fencelock.core.urls import redact
from fencelock.errors import ClientClosed, InvalidURL, NotHeld
from fencelock.model import (
    Claim,
    Grant,
    Mode,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiting,
    advance_queue,
)

T = TypeVar("T")
P = ParamSpec("P")

TRAITS = Traits(engine="memory", guarantee=TokenGuarantee.MEMORY, fair=True, loss_pushed=False)


@dataclass(slots=True)
class Entry:
    """A claim in the queue; it holds the name once it has a token."""

    claim: Claim
    expires: float
    token: int | None = None

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def shared(self) -> bool:
        return self.claim.shared

    @property
    def limit(self) -> int | None:
        return self.claim.limit


@dataclass(frozen=True, slots=True)
class AttemptReply:
    """The store's reply to an attempt: a token, or for the first waiter the seconds until the holders expire."""

    token: int | None
    retry_in: float | None = None


class MemoryStore:
    """All queues of one engine."""

    def __init__(self, now: Callable[[], float] = boottime, wall: Callable[[], int] = wall_us) -> None:
        self._now = now
        self._wall = wall
        self._counter = wall()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the counter."""
        self._mutex = Lock()
        self._queues: dict[str, list[Entry]] = {}
        self._abandoned: dict[str, float] = {}
        self._wakeups: dict[str, Callable[[], None]] = {}
        self._records: dict[str, Stored] = {}
        self._rates: dict[str, int] = {}

    def attempt(self, claim: Claim, enqueue: bool, wake: Callable[[], None] | None = None) -> AttemptReply:
        """Grant the lock or enqueue the claim; restart the ttl of an earlier attempt. A later grant calls `wake`."""
        with self._mutex:
            now = self._now()
            if claim.id in self._abandoned:
                return AttemptReply(None)  # the abandon overtook this attempt, and no caller waits for the reply
            self._advance(claim.name, now)
            entries = self._queues.setdefault(claim.name, [])
            mine = _find(entries, claim.id)
            if mine is None:
                mine = Entry(claim, now + claim.ttl)
                entries.append(mine)
            mine.expires = now + claim.ttl
            first, holders_end = self._advance(claim.name, now)
            if mine.token is None and not enqueue:
                self._remove(claim)
            elif mine.token is None and wake is not None:
                self._wakeups[claim.id] = wake
            if mine.token is not None or first is not mine or holders_end is None:
                return AttemptReply(mine.token)
            return AttemptReply(None, max(0.0, holders_end - now))

    def granted_token(self, claim: Claim) -> int | None:
        """Return the claim's token if it was granted the lock; this changes nothing."""
        with self._mutex:
            mine = _find(self._queues.get(claim.name, ()), claim.id)
            return None if mine is None or mine.expires <= self._now() else mine.token

    def abandon(self, claim: Claim) -> None:
        """Remove the claim and remember its id for a ttl: an attempt that was sent earlier may still arrive."""
        with self._mutex:
            now = self._now()
            self._abandoned = {id: until for id, until in self._abandoned.items() if until > now}
            self._abandoned[claim.id] = now + claim.ttl
            self._remove(claim)

    def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Restart the ttl of each holder."""
        with self._mutex:
            now = self._now()
            answers = []
            for claim in claims:
                mine = _find(self._queues.get(claim.name, ()), claim.id)
                if mine is None or mine.token is None or mine.expires <= now:
                    answers.append(Renewal.LOST)
                else:
                    mine.expires = now + claim.ttl
                    answers.append(Renewal.RENEWED)
            return answers

    def release(self, claim: Claim) -> bool:
        """Release the lock; return whether the claim held it. Only its client knows the claim's id."""
        with self._mutex:
            return self._remove(claim)

    def downgrade(self, claim: Claim) -> bool:
        """Make an exclusive holder a shared one and admit the readers behind it; return whether it still held the lock."""
        with self._mutex:
            now = self._now()
            mine = _find(self._queues.get(claim.name, ()), claim.id)
            if mine is None or mine.token is None or mine.expires <= now:
                return False
            mine.claim = mine.claim._replace(mode=Mode.SHARED)
            mine.expires = now + claim.ttl
            self._advance(claim.name, now)
            return True

    def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters that have not expired."""
        with self._mutex:
            now, wall = self._now(), self._wall()
            alive = [entry for entry in self._queues.get(name, ()) if entry.expires > now]
            claims = [
                (c.owner, e.token, e.expires - now, c.shared, c.limit, c.value) for e in alive for c in (e.claim,)
            ]
            return Snapshot.of(name, claims, wall)

    def names(self, prefix: str) -> list[str]:
        """Return the names that have a holder or a waiter."""
        with self._mutex:
            now = self._now()
            return sorted(
                name
                for name, entries in self._queues.items()
                if name.startswith(prefix) and any(entry.expires > now for entry in entries)
            )

    def force_release(self, name: str) -> int:
        """Remove the holders and grant the lock to the next waiters; return how many holders were removed."""
        with self._mutex:
            now = self._now()
            entries = self._queues.get(name, [])
            dropped = [entry for entry in entries if entry.token is not None and entry.expires > now]
            self._mint()
            entries[:] = [entry for entry in entries if entry.token is None]
            self._advance(name, now)
            return len(dropped)

    def read(self, key: str) -> Record | None:
        """Return a record."""
        with self._mutex:
            stored = self._records.get(key)
            return None if stored is None else stored.seen(self._now())

    def write(self, key: str, value: bytes | None, token: int, ttl: float, expect: int | None) -> Written:
        """Write a record, unless the stored one has a higher token or another version."""
        with self._mutex:
            now = self._now()
            self._records = {key: stored for key, stored in self._records.items() if stored.ends > now}
            stored = self._records.get(key)
            if expect if stored is None else not stored.allows(now, token, expect):
                return Written(False, None if stored is None else stored.seen(now))
            stored = self._records[key] = Stored(value, token, self._mint(), now + ttl)
            return Written(True, stored.seen(now))

    def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none."""
        with self._mutex:
            now = int(self._now() * 1e6)
            self._rates = {key: time for key, time in self._rates.items() if time > now}
            stored = [self._rates.get(request.key, 0) for request in requests]
            reservation = decide(now, stored, requests, max_wait)
            if reservation.granted:
                self._rates |= zip([request.key for request in requests], reservation.times, strict=True)
            return reservation

    def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        with self._mutex:
            for request, time in zip(requests, reservation.times, strict=True):
                if self._rates.get(request.key) == time:
                    self._rates[request.key] = time - request.cost

    def read_rates(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Return the clock and the time of each limit."""
        with self._mutex:
            return int(self._now() * 1e6), [self._rates.get(key, 0) for key in keys]

    def _remove(self, claim: Claim) -> bool:
        now = self._now()
        self._wakeups.pop(claim.id, None)
        entries = self._queues.get(claim.name, [])
        mine = _find(entries, claim.id)
        if mine is not None:
            entries.remove(mine)
        self._advance(claim.name, now)
        return mine is not None and mine.token is not None and mine.expires > now

    def _advance(self, name: str, now: float) -> tuple[Entry | None, float | None]:
        """Remove expired claims and grant the lock; return the first waiter, and when the first holder expires."""
        entries = self._queues.get(name, [])
        update = advance_queue(entries, now)
        for entry in update.dead:
            entries.remove(entry)
            self._wakeups.pop(entry.id, None)
        for entry in update.admitted:
            entry.token = self._mint()
            entry.expires = now + entry.claim.ttl
            if (wake := self._wakeups.pop(entry.id, None)) is not None:
                wake()
        if not entries:
            self._queues.pop(name, None)
        return update.first, update.holders_end

    def _mint(self) -> int:
        self._counter = max(self._counter + 1, self._wall())
        return self._counter


def _find(entries: Sequence[Entry], id: str) -> Entry | None:
    return next((entry for entry in entries if entry.id == id), None)


class MemoryEngine:
    """A client of a `MemoryStore`."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, store: MemoryStore) -> None:
        self._runtime = runtime
        self._store = store
        self._wakeups: dict[str, Event] = {}
        self._closed = False
        self.records = MemoryRecords(self)
        self.rates = MemoryRates(self)

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:  # noqa: ARG002
        """Acquire the lock or enqueue the claim. The lease counts from before the request."""
        sent = self._runtime.now()
        wake = None
        if enqueue:
            if claim.id not in self._wakeups:
                self._wakeups[claim.id] = self._runtime.event()
            wake = self._remote_callback(self._wakeups[claim.id].set)
        answer = await self._call(self._store.attempt, claim, enqueue, wake)
        if answer.token is None:
            return Waiting(claim, sent, answer.retry_in)
        self._wakeups.pop(claim.id, None)
        return Grant(claim, answer.token, sent)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait until the store calls back, and read the token."""
        claim = waiting.claim
        event = self._wakeups.get(claim.id)
        if event is None or not await event.wait(timeout):
            return None
        event.clear()
        token = await self._call(self._store.granted_token, claim)
        if token is None:
            return None
        self._wakeups.pop(claim.id, None)
        return Grant(claim, token, waiting.since)

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        if (event := self._wakeups.pop(claim.id, None)) is not None:
            event.set()  # close() abandons claims that may still be waiting
        await self._call(self._store.abandon, claim)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all grants in one request."""
        return await self._call(self._store.renew, [grant.claim for grant in grants])

    async def release(self, grant: Grant) -> bool:
        """Release the lock."""
        return await self._call(self._store.release, grant.claim)

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one."""
        sent = self._runtime.now()
        if not await self._call(self._store.downgrade, grant.claim):
            raise NotHeld(f"the engine no longer has the lock on {grant.claim.name!r}", grant.claim.name)
        return grant.downgraded(sent)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return await self._call(self._store.inspect, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over the names that were in use at the time of the call."""
        for name in await self._call(self._store.names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Remove the holders."""
        return await self._call(self._store.force_release, name)

    async def close(self) -> None:
        """Wake all waits; their next call raises ClientClosed."""
        self._closed = True
        for event in list(self._wakeups.values()):
            event.set()

    def after_fork(self) -> None:
        """Empty the store: no process would release the claims in the copied queues."""
        self._wakeups.clear()
        self._store.reset()

    async def _call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store. The simulated runtime puts a network here."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        return fn(*args, **kwargs)

    def _remote_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Return the callback that the store calls to wake this client. The simulated runtime puts a network here."""
        return wake


class MemoryRates:
    """`fencelock.core.rates.Rates` in the store."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._call = engine._call
        self._store = engine._store

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none."""
        return await self._call(self._store.reserve, requests, max_wait)

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        await self._call(self._store.refund, requests, reservation)

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read all limits."""
        return await self._call(self._store.read_rates, keys)


class MemoryRecords:
    """`fencelock.core.records.Records` in the store."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._call = engine._call
        self._store = engine._store

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, or None."""
        return await self._call(self._store.read, key)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Compare and write in the store."""
        return await self._call(self._store.write, key, value, token, ttl, expect)


_stores: dict[tuple[str, str], MemoryStore] = {}
_stores_mutex = Lock()


def connect(runtime: Runtime, url: str, namespace: str) -> MemoryEngine:
    """Open `memory://NAME`: all clients of this process that use one name and namespace share one store."""
    name = url.partition("://")[2]
    if any(character in name for character in "/?#@"):
        raise InvalidURL(f"memory:// takes at most a name, as in memory://tests, not {redact(url)!r}")
    with _stores_mutex:
        store = _stores.get((name, namespace))
        if store is None:
            store = _stores[name, namespace] = MemoryStore()
    return MemoryEngine(runtime, store)
