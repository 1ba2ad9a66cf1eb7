"""Redis, one server: a queue in Lua. The releaser hands the lock to the next waiter, and a push wakes that waiter."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from itertools import count
from math import inf
from typing import NamedTuple
from urllib.parse import quote
from zlib import crc32

from fencelock.core.clock import Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, not_held, reply_timeout
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector
from fencelock.engines.redis.pool import RedisPool, escape_pattern
from fencelock.engines.redis.rates import RedisRates
from fencelock.engines.redis.records import RedisRecords
from fencelock.engines.redis.scripts import load, packed, ttl_ms
from fencelock.errors import EngineUnavailable
from fencelock.model import (
    Claim,
    Grant,
    Renewal,
    Snapshot,
    StoredClaim,
    TokenGuarantee,
    Traits,
    Waiting,
)

TRAITS = Traits(engine="redis", guarantee=TokenGuarantee.CLOCKED, fair=True, loss_pushed=False)

BUCKETS = 1024
"""Token counters per namespace. All keys of a name share its counter's hash tag; only the counter outlives the name."""
BATCH = 500
"""Leases that one script renews: a longer script would delay other clients of the server."""
PACKED_NAMES = 256
"""Names whose packed commands are kept."""
MIN_TIMEOUT = 0.2
"""The shortest time to wait for a reply, in seconds."""

ATTEMPT, RELEASE, ABANDON, RENEW, DOWNGRADE, INSPECT, FORCE = map(
    load, ("attempt", "release", "abandon", "renew", "downgrade", "inspect", "force")
)


class WaitingConnection(NamedTuple):
    """The connection that is kept for a claim in the queue: the server notifies the claim over it.

    A caller that takes it out of `_waiting` uses the connection alone.
    """

    connection: RedisConnection
    event: Event
    attempt_no: str
    """The number of the last attempt. A notification for an earlier one is void: that queue entry has expired since."""


class RedisEngine:
    """`fencelock.core.engine.Engine` on one Redis server."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, connector: RedisConnector, namespace: str, url: str | None = None) -> None:
        self.url = url
        """The URL that an application's own client stands for; None if the application gave a URL."""
        self._runtime = runtime
        self._prefix = quote(namespace, safe="")
        self._pool = RedisPool(runtime, connector, self._prefix)
        self._waiting: dict[str, WaitingConnection] = {}
        self._attempt_numbers = count(1)
        # Programs lock the same names again and again: pack what is the same in each attempt or release only once.
        self._begin_attempt = lru_cache(PACKED_NAMES)(self._pack_attempt)
        self._begin_release = lru_cache(PACKED_NAMES)(self._pack_release)
        self.records = RedisRecords(self._pool, self._bucket_key)
        self.rates = RedisRates(self._pool, self._bucket_key)

    # ------------------------------------------------------------------ the engine protocol

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock or enqueue the claim, in one script."""
        id, timeout = claim.id, reply_timeout(claim.ttl, MIN_TIMEOUT)
        kept = self._waiting.pop(id, None)
        if kept is not None and not self._pool.usable(kept.connection, timeout):
            self._stop_waiting(claim, kept)
            kept = None
        if kept is not None:
            connection = kept.connection
        else:
            connection = self._pool.get_idle(timeout) or await self._pool.connect(deadline.at_most(inf))
        timeout = deadline.at_most(timeout)
        since = self._runtime.now()
        attempt_no = str(next(self._attempt_numbers))
        waiting = False
        try:
            notify_target = f"{connection.channel}:{attempt_no}" if enqueue else ""
            begun = self._begin_attempt(claim.name, claim.ttl, _stored_mode(claim), claim.owner, claim.value)
            command = begun + packed(id, notify_target)
            reply = await self._pool.request(connection, ATTEMPT, command, timeout)
            waiting = enqueue and reply < 0
            if waiting:
                token, _, notified = connection.notifications.pop(id, "").partition(":")
                if notified == attempt_no:  # the notification arrived together with the reply
                    waiting, reply = False, int(token)
        finally:
            if waiting:
                self._keep_waiting(claim, kept, connection, attempt_no)
            elif kept is not None:
                self._stop_waiting(claim, kept)
            else:
                self._pool.put_back(connection)
        if reply > 0:
            return Grant(claim, reply, since)
        # The script says -2 minus the ms until a claim ahead expires. One ms later it certainly has expired.
        return Waiting(claim, since, None if reply == -1 else (-1 - reply) / 1000)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait for the notification that the claim holds the lock."""
        claim = waiting.claim
        kept = self._waiting.pop(claim.id, None)
        if kept is None:
            return None
        try:
            await self._runtime.wait_for_push([kept.connection.raw], kept.event, timeout)
        except BaseException:
            self._stop_waiting(claim, kept)
            raise
        token, _, notified = kept.connection.notifications.get(claim.id, "").partition(":")
        if notified == kept.attempt_no:
            self._stop_waiting(claim, kept)
            return Grant(claim, int(token), waiting.since)
        self._waiting[claim.id] = kept
        return None

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        kept = self._waiting.pop(claim.id, None)
        if kept is not None:
            self._stop_waiting(claim, kept)
        command = ABANDON.call((self._bucket_key(claim.name),), (claim.name, claim.id, ttl_ms(claim.ttl)))
        timeout = reply_timeout(claim.ttl, MIN_TIMEOUT)
        try:
            await self._pool.run(ABANDON, command, timeout, MIN_REPLY_TIMEOUT)
        except EngineUnavailable as error:
            if not isinstance(error.__cause__, EngineUnavailable):
                raise
            # This call shared the failure of a connect that another task began earlier. The server may be back by now, and
            # close() calls abandon only once.
            await self._pool.run(ABANDON, command, timeout, MIN_REPLY_TIMEOUT)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all leases, a batch at a time."""
        shortest = min(grant.claim.ttl for grant in grants)
        # A third of the ttl is left when this starts: a failed connect must leave time for two more before the deadline.
        timeout, connect_timeout = reply_timeout(shortest, MIN_TIMEOUT), max(MIN_TIMEOUT, shortest / 6)
        renewed: list[int] = []
        for start in range(0, len(grants), BATCH):
            claims = [grant.claim for grant in grants[start : start + BATCH]]
            keys = tuple(self._bucket_key(claim.name) for claim in claims)
            args = tuple(word for claim in claims for word in (claim.name, claim.id, ttl_ms(claim.ttl)))
            renewed += await self._pool.run(RENEW, RENEW.call(keys, args), timeout, connect_timeout)
        return [Renewal.RENEWED if done else Renewal.LOST for done in renewed]

    async def release(self, grant: Grant) -> bool:
        """Release the lock and hand it to the next waiter. Return False if this grant no longer held it."""
        claim = grant.claim
        command = self._begin_release(claim.name) + packed(claim.id)
        return bool(await self._pool.run(RELEASE, command, reply_timeout(claim.ttl, MIN_TIMEOUT), once=True))

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one and admit the readers behind it, in one script."""
        claim, sent = grant.claim, self._runtime.now()
        command = DOWNGRADE.call((self._bucket_key(claim.name),), (claim.name, claim.id, ttl_ms(claim.ttl)))
        if not await self._pool.run(DOWNGRADE, command, reply_timeout(claim.ttl, MIN_TIMEOUT)):
            raise not_held(grant)
        return grant.downgraded(sent)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        command = INSPECT.call((self._bucket_key(name),), (name,))
        holders, waiters, clock = await self._pool.run(INSPECT, command, MAX_REPLY_TIMEOUT)
        claims = [*sorted(holders, key=lambda holder: holder[1]), *waiters]
        return Snapshot.of(name, map(_stored_claim, claims), clock)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that have holders or waiters. A name that changes during the scan may or may not be there."""
        found: set[str] = set()
        for kind in ("lock", "holders", "queue"):
            pattern = f"{escape_pattern(self._prefix)}:{{*}}:{kind}:{escape_pattern(prefix)}*"
            # The pattern's star also matches names that contain the rest of the pattern: compare exactly.
            exact = re.compile(rf"{re.escape(self._prefix)}:{{\d+}}:{kind}:({re.escape(prefix)}.*)", re.DOTALL)
            keys = await self._pool.scan(pattern, MAX_REPLY_TIMEOUT)
            found.update(match[1] for key in keys if (match := exact.match(key)))
        for name in sorted(found):
            yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders and admit the next waiters. Return how many were dropped. It never runs twice."""
        await self.inspect(name)  # this may be repeated, and replaces connections that the server has closed
        command = FORCE.call((self._bucket_key(name),), (name,))
        return int(await self._pool.run(FORCE, command, MAX_REPLY_TIMEOUT, once=True))

    async def close(self) -> None:
        """Close all connections and wake the waiters."""
        self._pool.close()
        for kept in list(self._waiting.values()):
            kept.event.set()

    def after_fork(self) -> None:
        """Drop the parent's connections without sending anything."""
        self._waiting.clear()
        self._pool.detach_after_fork()

    # ------------------------------------------------------------------ connections, waiting claims, commands, keys

    def _keep_waiting(
        self, claim: Claim, kept: WaitingConnection | None, connection: RedisConnection, attempt_no: str
    ) -> None:
        """Keep the connection for the claim, which the server has put into its queue, until it is notified."""
        if kept is None:
            event = connection.push_events[claim.id] = self._runtime.event()
        else:
            event = kept.event
            event.clear()
        if not connection.raw.open:  # it ended before the event was registered
            event.set()
        self._waiting[claim.id] = WaitingConnection(connection, event, attempt_no)

    def _stop_waiting(self, claim: Claim, kept: WaitingConnection) -> None:
        """Give back the connection of a claim that no longer waits."""
        kept.connection.push_events.pop(claim.id, None)
        kept.connection.notifications.pop(claim.id, None)
        self._pool.put_back(kept.connection)

    def _pack_attempt(self, name: str, ttl: float, mode: str, owner: str, value: str) -> bytes:
        """Return the beginning of ATTEMPT; the id and the target of the notification follow."""
        # An owner has no control characters, so the first newline ends it.
        args = (name, ttl_ms(ttl), mode, f"{owner}\n{value}")
        return ATTEMPT.begin_call((self._bucket_key(name),), args, 2)

    def _pack_release(self, name: str) -> bytes:
        """Return the beginning of RELEASE; the id follows."""
        return RELEASE.begin_call((self._bucket_key(name),), (name,), 1)

    def _bucket_key(self, name: str) -> str:
        """Return the key of a name's bucket: all keys of the name begin with it, and its number is their hash tag."""
        return f"{self._prefix}:{{{crc32(name.encode()) % BUCKETS}}}"


def _stored_mode(claim: Claim) -> str:
    return "x" if not claim.shared else "s" if claim.limit is None else str(claim.limit)


def _stored_claim(reply: tuple[int, int | None, bytes, bytes]) -> StoredClaim:
    left, token, mode, label = reply
    owner, _, value = label.decode().partition("\n")
    return owner, token, left / 1000, mode != b"x", int(mode) if mode.isdigit() else None, value
