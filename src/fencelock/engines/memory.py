"""The memory engine: the reference. It works within one process and stores nothing outside of it.

`MemoryStore` is the "server": it keeps the queue of each name, and each method is one atomic step by the store's clock, like
a script in a real server. `MemoryEngine` is the client, which implements `core/engine.py`. The simulator puts a network
between the two. Records and rate limits are in `memory_records.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, ParamSpec, TypeVar

from fencelock.core.clock import Deadline, boottime, wall_us
from fencelock.core.engine import not_held
from fencelock.core.runtime import Event, Runtime
from fencelock.core.urls import redact
from fencelock.engines.memory_records import MemoryRates, MemoryRecords, StoredValues
from fencelock.errors import ClientClosed, InvalidURL
from fencelock.model import Claim, Grant, Mode, Renewal, Snapshot, TokenGuarantee, Traits, Waiting, advance_queue

T = TypeVar("T")
P = ParamSpec("P")

TRAITS = Traits(engine="memory", guarantee=TokenGuarantee.MEMORY, fair=True, loss_pushed=False)


@dataclass(slots=True)
class QueuedClaim:
    """A claim in the queue of its name. It waits until it has a token; then it holds the name."""

    claim: Claim
    expires: float
    token: int | None = None
    wake: Callable[[], None] | None = None
    """Tells the client of a waiter that it holds the name now."""

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def shared(self) -> bool:
        return self.claim.shared

    @property
    def limit(self) -> int | None:
        return self.claim.limit


class AttemptReply(NamedTuple):
    """The store's reply to an attempt: a token, or for the first waiter the seconds until the holders expire."""

    token: int | None
    retry_in: float | None = None


class MemoryStore:
    """The queues of all names, oldest claim first."""

    def __init__(self, now: Callable[[], float] = boottime, wall: Callable[[], int] = wall_us) -> None:
        self._now = now
        self._wall = wall
        self._counter = wall()
        self.values = StoredValues(now, self._mint)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the counter of tokens."""
        self._mutex = Lock()
        self._queues: dict[str, list[QueuedClaim]] = {}
        self._abandoned: dict[str, float] = {}
        """Until when an attempt with this claim id is refused."""
        self.values.reset(self._mutex)

    def attempt(self, claim: Claim, enqueue: bool, wake: Callable[[], None] | None = None) -> AttemptReply:
        """Grant the lock or enqueue the claim; restart the ttl of an earlier attempt. A later grant calls `wake`."""
        with self._mutex:
            if claim.id in self._abandoned:
                return AttemptReply(None)  # the abandon overtook this attempt, and no caller waits for the reply
            now = self._now()
            self._advance(claim.name, now)  # first: an earlier attempt that has expired loses its place
            mine = self._find(claim)
            if mine is None:
                mine = QueuedClaim(claim, now + claim.ttl)
                self._queues.setdefault(claim.name, []).append(mine)
            mine.expires = now + claim.ttl
            first_waiter, holders_end = self._advance(claim.name, now)
            if mine.token is not None:
                return AttemptReply(mine.token)
            if not enqueue:
                self._remove(claim)
                return AttemptReply(None)
            mine.wake = wake
            if first_waiter is not mine or holders_end is None:
                return AttemptReply(None)
            return AttemptReply(None, holders_end - now)

    def granted_token(self, claim: Claim) -> int | None:
        """Return the claim's token if it holds the name; this changes nothing."""
        with self._mutex:
            held = self._held(claim)
            return None if held is None else held.token

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
            results = []
            for claim in claims:
                if (held := self._held(claim)) is not None:
                    held.expires = self._now() + claim.ttl
                results.append(Renewal.LOST if held is None else Renewal.RENEWED)
            return results

    def release(self, claim: Claim) -> bool:
        """Release the lock and grant it to the next waiter; return whether the claim still held it."""
        with self._mutex:
            held = self._held(claim) is not None
            self._remove(claim)
            return held

    def downgrade(self, claim: Claim) -> bool:
        """Make an exclusive holder a shared one and admit the readers behind it; return whether it still held the lock."""
        with self._mutex:
            if (held := self._held(claim)) is None:
                return False
            now = self._now()
            held.claim = held.claim._replace(mode=Mode.SHARED)
            held.expires = now + claim.ttl
            self._advance(claim.name, now)
            return True

    def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters that have not expired."""
        with self._mutex:
            now = self._now()
            claims = [
                (entry.claim.owner, entry.token, entry.expires - now, entry.shared, entry.limit, entry.claim.value)
                for entry in self._queues.get(name, ())
                if entry.expires > now
            ]
            return Snapshot.of(name, claims, self._wall())

    def names(self, prefix: str) -> list[str]:
        """Return the names that have a holder or a waiter."""
        with self._mutex:
            now = self._now()
            return sorted(
                name
                for name, queue in self._queues.items()
                if name.startswith(prefix) and any(entry.expires > now for entry in queue)
            )

    def force_release(self, name: str) -> int:
        """Remove the holders and grant the lock to the next waiters; return how many holders were removed."""
        with self._mutex:
            now = self._now()
            queue = self._queues.get(name, [])
            removed = sum(entry.token is not None and entry.expires > now for entry in queue)
            queue[:] = [entry for entry in queue if entry.token is None]
            self._mint()
            self._advance(name, now)
            return removed

    # ------------------------------------------------------------------ under the mutex

    def _find(self, claim: Claim) -> QueuedClaim | None:
        """Return the claim's entry in the queue."""
        return next((entry for entry in self._queues.get(claim.name, ()) if entry.id == claim.id), None)

    def _held(self, claim: Claim) -> QueuedClaim | None:
        """Return the claim's entry if it holds the name and has not expired."""
        entry = self._find(claim)
        return None if entry is None or entry.token is None or entry.expires <= self._now() else entry

    def _remove(self, claim: Claim) -> None:
        """Remove the claim and grant the lock to the next waiters."""
        if (entry := self._find(claim)) is not None:
            self._queues[claim.name].remove(entry)
        self._advance(claim.name, self._now())

    def _advance(self, name: str, now: float) -> tuple[QueuedClaim | None, float | None]:
        """Remove expired claims and grant the lock; return the first waiter, and when the first holder expires."""
        queue = self._queues.get(name, [])
        update = advance_queue(queue, now)
        for entry in update.expired:
            queue.remove(entry)
        for entry in update.admitted:
            entry.token = self._mint()
            entry.expires = now + entry.claim.ttl
            if entry.wake is not None:
                entry.wake()
        if not queue:
            self._queues.pop(name, None)
        return update.first_blocked, update.holders_end

    def _mint(self) -> int:
        self._counter = max(self._counter + 1, self._wall())
        return self._counter


class MemoryEngine:
    """A client of a `MemoryStore`."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, store: MemoryStore) -> None:
        self._runtime = runtime
        self._store = store
        self._events: dict[str, Event] = {}
        """The event that ends the wait of each claim, by its id."""
        self._closed = False
        self.records = MemoryRecords(self._call, store.values)
        self.rates = MemoryRates(self._call, store.values)

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:  # noqa: ARG002
        """Acquire the lock or enqueue the claim."""
        sent = self._runtime.now()  # before the request: the lease must not outlive the claim in the store
        wake = None
        if enqueue:
            event = self._events.setdefault(claim.id, self._runtime.event())
            wake = self._remote_callback(event.set)
        reply = await self._call(self._store.attempt, claim, enqueue, wake)
        if reply.token is None:
            return Waiting(claim, sent, reply.retry_in)
        self._events.pop(claim.id, None)
        return Grant(claim, reply.token, sent)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait until the store calls back, and read the token."""
        claim = waiting.claim
        event = self._events.get(claim.id)
        if event is None or not await event.wait(timeout):
            return None
        event.clear()
        token = await self._call(self._store.granted_token, claim)
        if token is None:
            return None
        self._events.pop(claim.id, None)
        return Grant(claim, token, waiting.since)

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        if (event := self._events.pop(claim.id, None)) is not None:
            event.set()  # close() abandons claims that may still be waiting
        await self._call(self._store.abandon, claim)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all grants in one request."""
        return await self._call(self._store.renew, [grant.claim for grant in grants])

    async def release(self, grant: Grant) -> bool:
        """Release the lock and grant it to the next waiter; return False if this grant no longer held it."""
        return await self._call(self._store.release, grant.claim)

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one; raise NotHeld."""
        sent = self._runtime.now()
        if not await self._call(self._store.downgrade, grant.claim):
            raise not_held(grant)
        return grant.downgraded(sent)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return await self._call(self._store.inspect, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over the names that were in use at the time of the call."""
        for name in await self._call(self._store.names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Remove the holders; return how many they were."""
        return await self._call(self._store.force_release, name)

    async def close(self) -> None:
        """Wake all waits; their next call raises ClientClosed."""
        self._closed = True
        for event in list(self._events.values()):
            event.set()

    def after_fork(self) -> None:
        """Empty the store: no process would release the claims in the copied queues."""
        self._events.clear()
        self._store.reset()

    async def _call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store. The simulated runtime puts a network here."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        return fn(*args, **kwargs)

    def _remote_callback(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Return the callback that the store calls to wake this client. The simulated runtime puts a network here."""
        return wake


_stores: dict[tuple[str, str], MemoryStore] = {}
"""The stores of this process, by name and namespace."""


def connect(runtime: Runtime, url: str, namespace: str) -> MemoryEngine:
    """Open `memory://NAME`: all clients of this process that use one name and namespace share one store."""
    name = url.partition("://")[2]
    if any(character in name for character in "/?#@"):
        raise InvalidURL(f"memory:// takes at most a name, as in memory://tests, not {redact(url)!r}")
    return MemoryEngine(runtime, _stores.setdefault((name, namespace), MemoryStore()))
