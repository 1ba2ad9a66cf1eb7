"""PostgreSQL, rows: a queue of claims in a table. Each step is one SQL function; a release notifies the next waiter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import count

from fencelock.core.adopted_client import AdoptedClient
from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT, not_held, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import Statement
from fencelock.engines.postgres.listener import Listener
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres.rates import PostgresRates
from fencelock.engines.postgres.records import PostgresRecords
from fencelock.engines.postgres.snapshot import decode_text, encode_value, read_snapshot
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.errors import EngineUnavailable
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits(engine="postgresql", guarantee=TokenGuarantee.DURABLE, fair=True, loss_pushed=False)

SHORTEST_REPLY_TIMEOUT = 0.5
POLL_FIRST, POLL_OTHERS = 0.05, 0.25
"""Seconds between two polls of a waiter without a listener, as behind a pooler: the first in the queue, and others."""

ATTEMPT = Statement("fl_attempt", "SELECT * FROM fencelock.attempt($1, $2, $3, $4, $5, $6, $7, $8, $9)")
RELEASE = Statement("fl_release", "SELECT fencelock.release($1, $2, $3)")
ABANDON = Statement("fl_abandon", "SELECT fencelock.abandon($1, $2, $3, $4)")
RENEW = Statement("fl_renew", "SELECT fencelock.renew($1, $2)")
DOWNGRADE = Statement("fl_downgrade", "SELECT fencelock.downgrade($1, $2, $3)")
GRANTED_TOKEN = Statement("fl_granted_token", "SELECT fencelock.granted_token($1)")
INSPECT = Statement(
    "fl_inspect", "SELECT *, date_part('epoch', clock_timestamp()) * 1000000 FROM fencelock.inspect($1, $2)"
)
NAMES = Statement("fl_names", "SELECT fencelock.names($1, $2)")
FORCE_RELEASE = Statement("fl_force_release", "SELECT fencelock.force_release($1, $2)")


class RowsEngine:
    """`fencelock.core.engine.Engine` on rows of a table."""

    def __init__(
        self,
        runtime: Runtime,
        source: PostgresUrl | AdoptedClient[PostgresUrl],
        namespace: str,
        url: str | None = None,
    ) -> None:
        self.url = url
        """The URL of an adopted client; None if the engine was opened with a URL."""
        self._runtime = runtime
        self._namespace = namespace
        self._pool = PostgresPool(runtime, source)
        self.records = PostgresRecords(self._pool, namespace)
        self.rates = PostgresRates(self._pool, namespace)
        self._listener = Listener(runtime, self._pool)
        self._attempt_numbers = count(1)

    @property
    def traits(self) -> Traits:
        """What the engine promises with the server's settings."""
        return TRAITS.weakened(self._pool.weakness)

    async def learn_traits(self, deadline: Deadline) -> None:
        """Connect, unless this client was connected before, to read the server's settings."""
        await self._pool.learn_settings(deadline)

    # ------------------------------------------------------------------ acquiring and releasing

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Take the lock, or enqueue the claim; both restart the ttl of a claim that is there already."""
        sent, attempt_no = self._runtime.now(), next(self._attempt_numbers)
        channel = self._listener.channel if enqueue else None
        notify = f"{channel}:{attempt_no}" if channel else "" if enqueue else None
        if channel:
            self._listener.enqueue(claim.id, attempt_no)
        else:
            self._listener.dequeue(claim.id)  # this attempt removes the channel: no notification will come
        listening = False
        try:
            name, ttl, owner, _, limit, value, id = claim
            params = (self._namespace, name, id, ttl, claim.shared, limit, owner, encode_value(value), notify)
            timeout = reply_timeout(ttl, SHORTEST_REPLY_TIMEOUT)
            ((token, retry_in, first),) = await self._pool.run(
                ATTEMPT, params, timeout, repeat=False, deadline=deadline
            )
            listening = token is None
        finally:
            if not listening:
                self._listener.dequeue(claim.id)
        if token is not None:
            return Grant(claim, int(token), sent)
        return Waiting(claim, sent, None if retry_in is None else float(retry_in), first == b"t")

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait for the notification, which contains the token."""
        claim, listener, until = waiting.claim, self._listener, self._runtime.now() + timeout
        queued = listener.queued.get(claim.id)
        if queued is None:
            # Nobody listened when the claim was enqueued: the next attempt stores the channel.
            deadline = Deadline(self._runtime.now, timeout + MIN_REPLY_TIMEOUT)
            with suppress(EngineUnavailable):  # there may be no other connection
                await listener.open(timeout, deadline)
            return None if listener.channel is not None else await self._poll(waiting, until, deadline)
        await queued.woken.wait(timeout)
        if queued.token is None:
            return None
        listener.dequeue(claim.id)
        return Grant(claim, queued.token, waiting.since)

    async def _poll(self, waiting: Waiting, until: float, deadline: Deadline) -> Grant | None:
        """Read repeatedly whether the claim was granted; return None when the time is over."""
        claim = waiting.claim
        is_first = waiting.engine_state
        pause = POLL_FIRST if is_first else POLL_OTHERS
        while (left := until - self._runtime.now()) > 0:
            await self._runtime.sleep(min(left, pause * (0.5 + self._runtime.random())))
            reply_seconds = reply_timeout(claim.ttl, SHORTEST_REPLY_TIMEOUT)
            ((token,),) = await self._pool.run(GRANTED_TOKEN, (claim.id,), reply_seconds, deadline=deadline)
            if token is not None:
                return Grant(claim, int(token), waiting.since)
        return None

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted. Safe to repeat."""
        self._listener.dequeue(claim.id)
        params = (self._namespace, claim.name, claim.id, claim.ttl)
        deadline = Deadline(self._runtime.now, MIN_REPLY_TIMEOUT)
        await self._pool.run(ABANDON, params, MIN_REPLY_TIMEOUT, deadline=deadline)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all grants in one statement."""
        ids = ",".join(grant.claim.id for grant in grants)
        ttls = ",".join(str(grant.claim.ttl) for grant in grants)
        timeout = reply_timeout(min(grant.claim.ttl for grant in grants), SHORTEST_REPLY_TIMEOUT)
        deadline = Deadline(self._runtime.now, timeout)  # a slow connect must leave time for another try
        rows = await self._pool.run(RENEW, (f"{{{ids}}}", f"{{{ttls}}}"), timeout, urgent=True, deadline=deadline)
        renewed = {row[0] for row in rows}
        return [Renewal.RENEWED if grant.claim.id.encode() in renewed else Renewal.LOST for grant in grants]

    async def release(self, grant: Grant) -> bool:
        """Release the lock and hand it to the next waiter. Return False if this grant no longer held it."""
        claim = grant.claim
        timeout = reply_timeout(claim.ttl, SHORTEST_REPLY_TIMEOUT)
        rows = await self._pool.run(RELEASE, (self._namespace, claim.name, claim.id), timeout, repeat=False)
        return rows == [(b"t",)]

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn the exclusive claim into a reader in its place, and grant the lock to the readers directly behind it."""
        claim, now = grant.claim, self._runtime.now()
        timeout = reply_timeout(claim.ttl, SHORTEST_REPLY_TIMEOUT)
        rows = await self._pool.run(DOWNGRADE, (self._namespace, claim.name, claim.id), timeout)
        if rows != [(b"t",)]:
            raise not_held(grant)
        return grant.downgraded(now)

    # ------------------------------------------------------------------ inspecting and closing

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return read_snapshot(name, await self._pool.run(INSPECT, (self._namespace, name)))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that were in use at the time of the call."""
        for (name,) in await self._pool.run(NAMES, (self._namespace, prefix)):
            yield decode_text(name)

    async def force_release(self, name: str) -> int:
        """Drop the holders; return how many. It runs once: a second run would drop the next holder."""
        ((dropped,),) = await self._pool.run(FORCE_RELEASE, (self._namespace, name), repeat=False)
        return int(dropped or 0)

    async def close(self) -> None:
        """Close all connections; callers that still wait get an error."""
        self._pool.refuse_new()
        try:
            await self._listener.close()
        finally:
            self._pool.close()

    def after_fork(self) -> None:
        """Close the parent's connections without sending anything on them."""
        self._listener.detach_after_fork()
        self._pool.detach_after_fork()
