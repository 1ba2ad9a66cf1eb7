"""PostgreSQL, advisory: the server's own locks, each on a session that the server ends when it is idle for the ttl.

Advisory locks are re-entrant within a session, so every lease and every waiter has one. A waiter's statement blocks in the
server and stays open over many calls of `wait`: asking anew would lose its place in line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT, limit_of, reply_timeout
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.link import KNOWN_KEPT, Link
from fencelock.engines.postgres.links import Links
from fencelock.engines.postgres.place import Place
from fencelock.engines.postgres.records import PostgresRecords
from fencelock.engines.postgres.schema import ADVISORY_SINCE
from fencelock.engines.postgres.trouble import ServerError, translate
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.engines.postgres_advisory.looks import Looks
from fencelock.engines.postgres_advisory.seat import SHORTEST, Seat
from fencelock.engines.postgres_advisory.seats import Seats
from fencelock.errors import EngineUnavailable, FencelockError, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits(
    engine="postgresql+advisory",
    guarantee=TokenGuarantee.DURABLE,
    fair=True,
    push=True,
    loss_pushed=False,
    limit=False,
    session=True,
)

PAUSE = 0.05
LOOK_SECONDS = 5.0
"""How often a waiter looks whether the server still has its session, at most: its connection may be dead without a word."""


class AdvisoryEngine:
    """`fencelock.core.engine.Backend` on advisory locks."""

    def __init__(self, runtime: Runtime, place: Place, namespace: str) -> None:
        self._runtime = runtime
        self._namespace = namespace
        self._links = Links(runtime, place, self._begin)
        self.records = PostgresRecords(self._links, namespace)
        self._seats = Seats(runtime, self._links)
        self._looks = Looks(self._links, namespace)
        self._gone: dict[str, None] = {}
        """Claims that were abandoned under somebody who still asks for them."""
        self._contended: set[int] = set()
        """Keys that somebody else had the last time: asked for by the statement that can wait, which costs more."""

    @property
    def traits(self) -> Traits:
        """What the engine promises, as the server is configured."""
        return TRAITS.weakened(self._links.weakness)

    async def learn_traits(self, patience: float | None) -> None:
        """Connect, unless this client has connected before, to read the server's settings."""
        await self._links.know(limit_of(self._runtime.now, patience, met=False))

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Try to take the lock; if somebody has it, ask the server to wait for it."""
        if claim.limit is not None:
            raise GuaranteeUnavailable(
                f"{claim.name!r}: {TRAITS.engine} has readers and writers but no permits; use postgresql://", claim.name
            )
        if claim.id in self._gone:
            self._links.check_open()
            return Waiting(claim, self._runtime.now())
        limit = limit_of(self._runtime.now, patience, met=self._links.met)
        seat = self._seats.get(claim.id)
        if seat is not None:
            outcome = await self._reenter(seat, queue, patience)
            if outcome is not None:
                return outcome
        if len(self._seats) >= self._seats.sweep_at:
            self._seats.sweep()
        link = await self._links.borrow(limit)
        seat = self._seats[claim.id] = Seat(self._runtime, claim, sql.key(self._namespace, claim.name), link)
        seat.try_take()
        try:
            return await self._seize(seat, queue, reply_timeout(claim.ttl, SHORTEST, patience))
        finally:
            seat.give()

    async def _seize(self, seat: Seat, queue: bool, patience: float) -> Grant | Waiting:
        claim, link = seat.claim, seat.link
        sent = seat.sent = self._runtime.now()
        try:
            if not link.knows(claim.owner, seat.key):
                await link.request(
                    sql.INTRODUCE, (seat.key, self._namespace, claim.name, claim.owner), patience, keep=True
                )
                link.learn(claim.owner, seat.key)
                sent = seat.sent = self._runtime.now()
            # If we are interrupted, `abandon` reads the answer: a session costs too much to be thrown away for that.
            token = None
            if not queue or seat.key not in self._contended:
                words = (seat.key, sql.ms(claim.ttl), claim.shared, queue)
                ((token, _),) = await link.request(sql.SEIZE, words, patience, keep=True)
            if token is None and queue:
                await link.prepare(sql.LINE_UP, patience, keep=True)
        except ServerError as error:
            self._seats.drop(seat)
            if claim.id in self._gone:
                return Waiting(claim, sent)  # `abandon` had it cancelled
            raise translate(error, self._links.address) from error
        except OutcomeUnknown:
            self._seats.pop(claim.id, None)
            self._seats.doom(seat)
            raise
        if token is not None:
            seat.token = int(token)
            return Grant(claim, seat.token, sent)
        if queue:
            if len(self._contended) >= KNOWN_KEPT:
                self._contended.clear()
            self._contended.add(seat.key)
            seat.lined_up, seat.sent = True, self._runtime.now()
            link.send(sql.LINE_UP, (seat.key, sql.ms(claim.ttl), claim.shared))
        else:
            self._seats.pop(claim.id, None)
            self._links.keep(link)
        return Waiting(claim, sent)

    async def _reenter(self, seat: Seat, queue: bool, within: float | None) -> Grant | Waiting | None:
        """Repeat an attempt, on its own session; return None if that has ended."""
        claim = seat.claim
        limit, patience = limit_of(self._runtime.now, within), reply_timeout(claim.ttl, SHORTEST, within)
        if not await seat.take(patience):
            raise OutcomeUnknown(f"{self._links.address}: no answer on the session of {claim.name!r}")
        try:
            if not self._seats.is_current(seat):
                return None
            if seat.token is None:
                sent = self._runtime.now()
                rows = await self._links.run(sql.GRANTED, (seat.link.pid,), patience, limit=limit)
                grant = await self._granted(seat, patience if rows == [(b"t",)] else 0.0)
                if grant is None and not queue:
                    await self._seats.leave(seat, limit)
                return grant or Waiting(claim, sent)
            sent = self._runtime.now()
            self._seats.knock(seat)
            if await self._seats.heard(seat, sent + patience) is Renewal.RENEWED:
                seat.sent = sent
                return Grant(claim, seat.token, sent)
        except OutcomeUnknown:
            pass
        finally:
            seat.give()
        self._seats.drop(seat)
        return None

    # ------------------------------------------------------------------ waiting for it

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait for the server's answer, for so long; it goes on waiting for the lock."""
        claim = waiting.claim
        until = None if patience is None else self._runtime.now() + patience
        if claim.id in self._gone:
            await self._runtime.sleep(min(timeout, PAUSE))
        seat = self._seats.get(claim.id)
        if seat is not None and seat.token is None and await seat.take(timeout):
            try:
                if self._seats.is_current(seat):
                    grant = await self._granted(seat, timeout, limit_of(self._runtime.now, patience))
                    # If that is not known to be short, a look must not take longer than an answer: it may say nothing.
                    left = seat.patience if until is None else until - self._runtime.now()
                    if grant is not None or await self._is_in_line(seat, limit_of(self._runtime.now, left)):
                        return grant or waiting
                    self._seats.drop(seat)
            except OutcomeUnknown:
                self._seats.drop(seat)  # the server has ended the session, and with it the claim: line up anew
            finally:
                seat.give()
        return await self.attempt(claim, queue=True, patience=None if until is None else until - self._runtime.now())

    async def _is_in_line(self, seat: Seat, limit: Deadline) -> bool:
        """Return whether the server still has our session, as far as can be told; looked up now and then."""
        claim, now = seat.claim, self._runtime.now()
        if now - seat.looked < max(LOOK_SECONDS, claim.ttl / 3) or claim.id in self._gone:
            return True
        try:
            rows = await self._links.run(sql.GRANTED, (seat.link.pid,), limit.at_most(seat.patience), limit=limit)
        except EngineUnavailable:
            return True  # no connection to be had, perhaps, which says nothing of ours
        seat.looked = now
        return rows != [(None,)]

    async def _granted(self, seat: Seat, timeout: float, limit: Deadline = PATIENT) -> Grant | None:
        """Wait for the answer to LINE_UP; return None if it is still to come."""
        link, claim = seat.link, seat.claim
        try:
            ((token, waited),) = await link.answer(timeout, keep=True)
            seat.token = int(token or 0)
            if waited != b"t":
                self._contended.discard(seat.key)
            if self._runtime.now() - seat.sent > claim.ttl / 3:
                # The server counts from when it granted the lock, and who knows when that was: ask whether it still stands.
                seat.sent = self._runtime.now()
                await link.request(sql.ALIVE, (), limit.at_most(seat.patience))
        except OutcomeUnknown:
            if link.open:
                return None
            raise
        except ServerError as error:
            if claim.id in self._gone:
                return None  # it was cancelled by `abandon`, which waits for its turn
            self._seats.drop(seat)
            raise translate(error, self._links.address) from error
        return Grant(claim, seat.token, seat.sent)

    async def abandon(self, claim: Claim) -> None:
        """Leave the server's queue, or give back the lock, and end what may still be on its way."""
        limit = limit_of(self._runtime.now, 0.0)
        seat = self._seats.get(claim.id)
        if seat is not None:
            if seat.try_take():
                seat.give()
            else:
                # Somebody waits there, as the client is being closed: have the server send it away.
                self._gone[claim.id] = None
                await self._links.run(sql.CANCEL, (seat.link.pid,), limit.at_most(seat.patience), limit=limit)
            if await seat.take(limit.at_most(seat.patience)):
                try:
                    if self._seats.is_current(seat):
                        await self._seats.leave(seat, limit)
                finally:
                    seat.give()
            else:
                # Whoever has the turn does not let go of it, or was interrupted just as it would have.
                self._seats.hang_up(seat)
        await self._seats.end_doomed(claim, limit)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Ask all sessions at once whether they live, which also is what keeps them from being idle."""
        until = self._runtime.now() + reply_timeout(min(grant.claim.ttl for grant in grants), SHORTEST)
        asked: list[Seat | None] = []
        silent: list[Seat] = []
        answers = [Renewal.LOST] * len(grants)
        try:
            for place, grant in enumerate(grants):
                seat = self._seats.get(grant.claim.id)
                mine = seat is not None and seat.token is not None and self._seats.try_take(seat)
                if mine and seat is not None:
                    self._seats.knock(seat)
                if seat is not None and not mine:
                    answers[place] = Renewal.UNKNOWN  # it is being released, or taken
                asked.append(seat if mine else None)
            for place, seat in enumerate(asked):
                if seat is not None:
                    answers[place] = await self._seats.heard(seat, until)
                    if answers[place] is Renewal.UNKNOWN:
                        silent.append(seat)
        finally:
            for seat in asked:
                if seat is not None:
                    seat.give()
        if silent:
            # In the background: the other leases of this batch must not wait for it.
            with suppress(RuntimeError):  # no more threads: the next renewal looks
                self._runtime.spawn(self._look_up(silent), "fencelock-lookup")
        return answers

    async def _look_up(self, seats: list[Seat]) -> None:
        """Ask over another connection who has the locks; the next renewal reports those that are not ours any more as lost.

        A firewall that has forgotten a connection swallows renewals, and the news that the server has ended the session.
        """
        patience = min(seat.patience for seat in seats)
        pids = ",".join(str(seat.link.pid) for seat in seats)
        with suppress(FencelockError):  # nothing is known; the next renewal asks again
            limit = Deadline(self._runtime.now, patience)
            rows = await self._links.run(sql.HELD, (f"{{{pids}}}",), patience, limit=limit)
            for seat in seats:
                if (str(seat.link.pid).encode(), str(seat.key).encode()) not in rows:
                    self._seats.drop_ended(seat)

    async def release(self, grant: Grant) -> bool:
        """Give back the lock, and the session to the others."""
        claim = grant.claim
        seat = self._seats.get(claim.id)
        if seat is None or seat.token is None:
            return False
        if not await seat.take(seat.patience):
            raise OutcomeUnknown(f"{self._links.address}: no answer on the session of {claim.name!r}", claim.name)
        try:
            if not self._seats.is_current(seat):
                return False
            return await self._seats.unlock(seat)
        finally:
            seat.give()

    # ------------------------------------------------------------------ looking, ending

    async def inspect(self, name: str) -> Snapshot:
        """Look at the server's table of locks."""
        return await self._looks.inspect(name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for name in await self._looks.names(prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """End the sessions of the holders."""
        return await self._looks.force_release(name)

    async def close(self) -> None:
        """End all sessions, and with them whatever they still have."""
        self._links.close()
        for seat in list(self._seats.values()):
            if seat.try_take():
                self._seats.drop(seat)

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's sessions without a word, and makes its own."""
        if child:
            self._seats.forget()
            self._gone.clear()
            self._links.forget()

    async def _begin(self, link: Link, limit: Deadline) -> None:
        """Refuse a server that cannot keep a ttl, and a pooler, which would give our session to others."""
        if link.version < ADVISORY_SINCE:
            raise EngineUnavailable(
                f"{self._links.address}: advisory locks need PostgreSQL 14 or later; use postgresql://"
            )
        if not link.direct:
            raise EngineUnavailable(
                f"{self._links.address}: there is a pooler between, and advisory locks belong to a session; connect to the "
                "server itself, or use postgresql://, which works behind a pooler"
            )
        try:
            await link.request(sql.BEGIN, (), limit.at_most(MAX_REPLY_TIMEOUT))
        except ServerError as error:
            raise translate(error, self._links.address) from error
