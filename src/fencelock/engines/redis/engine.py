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
from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, reply_timeout
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector
from fencelock.engines.redis.errors import reconnect_may_help
from fencelock.engines.redis.pool import RedisPool, escape_pattern
from fencelock.engines.redis.rates import RedisRates
from fencelock.engines.redis.records import RedisRecords
from fencelock.engines.redis.scripts import load, ttl_ms
from fencelock.errors import EngineUnavailable, NotHeld
from fencelock.model import (
    Claim,
    Grant,
    Holder,
    Mode,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiter,
    Waiting,
    held_for,
)

TRAITS = Traits(engine="redis", guarantee=TokenGuarantee.CLOCKED, fair=True, loss_pushed=False)

BUCKETS = 1024
"""Token counters per namespace. All keys of a name share its counter's hash tag; only the counter outlives the name."""
BATCH = 500
"""Leases that one script renews: a longer script would delay other clients of the server."""
MIN_TIMEOUT = 0.2
"""The shortest time to wait for a reply, in seconds."""

ATTEMPT, RELEASE, ABANDON, RENEW, DOWNGRADE, INSPECT, FORCE = map(
    load, ("attempt", "release", "abandon", "renew", "downgrade", "inspect", "force")
)


class PackedCommands(NamedTuple):
    """The commands of all claims that differ in nothing but their id: packed once, up to the last arguments."""

    attempt: str
    release: str
    reply_timeout: float


class QueuedClaim(NamedTuple):
    """A claim in the queue, and the connection over which the server notifies it.

    A caller that takes it out of `_queued` uses it and its connection alone.
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
        self._queued: dict[str, QueuedClaim] = {}
        self._attempt_numbers = count(1)
        self._commands = lru_cache(BUCKETS)(self._pack_commands)
        self._bucket_key = lru_cache(BUCKETS)(self._make_bucket_key)
        self.records = RedisRecords(self._pool, self._bucket_key)
        self.rates = RedisRates(self._pool, self._bucket_key)

    # ------------------------------------------------------------------ the engine protocol

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock or enqueue the claim, in one script."""
        name, ttl, owner, mode, limit, value, id = claim
        commands = self._commands(name, ttl, owner, mode, limit, value)
        timeout = commands.reply_timeout
        queued = self._queued.pop(id, None)
        if queued is not None and not self._pool.usable(queued.connection, timeout):
            self._dequeue(claim, queued)
            queued = None
        if queued is not None:
            connection = queued.connection
        else:
            connection = self._pool.get_idle(timeout) or await self._connect(deadline)
        timeout = deadline.at_most(timeout)
        since = self._runtime.now()
        attempt_no = str(next(self._attempt_numbers))
        waiting = False
        try:
            address = f"{connection.channel}:{attempt_no}" if enqueue else ""
            command = f"{commands.attempt}${len(id)}\r\n{id}\r\n${len(address)}\r\n{address}\r\n".encode()
            reply = await self._pool.request(connection, ATTEMPT, command, timeout)
            waiting = enqueue and reply < 0
            if waiting:
                token, _, notified = connection.notifications.pop(id, "").partition(":")
                if notified == attempt_no:  # the notification arrived together with the reply
                    waiting, reply = False, int(token)
        finally:
            if waiting:
                self._enqueue(claim, queued, connection, attempt_no)
            elif queued is not None:
                self._dequeue(claim, queued)
            else:
                self._pool.put_back(connection)
        if reply > 0:
            return Grant(claim, reply, since, commands)
        return Waiting(claim, since, None if reply == -1 else (-1 - reply) / 1000, commands)

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait for the notification that the claim holds the lock."""
        claim = waiting.claim
        queued = self._queued.pop(claim.id, None)
        if queued is None:
            return None
        try:
            await self._runtime.wait_for_push([queued.connection.raw], queued.event, timeout)
        except BaseException:
            self._dequeue(claim, queued)
            raise
        token, _, notified = queued.connection.notifications.get(claim.id, "").partition(":")
        if notified == queued.attempt_no:
            self._dequeue(claim, queued)
            return Grant(claim, int(token), waiting.since, waiting.engine_state)
        self._queued[claim.id] = queued
        return None

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        queued = self._queued.pop(claim.id, None)
        if queued is not None:
            self._dequeue(claim, queued)
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
        """Renew all leases, in batches that are sent together."""
        commands: list[bytes] = []
        for start in range(0, len(grants), BATCH):
            claims = [grant.claim for grant in grants[start : start + BATCH]]
            keys = tuple(self._bucket_key(claim.name) for claim in claims)
            args = tuple(word for claim in claims for word in (claim.name, claim.id, ttl_ms(claim.ttl)))
            commands.append(RENEW.call(keys, args))
        shortest = min(grant.claim.ttl for grant in grants)
        # A third of the ttl is left when this starts: a failed connect must leave time for two more before the deadline.
        connect_timeout = max(MIN_TIMEOUT, shortest / 6)
        replies = await self._pool.run_many(RENEW, commands, reply_timeout(shortest, MIN_TIMEOUT), connect_timeout)
        return [Renewal.RENEWED if renewed else Renewal.LOST for batch in replies for renewed in batch]

    async def release(self, grant: Grant) -> bool:
        """Release the lock and hand it to the next waiter. Return False if this grant no longer held it."""
        commands: PackedCommands = grant.engine_state
        try:
            connection = self._pool.get_idle(commands.reply_timeout) or await self._pool.connect()
            return await self._release(grant, connection)
        except EngineUnavailable as error:
            if not reconnect_may_help(error):
                raise
        connection = await self._pool.connect(max(commands.reply_timeout, MIN_REPLY_TIMEOUT))
        return await self._release(grant, connection)

    async def _release(self, grant: Grant, connection: RedisConnection) -> bool:
        commands: PackedCommands = grant.engine_state
        id = grant.claim.id
        command = f"{commands.release}${len(id)}\r\n{id}\r\n".encode()
        try:
            return bool(await self._pool.request(connection, RELEASE, command, commands.reply_timeout))
        finally:
            self._pool.put_back(connection)

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one and admit the readers behind it, in one script."""
        claim, sent = grant.claim, self._runtime.now()
        command = DOWNGRADE.call((self._bucket_key(claim.name),), (claim.name, claim.id, ttl_ms(claim.ttl)))
        if not await self._pool.run(DOWNGRADE, command, reply_timeout(claim.ttl, MIN_TIMEOUT)):
            raise NotHeld(f"the engine no longer has the lock on {claim.name!r}", claim.name)
        return grant.downgraded(sent)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        command = INSPECT.call((self._bucket_key(name),), (name,))
        holders, waiters, clock = await self._pool.run(INSPECT, command, MAX_REPLY_TIMEOUT)
        return Snapshot(
            name,
            tuple(
                Holder(owner, token, left / 1000, *_mode(mode), held_for(token, clock), value)
                for left, token, mode, label in sorted(holders, key=lambda holder: holder[1])
                for owner, _, value in (label.decode().partition("\n"),)
            ),
            tuple(
                Waiter(owner, left / 1000, *_mode(mode), value)
                for left, mode, label in waiters
                for owner, _, value in (label.decode().partition("\n"),)
            ),
        )

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
        return int(await self._pool.run_once(FORCE, FORCE.call((self._bucket_key(name),), (name,)), MAX_REPLY_TIMEOUT))

    async def close(self) -> None:
        """Close all connections and wake the waiters."""
        self._pool.close()
        for queued in list(self._queued.values()):
            queued.event.set()

    def after_fork(self) -> None:
        """Drop the parent's connections without sending anything."""
        self._queued.clear()
        self._pool.detach_after_fork()

    # ------------------------------------------------------------------ connections, queued claims, commands, keys

    async def _connect(self, deadline: Deadline) -> RedisConnection:
        return await self._pool.connect(deadline.at_most(inf))

    def _enqueue(self, claim: Claim, queued: QueuedClaim | None, connection: RedisConnection, attempt_no: str) -> None:
        """Keep the connection for the claim, which the server has put into its queue, until it is notified."""
        if queued is None:
            event = connection.push_events[claim.id] = self._runtime.push_event()
        else:
            event = queued.event
            event.clear()
        if not connection.raw.open:  # it ended before the event was registered
            event.set()
        self._queued[claim.id] = QueuedClaim(connection, event, attempt_no)

    def _dequeue(self, claim: Claim, queued: QueuedClaim) -> None:
        """Give back the connection of a claim that no longer waits."""
        queued.connection.push_events.pop(claim.id, None)
        queued.connection.notifications.pop(claim.id, None)
        self._pool.put_back(queued.connection)

    def _pack_commands(
        self, name: str, ttl: float, owner: str, mode: Mode, limit: int | None, value: str
    ) -> PackedCommands:
        stored_mode = "x" if mode is Mode.EXCLUSIVE else "s" if limit is None else limit
        keys = (self._bucket_key(name),)
        # An owner has no control characters, so the first newline ends it.
        attempt = ATTEMPT.begin(keys, (name, ttl_ms(ttl), stored_mode, f"{owner}\n{value}"), 2)
        return PackedCommands(attempt, RELEASE.begin(keys, (name,), 1), reply_timeout(ttl, MIN_TIMEOUT))

    def _make_bucket_key(self, name: str) -> str:
        """Return the key of a name's bucket: all keys of the name begin with it, and its number is their hash tag."""
        return f"{self._prefix}:{{{crc32(name.encode()) % BUCKETS}}}"


def _mode(stored: bytes) -> tuple[Mode, int | None]:
    limit = int(stored) if stored.isdigit() else None
    return Mode.of(stored != b"x", limit), limit
