"""The memory engine: the reference. One process, nothing kept, every rule in the open.

`MemoryStore` is the engine itself: each method is one atomic step on its own clock, as a server's script would be.
`MemoryBackend` is a client's way to it. The simulated world puts a network between the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import ParamSpec, TypeVar

from fencelock.core.clock import boottime, wall_us
from fencelock.core.records import Entry as Stored
from fencelock.core.records import Record, Written
from fencelock.core.runtime import Event, Runtime
from fencelock.core.urls import redact
from fencelock.errors import ClientClosed, InvalidURL, LimitMismatch
from fencelock.model import (
    Claim,
    Grant,
    Holder,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiter,
    Waiting,
    advance_queue,
    held_for,
    limit_conflict,
)

T = TypeVar("T")
P = ParamSpec("P")

TRAITS = Traits(engine="memory", guarantee=TokenGuarantee.MEMORY, fair=True, push=True, loss_pushed=False)


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
class Answer:
    """What the store says to an attempt: a token, or how long the first in line should wait for the holders."""

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
        self._tombs: dict[str, float] = {}
        self._bells: dict[str, Callable[[], None]] = {}
        self._records: dict[str, Stored] = {}

    def attempt(self, claim: Claim, queue: bool, bell: Callable[[], None] | None = None) -> Answer:
        """Take the lock or a place in line; counts anew what is there already. The bell rings when it is handed over."""
        with self._mutex:
            now = self._now()
            if claim.id in self._tombs:
                return Answer(None)  # a straggler: its abandon overtook it, and nobody waits for the answer
            self._settle(claim.name, now)
            entries = self._queues.setdefault(claim.name, [])
            mine = _find(entries, claim.id)
            if mine is None:
                if (problem := limit_conflict(entries, claim)) is not None:
                    raise LimitMismatch(f"{claim.name!r}: {problem}", claim.name)
                mine = Entry(claim, now + claim.ttl)
                entries.append(mine)
            mine.expires = now + claim.ttl
            first, holders_end = self._settle(claim.name, now)
            if mine.token is None and not queue:
                self._remove(claim)
            elif mine.token is None and bell is not None:
                self._bells[claim.id] = bell
            if mine.token is not None or first is not mine or holders_end is None:
                return Answer(mine.token)
            return Answer(None, max(0.0, holders_end - now))

    def look(self, claim: Claim) -> int | None:
        """Return the claim's token if it was handed the lock; changes nothing."""
        with self._mutex:
            mine = _find(self._queues.get(claim.name, ()), claim.id)
            return None if mine is None or mine.expires <= self._now() else mine.token

    def listen(self, claim: Claim, bell: Callable[[], None]) -> None:
        """Ring when the claim is handed the lock, at once if nobody would ring later."""
        with self._mutex:
            mine = _find(self._queues.get(claim.name, ()), claim.id)
            if mine is None or mine.token is not None:
                bell()
            else:
                self._bells[claim.id] = bell

    def abandon(self, claim: Claim) -> None:
        """Leave, and leave a tombstone: an attempt that was sent earlier may still arrive."""
        with self._mutex:
            now = self._now()
            self._tombs = {id: until for id, until in self._tombs.items() if until > now}
            self._tombs[claim.id] = now + claim.ttl
            self._remove(claim)

    def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Count the ttl of each holder anew."""
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
        """Give back the lock; only its owner can, as only the owner knows the id."""
        with self._mutex:
            return self._remove(claim)

    def inspect(self, name: str) -> Snapshot:
        """Return holders and waiters that are alive."""
        with self._mutex:
            now, wall = self._now(), self._wall()
            alive = [entry for entry in self._queues.get(name, ()) if entry.expires > now]
            return Snapshot(
                name,
                tuple(
                    Holder(e.claim.owner, e.token, e.expires - now, e.shared, e.limit, held_for(e.token, wall))
                    for e in alive
                    if e.token is not None
                ),
                tuple(Waiter(e.claim.owner, e.expires - now, e.shared, e.limit) for e in alive if e.token is None),
            )

    def names(self, prefix: str) -> list[str]:
        """Return the names with anybody alive on them."""
        with self._mutex:
            now = self._now()
            return sorted(
                name
                for name, entries in self._queues.items()
                if name.startswith(prefix) and any(entry.expires > now for entry in entries)
            )

    def force_release(self, name: str) -> int:
        """Drop the holders and let the next in."""
        with self._mutex:
            now = self._now()
            entries = self._queues.get(name, [])
            dropped = [entry for entry in entries if entry.token is not None and entry.expires > now]
            self._mint()
            entries[:] = [entry for entry in entries if entry.token is None]
            self._settle(name, now)
            return len(dropped)

    def read(self, key: str) -> Record | None:
        """Return a record."""
        with self._mutex:
            stored = self._records.get(key)
            return None if stored is None else stored.seen(self._now())

    def write(self, key: str, value: bytes | None, token: int, ttl: float, expect: int | None) -> Written:
        """Write a record, unless what is there forbids it."""
        with self._mutex:
            now = self._now()
            self._records = {key: stored for key, stored in self._records.items() if stored.ends > now}
            stored = self._records.get(key)
            if expect if stored is None else not stored.allows(now, token, expect):
                return Written(False, None if stored is None else stored.seen(now))
            stored = self._records[key] = Stored(value, token, self._mint(), now + ttl)
            return Written(True, stored.seen(now))

    def _remove(self, claim: Claim) -> bool:
        now = self._now()
        self._bells.pop(claim.id, None)
        entries = self._queues.get(claim.name, [])
        mine = _find(entries, claim.id)
        if mine is not None:
            entries.remove(mine)
        self._settle(claim.name, now)
        return mine is not None and mine.token is not None and mine.expires > now

    def _settle(self, name: str, now: float) -> tuple[Entry | None, float | None]:
        """Drop the dead and hand the lock over; return the first in line, and when the holders run out."""
        entries = self._queues.get(name, [])
        settled = advance_queue(entries, now)
        for entry in settled.dead:
            entries.remove(entry)
            self._bells.pop(entry.id, None)
        for entry in settled.admitted:
            entry.token = self._mint()
            entry.expires = now + entry.claim.ttl
            if (bell := self._bells.pop(entry.id, None)) is not None:
                bell()
        if not entries:
            self._queues.pop(name, None)
        return settled.first, settled.holders_end

    def _mint(self) -> int:
        self._counter = max(self._counter + 1, self._wall())
        return self._counter


def _find(entries: Sequence[Entry], id: str) -> Entry | None:
    return next((entry for entry in entries if entry.id == id), None)


class MemoryEngine:
    """A client's way to a `MemoryStore`."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, store: MemoryStore) -> None:
        self._runtime = runtime
        self._store = store
        self._bells: dict[str, Event] = {}
        self._closed = False
        self.records = MemoryRecords(self)

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:  # noqa: ARG002
        """Ask the store; the ttl counts from before the question."""
        sent = self._runtime.now()
        bell = self._bells.get(claim.id)  # anew each time: a place in line that ran out took its bell with it
        ring = None if bell is None else self._remote(bell.set)
        answer = await self._ask(self._store.attempt, claim, queue, ring)
        if answer.token is not None:
            return Grant(claim, answer.token, sent)
        return Waiting(claim, sent, answer.retry_in)

    async def wait(
        self,
        waiting: Waiting,
        timeout: float,
        patience: float | None = None,  # noqa: ARG002
    ) -> Grant | Waiting:
        """Wait to be handed the lock; ask again in the end."""
        claim = waiting.claim
        bell = self._bells.get(claim.id)
        if bell is None:
            bell = self._bells[claim.id] = self._runtime.event()
            await self._ask(self._store.listen, claim, self._remote(bell.set))
        rung = await bell.wait(timeout if waiting.retry_in is None else min(timeout, waiting.retry_in))
        if rung:
            bell.clear()
            token = await self._ask(self._store.look, claim)
            if token is not None:
                self._bells.pop(claim.id, None)
                return Grant(claim, token, waiting.since)
        outcome = await self.attempt(claim, queue=True)
        if isinstance(outcome, Grant):
            self._bells.pop(claim.id, None)
        return outcome

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        if (bell := self._bells.pop(claim.id, None)) is not None:
            bell.set()  # on close, somebody may be waiting for it
        await self._ask(self._store.abandon, claim)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """One question for all."""
        return await self._ask(self._store.renew, [grant.claim for grant in grants])

    async def release(self, grant: Grant) -> bool:
        """Give back the lock."""
        return await self._ask(self._store.release, grant.claim)

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        return await self._ask(self._store.inspect, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for name in await self._ask(self._store.names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders."""
        return await self._ask(self._store.force_release, name)

    async def close(self) -> None:
        """Send whoever still waits away."""
        self._closed = True
        for bell in list(self._bells.values()):
            bell.set()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child begins with an empty store: the copy of the parent's queues would never move on."""
        if child:
            self._bells.clear()
            self._store.reset()

    async def _ask(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry a question to the store and the answer back. The simulated world has a network here."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        return fn(*args, **kwargs)

    def _remote(self, ring: Callable[[], None]) -> Callable[[], None]:
        """Return what the store calls to ring a bell on our side."""
        return ring


class MemoryRecords:
    """`fencelock.core.records.Records` in the store."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._ask = engine._ask
        self._store = engine._store

    async def read(self, key: str) -> Record | None:
        """Look."""
        return await self._ask(self._store.read, key)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Ask the store."""
        return await self._ask(self._store.write, key, value, token, ttl, expect)


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
