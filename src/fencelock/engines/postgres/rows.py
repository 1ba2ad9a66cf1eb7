"""PostgreSQL, rows: a queue of claims in a table, each step one SQL function; the releaser calls the next in line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import count

from fencelock.core.adopted_client import AdoptedClient
from fencelock.core.clock import Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, limit_of, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.ear import Ear
from fencelock.engines.postgres.link import Row, Statement
from fencelock.engines.postgres.links import Links
from fencelock.engines.postgres.place import Place
from fencelock.engines.postgres.records import PostgresRecords
from fencelock.errors import EngineUnavailable, LimitMismatch
from fencelock.model import Claim, Grant, Holder, Renewal, Snapshot, TokenGuarantee, Traits, Waiter, Waiting, held_for

TRAITS = Traits(engine="postgresql", guarantee=TokenGuarantee.DURABLE, fair=True, push=True, loss_pushed=False)

SHORTEST = 0.5
"""Seconds that an answer is waited for at the least."""
OWED_KEPT = 1000
POLL_FIRST, POLL_OTHERS = 0.05, 0.25
"""Seconds between two looks of a waiter that cannot be called, as there is a pooler between: first in line, and others."""

ATTEMPT = Statement("fl_attempt", "SELECT * FROM fencelock.attempt($1, $2, $3, $4, $5, $6, $7, $8)")
RELEASE = Statement("fl_release", "SELECT fencelock.release($1, $2, $3)")
ABANDON = Statement("fl_abandon", "SELECT fencelock.abandon($1, $2, $3, $4)")
RENEW = Statement("fl_renew", "SELECT fencelock.renew($1, $2)")
LOOK = Statement("fl_look", "SELECT fencelock.look($1)")
INSPECT = Statement(
    "fl_inspect", "SELECT *, date_part('epoch', clock_timestamp()) * 1000000 FROM fencelock.inspect($1, $2)"
)
NAMES = Statement("fl_names", "SELECT fencelock.names($1, $2)")
FORCE = Statement("fl_force", "SELECT fencelock.force($1, $2)")


class RowsEngine:
    """`fencelock.core.engine.Backend` on rows of a table."""

    def __init__(
        self, runtime: Runtime, source: Place | AdoptedClient[Place], namespace: str, url: str | None = None
    ) -> None:
        self.url = url
        """What an application's own object stands for; None if a URL was given."""
        self._runtime = runtime
        self._namespace = namespace
        self._links = Links(runtime, source)
        self.records = PostgresRecords(self._links, namespace)
        self._ear = Ear(runtime, self._links)
        self._rounds = count(1)
        self._owed: dict[str, Claim] = {}
        """What could not be abandoned, and may be carried out when a server that hangs goes on."""

    @property
    def traits(self) -> Traits:
        """What the engine promises, as the server is configured."""
        return TRAITS.weakened(self._links.weakness)

    async def learn_traits(self, patience: float | None) -> None:
        """Connect, unless this client has connected before, to read the server's settings."""
        await self._links.know(limit_of(self._runtime.now, patience, met=False))

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Take the lock or a place in line."""
        name, ttl, owner, shared, permits, id = claim
        limit = limit_of(self._runtime.now, patience, met=self._links.met)
        if self._owed:
            await self._pay(limit)
        round = next(self._rounds)
        seat = None
        if queue:
            channel = self._ear.channel
            seat = "" if channel is None else f"{channel}:{round}"
            if channel is not None:
                self._ear.sit(id, round)
        if not seat and id in self._ear.seats:
            self._ear.rise(id)  # nobody would hear it being called
        granted = True
        try:
            words = (self._namespace, name, id, ttl, shared, permits, owner, seat)
            sent, rows = await self._links.timed(ATTEMPT, words, reply_timeout(ttl, SHORTEST, patience), limit=limit)
            ((token, retry_in, others, first),) = rows
            granted = token is not None or others is not None
        finally:
            if granted:
                self._ear.rise(id)
        if others is not None:
            how = "for any number of readers" if others == b"s" else f"with {others.decode()} permits"
            raise LimitMismatch(f"{name!r}: others use it {how}", name)
        if token is not None:
            return Grant(claim, int(token), sent)
        return Waiting(claim, sent, None if retry_in is None else float(retry_in), first == b"t")

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait to be called; ask again in the end."""
        claim = waiting.claim
        ear = self._ear
        until = None if patience is None else self._runtime.now() + patience
        limit = limit_of(self._runtime.now, patience)
        if waiting.retry_in is not None:
            timeout = min(timeout, waiting.retry_in)
        seat = ear.seats.get(claim.id)
        if seat is None:
            # Nobody listened when it lined up: it has to say where it can be called.
            await ear.open(timeout, limit)
            if ear.deaf:
                grant = await self._poll(waiting, timeout, limit)
                if grant is not None:
                    return grant
        else:
            try:
                await seat.bell.wait(timeout)
            except BaseException:
                ear.rise(claim.id)
                raise
            if seat.token is not None:
                ear.rise(claim.id)
                return Grant(claim, seat.token, waiting.since)
        return await self.attempt(claim, queue=True, patience=None if until is None else until - self._runtime.now())

    async def _poll(self, waiting: Waiting, timeout: float, limit: Deadline) -> Grant | None:
        """Look every now and then."""
        claim = waiting.claim
        until = self._runtime.now() + timeout
        pause = POLL_FIRST if waiting.handle else POLL_OTHERS
        while (left := until - self._runtime.now()) > 0:
            await self._runtime.sleep(min(left, pause * (0.5 + self._runtime.random())))
            ((token,),) = await self._links.run(LOOK, (claim.id,), reply_timeout(claim.ttl, SHORTEST), limit=limit)
            if token is not None:
                return Grant(claim, int(token), waiting.since)
        return None

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        self._ear.rise(claim.id)
        try:
            await self._abandon(claim, limit_of(self._runtime.now, 0.0))
        except EngineUnavailable:
            if len(self._owed) < OWED_KEPT:
                self._owed[claim.id] = claim
            raise
        self._owed.pop(claim.id, None)

    async def _abandon(self, claim: Claim, limit: Deadline) -> None:
        words = (self._namespace, claim.name, claim.id, claim.ttl)
        await self._links.run(ABANDON, words, min(MIN_REPLY_TIMEOUT, reply_timeout(claim.ttl, SHORTEST)), limit=limit)

    async def _pay(self, limit: Deadline) -> None:
        """Abandon what could not be abandoned before, rather than have it last for its ttl."""
        for id, claim in list(self._owed.items()):
            if limit.passed:
                return
            await self._abandon(claim, limit)
            self._owed.pop(id, None)

    async def _pay_beside(self) -> None:
        with suppress(EngineUnavailable):
            await self._pay(limit_of(self._runtime.now, 0.0))

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all in one statement."""
        ids = ",".join(grant.claim.id for grant in grants)
        ttls = ",".join(str(grant.claim.ttl) for grant in grants)
        patience = reply_timeout(min(grant.claim.ttl for grant in grants), SHORTEST)
        limit = Deadline(
            self._runtime.now, patience
        )  # a connection that cannot be made must leave time for another try
        rows = await self._links.run(RENEW, (f"{{{ids}}}", f"{{{ttls}}}"), patience, urgent=True, limit=limit)
        renewed = {row[0] for row in rows}
        if self._owed:  # it answers again
            with suppress(RuntimeError):  # no more threads: the next attempt pays
                self._runtime.spawn(self._pay_beside(), "fencelock-undo")
        return [Renewal.RENEWED if grant.claim.id.encode() in renewed else Renewal.LOST for grant in grants]

    async def release(self, grant: Grant) -> bool:
        """Give back the lock; the step hands it over."""
        claim = grant.claim
        _, rows = await self._links.timed(
            RELEASE, (self._namespace, claim.name, claim.id), reply_timeout(claim.ttl, SHORTEST)
        )
        return rows == [(b"t",)]

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        rows = await self._links.run(INSPECT, (self._namespace, name), MAX_REPLY_TIMEOUT)
        return Snapshot(
            name,
            tuple(
                Holder(
                    _text(owner),
                    int(token),
                    float(left or 0),
                    shared == b"t",
                    None if limit is None else int(limit),
                    held_for(int(token), float(clock or 0)),
                )
                for owner, token, left, shared, limit, clock in rows
                if token is not None
            ),
            tuple(
                Waiter(_text(owner), float(left or 0), shared == b"t", None if limit is None else int(limit))
                for owner, token, left, shared, limit, _ in rows
                if token is None
            ),
        )

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        rows: list[Row] = await self._links.run(NAMES, (self._namespace, prefix), MAX_REPLY_TIMEOUT)
        for (name,) in rows:
            yield _text(name)

    async def force_release(self, name: str) -> int:
        """Drop the holders. Never twice: the second time it would be whoever was let in by the first."""
        _, ((dropped,),) = await self._links.timed(FORCE, (self._namespace, name), MAX_REPLY_TIMEOUT)
        return int(dropped or 0)

    async def close(self) -> None:
        """Close all connections; whoever still waits learns of it."""
        self._links.shut()
        try:
            await self._ear.close()
        finally:
            self._links.close()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._owed.clear()
            self._ear.forget()
            self._links.forget()


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
