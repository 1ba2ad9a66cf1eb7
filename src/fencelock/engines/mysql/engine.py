"""MySQL and MariaDB: GET_LOCK on a connection of its own for each claim, which the server ends when it falls silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fencelock.core.clock import Deadline
from fencelock.core.engine import limit_of, time_to_answer
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.link import Link, hear_all
from fencelock.engines.mysql.links import Links, rows_of
from fencelock.engines.mysql.looks import Looks
from fencelock.engines.mysql.packets import Rows
from fencelock.engines.mysql.place import Place
from fencelock.engines.mysql.records import MysqlRecords
from fencelock.engines.mysql.seat import SHORTEST, Seat, Stage
from fencelock.engines.mysql.seats import Seats
from fencelock.errors import EngineUnavailable, FencelockError, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

if TYPE_CHECKING:
    from fencelock.core.adopted_client import AdoptedClient

TRAITS = Traits(
    engine="mysql",
    guarantee=TokenGuarantee.DURABLE,
    fair=True,
    push=True,
    loss_pushed=False,
    shared=False,
    limit=False,
    session=True,
    ttl_min=1.0,
)

OVERTAKEN, ABANDONED_KEPT = 0.02, 1000


class MysqlEngine:
    """`fencelock.core.engine.Backend` on one MySQL or MariaDB server."""

    def __init__(
        self, runtime: Runtime, place: Place | AdoptedClient[Place], namespace: str, url: str | None = None
    ) -> None:
        self.url = url
        """For people; None if there was one to begin with."""
        self._runtime = runtime
        self._namespace = namespace
        self._links = Links(runtime, place)
        self._looks = Looks(runtime, self._links, self._names)
        self.records = MysqlRecords(self._links, self._known_names)
        self._seats = Seats(runtime, self._links)
        self._abandoned: dict[str, None] = {}
        """Claims that were given up, perhaps while somebody was at it: when a client is closed, waiters do not know yet."""

    @property
    def traits(self) -> Traits:
        """What the engine promises, as the server is configured."""
        return TRAITS.weakened(self._links.weakness)

    async def learn_traits(self, patience: float | None) -> None:
        """Connect, unless this client has connected before, to read the server's settings."""
        self._links.check_open()
        await self._links.know(limit_of(self._runtime.now, patience, met=False))

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Take the lock or a place in line."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: GET_LOCK has neither readers nor permits", claim.name)
        self._links.check_open()
        if claim.id in self._abandoned:
            return await self._overtaken(claim)
        limit = limit_of(self._runtime.now, patience, met=self._links.database is not None)
        seat = self._seats.get(claim.id)
        if seat is not None:
            outcome = await self._reenter(seat, queue, limit)
            if outcome is not None:
                return outcome
        if len(self._seats) >= self._seats.sweep_at:
            self._seats.sweep()
        ttl = int(claim.ttl)
        link = await self._links.take(ttl, limit)
        outcome = await self._take(claim, ttl, link, queue, patience, limit)
        if outcome is None:  # the server had hung up on an idle connection, and nothing was answered on it
            link = await self._links.make(ttl, limit)
            outcome = await self._take(claim, ttl, link, queue, patience, limit)
        if outcome is None:
            raise OutcomeUnknown(f"{self._links.address}: the connection broke before the answer came")
        return outcome

    async def _take(
        self, claim: Claim, ttl: int, link: Link, queue: bool, patience: float | None, limit: Deadline
    ) -> Grant | Waiting | None:
        """Try it on this link; None if that turns out to be broken."""
        names = self._names()
        taking = sql.Taking(claim, ttl, names.key(claim.name), names.space)
        kept = claim if claim.ttl == ttl else claim._replace(ttl=float(ttl))
        seat = Seat(self._runtime, kept, link, taking)
        seat.try_take()
        self._seats[claim.id] = seat
        if claim.id in self._abandoned:  # looked at after the seat is there: either this or the abandon finds the other
            self._seats.let_go(seat)
            return await self._overtaken(claim)
        try:
            asked = taking.at_once()
            if link.ttl != ttl:
                asked = [sql.keep_for(ttl), *asked]
                link.ttl = ttl
            seat.replies = link.say(asked)
            reply_timeout = time_to_answer(limit, seat.patience)
            if not await link.hear(seat.replies, reply_timeout):
                if link.open:
                    raise OutcomeUnknown(f"{self._links.address}: no answer within {reply_timeout:.3g} s")
                await self._seats.end(seat, limit)
                return None
            return await self._tried(seat, queue, patience)
        finally:
            seat.give()

    async def _overtaken(self, claim: Claim) -> Waiting:
        """Have whoever asks for a claim that was given up wait for the news of it."""
        await self._runtime.sleep(OVERTAKEN)
        return Waiting(claim, self._runtime.now())

    async def _tried(self, seat: Seat, queue: bool, patience: float | None) -> Grant | Waiting:
        """Take in the answer to a try; line up if it was in vain."""
        token = await self._seats.minted(seat)
        if token:
            return seat.grant(seat.sent)
        if not queue:
            self._seats.let_go(seat)
            return seat.waiting()
        self._seats.line_up(seat, patience)
        return seat.waiting()

    async def _reenter(self, seat: Seat, queue: bool, limit: Deadline) -> Grant | Waiting | None:
        """Go on with what an earlier attempt of the same claim has left; None if that is nothing."""
        if not await seat.take(limit.at_most(seat.patience)):
            raise OutcomeUnknown(f"{self._links.address}: an earlier attempt is still under way")
        try:
            if not self._seats.is_current(seat):
                return None
            if not seat.link.open:
                await self._seats.end(seat, limit)
                return None
            if seat.stage is Stage.HELD:
                return await self._seats.confirm(seat, limit)
            reply_timeout = time_to_answer(limit, seat.patience) if seat.stage is Stage.TRYING else 0.0
            if not await seat.link.hear(seat.replies, reply_timeout):
                if not seat.link.open:
                    await self._seats.end(seat, limit)
                    return None
                if seat.stage is Stage.TRYING:
                    raise OutcomeUnknown(f"{self._links.address}: no answer within {reply_timeout:.3g} s")
                if not queue:
                    await self._seats.end(seat, limit)
                return seat.waiting()
            if seat.stage is Stage.TRYING:
                return await self._tried(seat, queue, None)
            outcome = await self._called(seat, limit)
            if isinstance(outcome, Waiting) and not queue:
                await self._seats.end(seat, limit)
            return outcome
        finally:
            seat.give()

    # ------------------------------------------------------------------ waiting for it

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait for the server to answer what was asked when we lined up: for that, it is never asked anew."""
        until = None if patience is None else self._runtime.now() + patience
        seat = self._seats.get(waiting.claim.id)
        if seat is not None and seat.stage is Stage.WAITING and await seat.take(timeout):
            try:
                outcome = await self._waited(seat, timeout, until)
            finally:
                seat.give()
            if outcome is not None:
                return outcome
        return await self.attempt(
            waiting.claim, queue=True, patience=None if until is None else until - self._runtime.now()
        )

    async def _waited(self, seat: Seat, timeout: float, until: float | None) -> Grant | Waiting | None:
        """Wait on the claim's own connection; None if it has to be asked for anew."""
        if not self._seats.is_current(seat):
            return None  # abandoned meanwhile
        heard = await seat.link.hear(seat.replies, timeout)
        limit = limit_of(self._runtime.now, None if until is None else until - self._runtime.now())
        if heard:
            return await self._called(seat, limit)
        if seat.link.open and await self._is_in_line(seat, limit):
            return seat.waiting()
        await self._seats.end(seat, limit)
        return None

    async def _is_in_line(self, seat: Seat, limit: Deadline) -> bool:
        """Return whether the server still has our session; looked up now and then, over another connection.

        A connection that died without a word, or a server that hangs, would else be waited for without end.
        """
        now = self._runtime.now()
        if now - seat.heard >= seat.claim.ttl / 4:
            if not await self._links.session_exists(seat.link, seat.patience, limit):
                return False
            seat.heard = now
        return True

    async def _called(self, seat: Seat, limit: Deadline) -> Grant | Waiting | None:
        """Take in the answer to a wait; None if the lock was ours but is gone again."""
        said = seat.replies[0].answer
        try:
            token = await self._seats.minted(seat)
        except OutcomeUnknown:
            if seat.link.open:
                raise
            # The session has ended since it was let in: we were stopped for longer than the ttl.
            await self._seats.end(seat, limit)
            return None
        if token:
            # The server counts from when it let us have the lock, which may have been long before we came to see it.
            waited = self._runtime.now() - seat.sent
            if waited <= seat.claim.ttl / 3:
                return seat.grant(seat.sent)
            return await self._seats.confirm(seat, limit)
        if isinstance(said, Rows) and said.rows == [(b"0",)]:
            self._seats.line_up(seat, None)
            return seat.waiting()
        # NULL: killed, a deadlock, out of memory. Never a grant.
        await self._seats.end(seat, limit)
        raise EngineUnavailable(f"{self._links.address} broke off the wait: GET_LOCK answered NULL")

    async def abandon(self, claim: Claim) -> None:
        """Leave nothing behind: the session ends, and with it whatever it has or waits for."""
        if len(self._abandoned) >= ABANDONED_KEPT:
            for id in list(self._abandoned)[: ABANDONED_KEPT // 2]:
                self._abandoned.pop(id, None)
        self._abandoned[claim.id] = None
        seat = self._seats.get(claim.id)
        if seat is None:
            return
        limit = limit_of(self._runtime.now, 0.0)
        if seat.stage is Stage.HELD and await seat.take(limit.at_most(seat.patience)):
            try:
                if not self._seats.is_current(seat):
                    return
                if seat.link.open and await self._seats.given_back(seat, limit) is not None:
                    return
            finally:
                seat.give()
        await self._seats.end(seat, limit)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Speak on the connection of each, all at once, which is what the server counts from; and look whose the lock is."""
        answers = [Renewal.LOST] * len(grants)
        ours: list[tuple[int, Seat]] = []
        silent: list[Seat] = []
        until = self._runtime.now() + SHORTEST  # for all together: those that are stuck must not hold up the others
        try:
            for place, grant in enumerate(grants):
                seat = self._seats.get(grant.claim.id)
                if seat is None or seat.token != grant.token or seat.stage is not Stage.HELD:
                    continue
                if not await seat.take(until - self._runtime.now()):
                    answers[place] = Renewal.UNKNOWN
                elif self._seats.is_current(seat):
                    ours.append((place, seat))
                else:
                    seat.give()  # released meanwhile
            asked = [(seat.link, seat.link.say([sql.is_mine(seat.key)])[0]) for _, seat in ours]
            # The shortest ttl counts: one connection that is stuck must not cost another its lease.
            await hear_all(self._runtime, asked, min((seat.patience for _, seat in ours), default=0.0))
            for (place, seat), (link, reply) in zip(ours, asked, strict=True):
                if reply.answer is NO_REPLY and link.open:
                    answers[place] = Renewal.UNKNOWN
                    silent.append(seat)
                elif self._seats.is_held(seat, reply):
                    answers[place] = Renewal.RENEWED
                else:
                    self._seats.drop(seat)
        finally:
            for _, seat in ours:
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
        limit = Deadline(self._runtime.now, min(seat.patience for seat in seats))
        with suppress(FencelockError):  # nothing is known; the next renewal asks again
            found = await self._links.run(*(sql.is_mine(seat.key) for seat in seats), limit=limit)
            for seat, answer in zip(seats, found, strict=True):
                if rows_of(answer) != [(str(seat.link.id).encode(),)]:
                    self._seats.drop_ended(seat)

    async def release(self, grant: Grant) -> bool:
        """Give back the lock; the server lets the next in."""
        seat = self._seats.get(grant.claim.id)
        if seat is None or seat.token != grant.token:
            return False
        ours = None
        ended = False
        limit = Deadline(self._runtime.now, seat.patience)
        if await seat.take(limit.at_most(seat.patience)):  # else a renewal is not answered
            try:
                if not self._seats.is_current(seat):
                    return False
                ended = not seat.link.connection.alive()
                if not ended:
                    ours = await self._seats.given_back(seat, limit)
            finally:
                seat.give()
        if ours is None:
            await self._seats.end(seat, limit)
            if not ended:
                raise OutcomeUnknown(
                    f"{self._links.address}: no answer on the session of {grant.claim.name!r}", grant.claim.name
                )
        return bool(ours)

    # ------------------------------------------------------------------ looking, forcing, ending

    async def inspect(self, name: str) -> Snapshot:
        """Look."""
        return await self._looks.inspect(name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for name in await self._looks.names(prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """End the session that holds the lock."""
        return await self._looks.force_release(name)

    async def close(self) -> None:
        """Close all connections; whoever still waits on one learns of it."""
        self._links.close()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._seats.clear()
            self._links.forget()

    async def _known_names(self) -> sql.Names:
        await self._links.know()
        return self._names()

    def _names(self) -> sql.Names:
        """Return how names are written; there was a connection before."""
        return sql.Names(self._links.database or "", self._namespace)
