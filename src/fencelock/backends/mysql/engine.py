"""MySQL and MariaDB: GET_LOCK on a connection of its own for each claim, which the server ends when it falls silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, Any

from fencelock.backends.mysql import statements as sql
from fencelock.backends.mysql.link import Link, Reply, Turn, hear_all
from fencelock.backends.mysql.links import Links
from fencelock.backends.mysql.looks import Looks
from fencelock.backends.mysql.packets import Ok, Rows, ServerError
from fencelock.backends.mysql.place import Place
from fencelock.backends.mysql.records import MysqlRecords
from fencelock.core.backend import answer_time
from fencelock.core.world import NO_ANSWER, World
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, Unanswered
from fencelock.model import Busy, Claim, Grant, Renewal, Snapshot, Strength, Traits

if TYPE_CHECKING:
    from fencelock.backends.mysql.application import Application

TRAITS = Traits(
    engine="mysql",
    strength=Strength.DURABLE,
    fair=True,
    push=True,
    loss_pushed=False,
    shared=False,
    limit=False,
    session=True,
    ttl_min=1.0,
)

SHORTEST = 0.3
"""Seconds that an answer is waited for at the least."""
SOON = 0.002
"""Who had to wait for longer than this expects to wait the next time, too, and lines up without a try."""
HASTY = 0.1
"""Who has no more time than this tries first: a lock that is free is had even if there is no time to wait for it."""
OVERTAKEN, ABANDONED_KEPT = 0.02, 1000
SWEEP_AT = 64
"""Claims among which those are looked for whose sessions the server has ended, after their leases were lost."""
IN_LINE = 3600
"""Seconds for which a place in line is asked for at most; then it is asked for again, behind the others."""


class Stage(Enum):
    """How far a claim has come."""

    TRYING = "trying"
    WAITING = "waiting"
    HELD = "held"


class Seat:
    """A claim and its connection. Whatever becomes of the claim, the end of the connection is its end."""

    __slots__ = ("claim", "heard", "key", "link", "replies", "sent", "stage", "taking", "token", "turn")

    def __init__(self, claim: Claim, link: Link, taking: sql.Taking, world: World) -> None:
        self.claim = claim
        self.link = link
        self.taking = taking
        self.key = taking.key
        self.stage = Stage.TRYING
        self.replies: list[Reply] = []
        self.token = 0
        self.turn = Turn(world)
        self.sent = self.heard = world.now()

    @property
    def patience(self) -> float:
        """How long an answer is waited for."""
        return answer_time(self.claim.ttl, SHORTEST)

    def grant(self, since: float) -> Grant:
        """Return what is held."""
        return Grant(self.claim, self.token, since, self)

    def busy(self) -> Busy:
        """Return that it has to wait."""
        return Busy(self.claim, self.sent, None, self)


class MysqlBackend:
    """`fencelock.core.backend.Backend` on one MySQL or MariaDB server."""

    traits = TRAITS

    def __init__(self, world: World, place: Place | Application, namespace: str, url: str | None = None) -> None:
        self.url = url
        """For people; None if there was one to begin with."""
        self._world = world
        self._namespace = namespace
        self._links = Links(world, place)
        self._looks = Looks(world, self._links, self._names)
        self.records = MysqlRecords(self._links, self._known_names)
        self._seats: dict[str, Seat] = {}
        self._sweep_at = SWEEP_AT
        self._contended = False
        self._abandoned: dict[str, None] = {}
        """Claims that were given up, perhaps while somebody was at it: when a client is closed, waiters do not know yet."""

    # ------------------------------------------------------------------ taking it

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:
        """Take the lock or a place in line."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: GET_LOCK has neither readers nor permits", claim.name)
        self._links.check_open()
        if claim.id in self._abandoned:
            return await self._overtaken(claim)
        seat = self._seats.get(claim.id)
        if seat is not None:
            outcome = await self._again(seat, queue)
            if outcome is not None:
                return outcome
        if len(self._seats) >= self._sweep_at:
            await self._sweep()
        ttl = int(claim.ttl)
        link = await self._links.take(ttl)
        outcome = await self._take(claim, ttl, link, queue, patience)
        if outcome is None:  # the server had hung up on an idle connection, and nothing was answered on it
            outcome = await self._take(claim, ttl, await self._links.make(ttl), queue, patience)
        if outcome is None:
            raise Unanswered(f"{self._links.address}: the connection broke before the answer came")
        return outcome

    async def _take(
        self, claim: Claim, ttl: int, link: Link, queue: bool, patience: float | None
    ) -> Grant | Busy | None:
        """Try it on this link; None if that turns out to be broken."""
        names = self._names()
        taking = sql.Taking(claim, ttl, names.key(claim.name), names.space)
        kept = claim if claim.ttl == ttl else claim._replace(ttl=float(ttl))
        seat = Seat(kept, link, taking, self._world)
        await seat.turn.take(0)
        self._seats[claim.id] = seat
        if claim.id in self._abandoned:  # looked at after the seat is there: either this or the abandon finds the other
            self._let_go(seat)
            return await self._overtaken(claim)
        try:
            asked = taking.at_once()
            if link.ttl != ttl:
                asked = [sql.keep_for(ttl), *asked]
                link.ttl = ttl
            elif queue and self._contended and (patience is None or patience > HASTY):
                self._line_up(seat, patience)
                return seat.busy()
            seat.replies = link.say(asked)
            if not await link.hear(seat.replies, seat.patience):
                if link.open:
                    raise Unanswered(f"{self._links.address}: no answer within {seat.patience:g} s")
                await self._end(seat)
                return None
            return await self._tried(seat, queue, patience)
        finally:
            seat.turn.give()

    async def _overtaken(self, claim: Claim) -> Busy:
        """Have whoever asks for a claim that was given up wait for the news of it."""
        await self._world.sleep(OVERTAKEN)
        return Busy(claim, self._world.now())

    async def _tried(self, seat: Seat, queue: bool, patience: float | None) -> Grant | Busy:
        """Take in the answer to a try; line up if it was in vain."""
        token = await self._minted(seat)
        if token:
            return seat.grant(seat.sent)
        if not queue:
            self._let_go(seat)
            return seat.busy()
        self._contended = True
        self._line_up(seat, patience)
        return seat.busy()

    def _line_up(self, seat: Seat, patience: float | None) -> None:
        seconds = IN_LINE if patience is None else min(IN_LINE, ceil(patience) + 1)
        seat.stage = Stage.WAITING
        seat.sent = seat.heard = self._world.now()
        seat.replies = seat.link.say(seat.taking.in_line(seconds))

    async def _minted(self, seat: Seat) -> int:
        """Return the token if the answers say that the lock is ours, else 0; raise what the server refuses with."""
        answers = [reply.answer for reply in seat.replies]
        for answer in answers:
            if isinstance(answer, ServerError):
                seat.link.ttl = 0  # perhaps it was not set
                if await self._given_back(seat) is None:
                    await self._end(seat)
                if answer.code == sql.FULL and (await self._links.run(sql.SWEEP))[0].affected:
                    raise Unanswered(f"{self._links.address}: {answer}; there is room now") from answer
                if answer.code in sql.INTERRUPTED:  # and what it had done ended with the session
                    raise Unanswered(f"{self._links.address} broke it off: {answer}") from answer
                self._links.check(answer)
        minted = answers[-1]
        if not isinstance(minted, Ok) or not minted.affected:
            return 0
        try:
            await self._links.reserve(seat.link, minted.insert_id, seat.patience)
        except Unanswered:
            raise
        except EngineUnavailable:
            await self._end(seat)
            raise
        seat.stage, seat.token = Stage.HELD, minted.insert_id
        return seat.token

    async def _again(self, seat: Seat, queue: bool) -> Grant | Busy | None:
        """Go on with what an earlier attempt of the same claim has left; None if that is nothing."""
        if not await seat.turn.take(seat.patience):
            raise Unanswered(f"{self._links.address}: an earlier attempt is still under way")
        try:
            if self._seats.get(seat.claim.id) is not seat:
                return None
            if not seat.link.open:
                await self._end(seat)
                return None
            if seat.stage is Stage.HELD:
                return await self._confirm(seat)
            if not await seat.link.hear(seat.replies, seat.patience if seat.stage is Stage.TRYING else 0.0):
                if not seat.link.open:
                    await self._end(seat)
                    return None
                if seat.stage is Stage.TRYING:
                    raise Unanswered(f"{self._links.address}: no answer within {seat.patience:g} s")
                if not queue:
                    await self._end(seat)
                return seat.busy()
            if seat.stage is Stage.TRYING:
                return await self._tried(seat, queue, None)
            outcome = await self._called(seat)
            if isinstance(outcome, Busy) and not queue:
                await self._end(seat)
            return outcome
        finally:
            seat.turn.give()

    async def _confirm(self, seat: Seat) -> Grant | None:
        """Make sure of a lock that we should hold, and count its ttl anew; None if it is gone."""
        sent = self._world.now()
        replies = seat.link.say([sql.is_mine(seat.key)])
        if not await seat.link.hear(replies, seat.patience) and seat.link.open:
            raise Unanswered(f"{self._links.address}: no answer within {seat.patience:g} s")
        if self._is_held(seat, replies[0]):
            return seat.grant(sent)
        await self._end(seat)
        return None

    # ------------------------------------------------------------------ waiting for it

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Wait for the server to answer what was asked when we lined up: for that, it is never asked anew."""
        seat = self._seats.get(busy.claim.id)
        if seat is None or seat.stage is not Stage.WAITING or not await seat.turn.take(timeout):
            return await self.attempt(busy.claim, queue=True)
        try:
            if self._seats.get(seat.claim.id) is not seat:
                pass  # abandoned meanwhile
            elif await seat.link.hear(seat.replies, timeout):
                outcome = await self._called(seat)
                if outcome is not None:
                    return outcome
            elif seat.link.open:
                if await self._is_in_line(seat):
                    return seat.busy()
                await self._end(seat)
            else:
                await self._end(seat)
        finally:
            seat.turn.give()
        return await self.attempt(busy.claim, queue=True)

    async def _is_in_line(self, seat: Seat) -> bool:
        """Return whether the server still has our session; looked up now and then, over another connection.

        A connection that died without a word, or a server that hangs, would else be waited for without end.
        """
        now = self._world.now()
        if now - seat.heard >= seat.claim.ttl / 4:
            if not await self._links.lives(seat.link, seat.heard, seat.patience):
                return False
            seat.heard = now
        return True

    async def _called(self, seat: Seat) -> Grant | Busy | None:
        """Take in the answer to a wait; None if the lock was ours but is gone again."""
        said = seat.replies[0].answer
        try:
            token = await self._minted(seat)
        except Unanswered:
            if seat.link.open:
                raise
            await self._end(seat)  # the session has ended since it was let in: we were stopped for longer than the ttl
            return None
        if token:
            # The server counts from when it let us have the lock, which may have been long before we came to see it.
            waited = self._world.now() - seat.sent
            self._contended = waited > SOON
            if waited <= seat.claim.ttl / 3:
                return seat.grant(seat.sent)
            return await self._confirm(seat)
        if isinstance(said, Rows) and said.rows == [(b"0",)]:
            self._line_up(seat, None)
            return seat.busy()
        # NULL: killed, a deadlock, out of memory. Never a grant.
        await self._end(seat)
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
        if seat.stage is Stage.HELD and await seat.turn.take(seat.patience):
            try:
                if self._seats.get(claim.id) is not seat:
                    return
                if seat.link.open and await self._given_back(seat) is not None:
                    return
            finally:
                seat.turn.give()
        await self._end(seat)

    # ------------------------------------------------------------------ keeping it, giving it back

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Speak on the connection of each, all at once, which is what the server counts from; and look whose the lock is."""
        answers = [Renewal.LOST] * len(grants)
        ours: list[tuple[int, Seat]] = []
        until = self._world.now() + SHORTEST  # for all together: those that are stuck must not hold up the others
        try:
            for place, grant in enumerate(grants):
                seat = self._seats.get(grant.claim.id)
                if seat is None or seat.token != grant.token or seat.stage is not Stage.HELD:
                    continue
                if not await seat.turn.take(until - self._world.now()):
                    answers[place] = Renewal.UNKNOWN
                elif self._seats.get(grant.claim.id) is seat:
                    ours.append((place, seat))
                else:
                    seat.turn.give()  # released meanwhile
            asked = [(seat.link, seat.link.say([sql.is_mine(seat.key)])[0]) for _, seat in ours]
            # The shortest ttl counts: one connection that is stuck must not cost another its lease.
            await hear_all(self._world, asked, min((seat.patience for _, seat in ours), default=0.0))
            for (place, seat), (link, reply) in zip(ours, asked, strict=True):
                if reply.answer is NO_ANSWER and link.open:
                    answers[place] = Renewal.UNKNOWN
                elif self._is_held(seat, reply):
                    answers[place] = Renewal.RENEWED
                else:
                    self._seats.pop(seat.claim.id, None)
                    self._links.drop(link)
        finally:
            for _, seat in ours:
                seat.turn.give()
        return answers

    def _is_held(self, seat: Seat, reply: Reply) -> bool:
        """Return whether the server says that the lock is this session's: not one that something in between has made."""
        answer = reply.answer
        return isinstance(answer, Rows) and answer.rows == [(str(seat.link.id).encode(),)]

    async def release(self, grant: Grant) -> bool:
        """Give back the lock; the server lets the next in."""
        seat = self._seats.get(grant.claim.id)
        if seat is None or seat.token != grant.token:
            return False
        ours = None
        ended = False
        if await seat.turn.take(seat.patience):  # else a renewal is not answered
            try:
                if self._seats.get(grant.claim.id) is not seat:
                    return False
                ended = not seat.link.wire.alive()
                if not ended:
                    ours = await self._given_back(seat)
            finally:
                seat.turn.give()
        if ours is None:
            await self._end(seat)
            if not ended:
                raise Unanswered(
                    f"{self._links.address}: no answer on the session of {grant.claim.name!r}", grant.claim.name
                )
        return bool(ours)

    async def _given_back(self, seat: Seat) -> bool | None:
        """Release on the claim's own connection; None if that cannot be told, and the session has to end."""
        ours = False
        answer = await self._asked(seat, sql.release(seat.link.id))
        if isinstance(answer, Ok) and answer.affected:
            ours = True
        elif answer is not NO_ANSWER:
            # Nobody has written down that we hold it, or nothing can be written now: that is no reason to keep it.
            failed = isinstance(answer, ServerError)
            answer = await self._asked(seat, sql.RELEASE_ALL)
            if not isinstance(answer, Rows):
                return None
            ours = answer.rows != [(b"0",)]
            if failed and not ours:
                return None  # what failed may have given it back first: nobody can say that it was lost
        else:
            return None
        self._let_go(seat)
        return ours

    async def _asked(self, seat: Seat, statement: str) -> Any:
        """Return the answer, or NO_ANSWER."""
        (reply,) = seat.link.say([statement])
        await seat.link.hear([reply], seat.patience)
        return reply.answer

    def _let_go(self, seat: Seat) -> None:
        """Forget a claim that has nothing on the server any more; its connection is for others."""
        if self._seats.pop(seat.claim.id, None) is not None:
            self._links.give(seat.link)

    async def _sweep(self) -> None:
        """Forget the sessions that have ended while nobody looked: those of leases that were lost."""
        for seat in list(self._seats.values()):
            if seat.stage is Stage.HELD and await seat.turn.take(0):
                try:
                    if self._seats.get(seat.claim.id) is seat and not seat.link.wire.alive():
                        self._seats.pop(seat.claim.id, None)
                        self._links.drop(seat.link)
                finally:
                    seat.turn.give()
        self._sweep_at = max(SWEEP_AT, 2 * len(self._seats))

    async def _end(self, seat: Seat) -> None:
        """End a claim together with its session."""
        await self._links.end(seat.link, seat.patience)
        if self._seats.get(seat.claim.id) is seat:
            del self._seats[seat.claim.id]

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
