"""Redis, one node: a queue in Lua, handed over by the releaser; waiters are called by a push, and nobody polls."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple
from urllib.parse import quote
from zlib import crc32

from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, reply_timeout
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.redis.dial import RedisConnector, ServerError
from fencelock.engines.redis.link import Link
from fencelock.engines.redis.links import Links, literally
from fencelock.engines.redis.records import RedisRecords
from fencelock.engines.redis.scripts import load, ms
from fencelock.engines.redis.trouble import leads_elsewhere
from fencelock.errors import EngineUnavailable, LimitMismatch, OutcomeUnknown
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
    held_for,
)

TRAITS = Traits(engine="redis", guarantee=TokenGuarantee.CLOCKED, fair=True, loss_pushed=False)

BUCKETS = 1024
"""Token counters of a namespace: they are all that stays of a name, and what its keys share a hash tag with."""
BATCH = 500
"""Leases that one script renews: short enough not to keep the server from others."""
SHORTEST = 0.2
"""Seconds that an answer is waited for at the least."""
PAY_SECONDS = 0.2
"""Seconds that are waited for the answer to what is undone late, before something new is asked."""

ATTEMPT, RELEASE, ABANDON, RENEW, INSPECT, FORCE = map(
    load, ("attempt", "release", "abandon", "renew", "inspect", "force")
)


class Form(NamedTuple):
    """What all claims of a kind have in common: the commands about them, but for the last words, and how long to wait."""

    attempt: str
    release: str
    patience: float


class Seat(NamedTuple):
    """A place in line: the link on which it is called. Whoever takes it out of `_seats` has it, and its link, to itself."""

    link: Link
    bell: Event
    round: str
    """The number of the attempt that it was taken or kept with: a call for an earlier one comes too late."""


class RedisEngine:
    """`fencelock.core.engine.Backend` on one Redis server."""

    traits = TRAITS

    def __init__(self, runtime: Runtime, connector: RedisConnector, namespace: str, url: str | None = None) -> None:
        self.url = url
        """What a user's own client stands for; None if a URL was given."""
        self._runtime = runtime
        self._prefix = quote(namespace, safe="")
        self._links = Links(runtime, connector, self._prefix)
        self._seats: dict[str, Seat] = {}
        self._rounds = count(1)
        self._form = lru_cache(BUCKETS)(self._make_form)
        self._base = lru_cache(BUCKETS)(self._make_base)
        self.records = RedisRecords(self._links, self._base)

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Take the lock or a place in line, in one script."""
        name, ttl, owner, shared, limit, id = claim
        form = self._form(name, ttl, owner, shared, limit)
        within = form.patience
        seat = self._seats.pop(id, None)
        if seat is not None and not self._links.usable(seat.link, within):
            self._rise(claim, seat)
            seat = None
        link = seat.link if seat is not None else self._links.idle(within) or await self._make(patience)
        if patience is not None:
            within = min(within, max(patience, MIN_REPLY_TIMEOUT))
        if self._links.owed:
            try:
                await self._links.pay(link, min(within, PAY_SECONDS))
            except BaseException:
                if seat is not None:
                    self._rise(claim, seat)
                else:
                    self._links.give(link)
                raise
        sent = self._runtime.now()
        round = str(next(self._rounds))
        waiting = False
        try:
            place = f"{link.channel}:{round}" if queue else ""
            command = f"{form.attempt}${len(id)}\r\n{id}\r\n${len(place)}\r\n{place}\r\n".encode()
            answer = await link.connection.request(command, within)
            if type(answer) is ServerError:
                answer = await self._links.mend(link, ATTEMPT, command, within, answer)
            waiting = queue and type(answer) is int and answer < 0
            if waiting:
                token, _, called = link.calls.pop(id, "").partition(":")
                if called == round:  # the call arrived together with the answer
                    waiting, answer = False, int(token)
        except OutcomeUnknown:
            self._links.doubt(link)
            raise
        finally:
            if waiting:
                self._sit(claim, seat, link, round)
            elif seat is not None:
                self._rise(claim, seat)
            else:
                self._links.give(link)
        if type(answer) is not int:
            others = "for any number of readers" if answer == b"s" else f"with {answer.decode()} permits"
            raise LimitMismatch(f"{name!r}: others use it {others}", name)
        if answer > 0:
            return Grant(claim, answer, sent, form)
        return Waiting(claim, sent, None if answer == -1 else (-1 - answer) / 1000, form)

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait to be called; ask again in the end."""
        claim = waiting.claim
        until = None if patience is None else self._runtime.now() + patience
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            try:
                if waiting.retry_in is not None:
                    timeout = min(timeout, waiting.retry_in)
                await self._runtime.wait_for_push([seat.link.connection], seat.bell, timeout)
            except BaseException:
                self._rise(claim, seat)
                raise
            token, _, round = seat.link.calls.get(claim.id, "").partition(":")
            if round == seat.round:
                self._rise(claim, seat)
                return Grant(claim, int(token), waiting.since, waiting.handle)
            self._seats[claim.id] = seat
        return await self.attempt(claim, queue=True, patience=None if until is None else until - self._runtime.now())

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind."""
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            self._rise(claim, seat)
        try:
            await self._links.run(
                ABANDON, self._abandonment(claim), reply_timeout(claim.ttl, SHORTEST), MIN_REPLY_TIMEOUT
            )
        except EngineUnavailable:
            self._undo_later(claim)
            raise

    def _abandonment(self, claim: Claim) -> bytes:
        return ABANDON.call((self._base(claim.name),), (claim.name, claim.id, ms(claim.ttl)))

    def _undo_later(self, claim: Claim) -> None:
        """Have it undone when the server is reached again: it may yet carry out, or still have, what was asked for."""
        undo = ABANDON.teach(self._abandonment(claim))
        if undo not in self._links.owed:
            self._links.owed.append(undo)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all, in batches that are sent together."""
        calls: list[bytes] = []
        for start in range(0, len(grants), BATCH):
            claims = [grant.claim for grant in grants[start : start + BATCH]]
            keys = tuple(self._base(claim.name) for claim in claims)
            args = tuple(word for claim in claims for word in (claim.name, claim.id, ms(claim.ttl)))
            calls.append(RENEW.call(keys, args))
        shortest = min(grant.claim.ttl for grant in grants)
        # A connection that cannot be made is given up in time to try another, and one more, before the deadline.
        connect = max(SHORTEST, shortest / 6)
        answers = await self._links.run_many(RENEW, calls, reply_timeout(shortest, SHORTEST), connect)
        return [Renewal.RENEWED if answer else Renewal.LOST for batch in answers for answer in batch]

    async def release(self, grant: Grant) -> bool:
        """Release the lock and hand it to the next waiter. Return False if this grant no longer held it."""
        try:
            try:
                return await self._release(grant, None)
            except EngineUnavailable as error:
                if not leads_elsewhere(error):
                    raise
            return await self._release(grant, await self._links.make(max(grant.handle.patience, MIN_REPLY_TIMEOUT)))
        except EngineUnavailable:
            self._undo_later(grant.claim)
            raise

    async def _release(self, grant: Grant, link: Link | None) -> bool:
        form: Form = grant.handle
        id = grant.claim.id
        command = f"{form.release}${len(id)}\r\n{id}\r\n".encode()
        link = link or self._links.idle(form.patience) or await self._links.make()
        try:
            answer = await link.connection.request(command, form.patience)
            if type(answer) is ServerError:
                answer = await self._links.mend(link, RELEASE, command, form.patience, answer)
        except OutcomeUnknown:
            self._links.doubt(link)
            raise
        finally:
            self._links.give(link)
        return bool(answer)

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        call = INSPECT.call((self._base(name),), (name,))
        holders, waiters, clock = await self._links.run(INSPECT, call, MAX_REPLY_TIMEOUT)
        return Snapshot(
            name,
            tuple(
                Holder(owner.decode(), token, left / 1000, *_mode(mode), held_for(token, clock))
                for left, token, mode, owner in sorted(holders, key=lambda holder: holder[1])
            ),
            tuple(Waiter(owner.decode(), left / 1000, *_mode(mode)) for left, mode, owner in waiters),
        )

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call, or came into use meanwhile."""
        found: set[str] = set()
        for kind in ("lock", "holders", "queue"):
            pattern = f"{literally(self._prefix)}:{{*}}:{kind}:{literally(prefix)}*"
            # The star also matches the beginning of a name that looks like the rest of the pattern.
            exact = re.compile(rf"{re.escape(self._prefix)}:{{\d+}}:{kind}:({re.escape(prefix)}.*)", re.DOTALL)
            keys = await self._links.scan(pattern, MAX_REPLY_TIMEOUT)
            found.update(match[1] for key in keys if (match := exact.match(key)))
        for name in sorted(found):
            yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders, and let the next ones in."""
        await self.inspect(name)  # may be repeated: a connection that the server has closed is replaced here
        return int(await self._links.run_once(FORCE, FORCE.call((self._base(name),), (name,)), MAX_REPLY_TIMEOUT))

    async def close(self) -> None:
        """Close all connections; whoever still waits on one learns of it."""
        try:
            if self._links.owed:
                await self._links.settle(MIN_REPLY_TIMEOUT)
        finally:
            self._links.close()
            for seat in list(self._seats.values()):
                seat.bell.set()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._seats.clear()
            self._links.forget()

    # ------------------------------------------------------------------ links, places in line, keys

    async def _make(self, patience: float | None) -> Link:
        if patience is None:
            return await self._links.make()
        return await self._links.make(
            max(patience, FIRST_CONNECT_TIMEOUT if self._links.run_id is None else MIN_REPLY_TIMEOUT)
        )

    def _sit(self, claim: Claim, seat: Seat | None, link: Link, round: str) -> None:
        if seat is None:
            bell = link.bells[claim.id] = self._runtime.push_event()
        else:
            bell = seat.bell
            bell.clear()
        if not link.connection.open:
            bell.set()
        self._seats[claim.id] = Seat(link, bell, round)

    def _rise(self, claim: Claim, seat: Seat) -> None:
        seat.link.bells.pop(claim.id, None)
        seat.link.calls.pop(claim.id, None)
        self._links.give(seat.link)

    def _make_form(self, name: str, ttl: float, owner: str, shared: bool, limit: int | None) -> Form:
        mode = "x" if not shared else "s" if limit is None else limit
        keys = (self._base(name),)
        attempt = ATTEMPT.begin(keys, (name, ms(ttl), mode, owner), 2)
        return Form(attempt, RELEASE.begin(keys, (name,), 1), reply_timeout(ttl, SHORTEST))

    def _make_base(self, name: str) -> str:
        """Return the key of a name's bucket: it is the beginning of all keys of the name, and their hash tag."""
        return f"{self._prefix}:{{{crc32(name.encode()) % BUCKETS}}}"


def _mode(mode: bytes) -> tuple[bool, int | None]:
    return mode != b"x", int(mode) if mode.isdigit() else None
