"""PostgreSQL, advisory: the server's own locks, each on a session that the server ends when it is idle for the ttl.

Advisory locks are re-entrant within a session, so every lease and every waiter has one. A waiter's statement blocks in the
server and stays open over many calls of `wait`: asking anew would lose its place in line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from hashlib import blake2b
from math import ceil

from fencelock.backends.postgres.link import KNOWN_KEPT, Link, Statement
from fencelock.backends.postgres.links import Links
from fencelock.backends.postgres.place import Place
from fencelock.backends.postgres.records import PostgresRecords
from fencelock.backends.postgres.schema import ADVISORY_SINCE
from fencelock.backends.postgres.seat import Seat
from fencelock.backends.postgres.trouble import ServerError, translate
from fencelock.core.backend import LONGEST, answer_time
from fencelock.core.world import World
from fencelock.errors import EngineUnavailable, FencelockError, GuaranteeUnavailable, Unanswered
from fencelock.model import Busy, Claim, Grant, Holder, Renewal, Snapshot, Strength, Traits, Waiter

TRAITS = Traits(
    engine="postgresql+advisory",
    strength=Strength.DURABLE,
    fair=True,
    push=True,
    loss_pushed=False,
    limit=False,
    session=True,
)

SHORTEST = 0.5
"""Seconds that an answer is waited for at the least."""

PAUSE = 0.05
LOOK_SECONDS = 5.0
"""How often a waiter looks whether the server still has its session, at most: its connection may be dead without a word."""
SWEEP_AT = 64
"""Sessions of ours among which those are looked for that the server has ended, after their lease was lost."""

BEGIN = Statement("fl_begin", "SELECT fencelock.begin_session()")
INTRODUCE = Statement("fl_introduce", "SELECT fencelock.introduce($1, $2, $3, $4)")
# Plain SQL, not a function: it is half of what an uncontended lock costs. From now on the session ends when it is idle for
# the ttl, if it has the lock or is about to wait for it. A token that is far behind the clock, as after a restore, is
# drawn again by a function that sees to that.
SEIZE = Statement(
    "fl_seize",
    "SELECT token, CASE WHEN token IS NOT NULL OR $4 THEN set_config('idle_session_timeout', $2, false) || "
    "set_config('application_name', 'fencelock ' || coalesce(token::text, '-') || ' ' || $2, false) END "
    "FROM (SELECT CASE WHEN drawn < date_part('epoch', clock_timestamp()) * 1000000 - 1000000 THEN fencelock.mint() "
    "ELSE drawn END AS token "
    "FROM (SELECT CASE WHEN CASE WHEN $3 THEN pg_try_advisory_lock_shared($1) ELSE pg_try_advisory_lock($1) END "
    "THEN nextval('fencelock.token') END AS drawn OFFSET 0) AS tried OFFSET 0) AS minted",
)
LINE_UP = Statement("fl_line_up", "CALL fencelock.line_up($1, $2, $3, NULL, NULL)")
_FORGET = "set_config('idle_session_timeout', $2, false)"
UNLOCK = Statement("fl_unlock", f"SELECT pg_advisory_unlock($1), {_FORGET}")
UNLOCK_SHARED = Statement("fl_unlock_shared", f"SELECT pg_advisory_unlock_shared($1), {_FORGET}")
UNLOCK_ALL = Statement("fl_unlock_all", f"SELECT $1::bigint, pg_advisory_unlock_all(), {_FORGET}")
ALIVE = Statement("fl_alive", "SELECT")
CANCEL = Statement("fl_cancel", "SELECT pg_cancel_backend($1)")
END = Statement(
    "fl_end",
    "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity WHERE pid = $1 AND application_name LIKE 'fencelock%'",
)
GRANTED = Statement("fl_granted", "SELECT bool_and(granted) FROM pg_locks WHERE pid = $1 AND locktype = 'advisory'")
INSPECT = Statement("fl_sessions", "SELECT owner, token, expires_in, shared FROM fencelock.sessions($1)")
NAMES = Statement("fl_locked_names", "SELECT fencelock.locked_names($1, $2)")
EVICT = Statement("fl_evict", "SELECT fencelock.evict($1)")


class AdvisoryBackend:
    """`fencelock.core.backend.Backend` on advisory locks."""

    traits = TRAITS

    def __init__(self, world: World, place: Place, namespace: str) -> None:
        self._world = world
        self._namespace = namespace
        self._links = Links(world, place, self._begin)
        self.records = PostgresRecords(self._links, namespace)
        self._seats: dict[str, Seat] = {}
        self._doomed: dict[str, list[int]] = {}
        """Sessions that were given up without an answer, by claim: they may yet get the lock."""
        self._gone: dict[str, None] = {}
        """Claims that were abandoned under somebody who still asks for them."""
        self._contended: set[int] = set()
        """Keys that somebody else had the last time: asked for by the statement that can wait, which costs more."""
        self._sweep_at = SWEEP_AT

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:
        """Try to take the lock; if somebody has it, ask the server to wait for it."""
        if claim.limit is not None:
            raise GuaranteeUnavailable(
                f"{claim.name!r}: {TRAITS.engine} has readers and writers but no permits; use postgresql://", claim.name
            )
        if claim.id in self._gone:
            self._links.check_open()
            return Busy(claim, self._world.now())
        seat = self._seats.get(claim.id)
        if seat is not None:
            outcome = await self._again(seat, queue)
            if outcome is not None:
                return outcome
        if len(self._seats) >= self._sweep_at:
            self._sweep()
        link = await self._links.borrow()
        seat = self._seats[claim.id] = Seat(self._world, claim, self._key(claim.name), link)
        seat.try_take()
        try:
            return await self._seize(seat, queue, answer_time(claim.ttl, SHORTEST, patience))
        finally:
            seat.give()

    async def _seize(self, seat: Seat, queue: bool, patience: float) -> Grant | Busy:
        claim, link = seat.claim, seat.link
        sent = seat.sent = self._world.now()
        try:
            if not link.knows(claim.owner, seat.key):
                await link.ask(INTRODUCE, (seat.key, self._namespace, claim.name, claim.owner), patience, keep=True)
                link.learn(claim.owner, seat.key)
                sent = seat.sent = self._world.now()
            # If we are interrupted, `abandon` reads the answer: a session costs too much to be thrown away for that.
            token = None
            if not queue or seat.key not in self._contended:
                words = (seat.key, _ms(claim.ttl), claim.shared, queue)
                ((token, _),) = await link.ask(SEIZE, words, patience, keep=True)
            if token is None and queue:
                await link.prepare(LINE_UP, patience, keep=True)
        except ServerError as error:
            self._drop(seat)
            if claim.id in self._gone:
                return Busy(claim, sent)  # `abandon` had it cancelled
            raise translate(error, self._links.address) from error
        except Unanswered:
            self._drop(seat)
            self._doomed.setdefault(claim.id, []).append(link.pid)
            raise
        if token is not None:
            seat.token = int(token)
            return Grant(claim, seat.token, sent)
        if queue:
            if len(self._contended) >= KNOWN_KEPT:
                self._contended.clear()
            self._contended.add(seat.key)
            seat.lined_up, seat.sent = True, self._world.now()
            link.send(LINE_UP, (seat.key, _ms(claim.ttl), claim.shared))
        else:
            self._seats.pop(claim.id, None)
            self._links.keep(link)
        return Busy(claim, sent)

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Wait for the server's answer, for so long; it goes on waiting for the lock."""
        claim = busy.claim
        if claim.id in self._gone:
            await self._world.sleep(min(timeout, PAUSE))
        seat = self._seats.get(claim.id)
        if seat is not None and seat.token is None and await seat.take(timeout):
            try:
                if self._is_current(seat):
                    grant = await self._granted(seat, timeout)
                    if grant is not None or await self._is_in_line(seat):
                        return grant or busy
                    self._drop(seat)
            except Unanswered:
                self._drop(seat)  # the server has ended the session, and with it the claim: line up anew
            finally:
                seat.give()
        return await self.attempt(claim, queue=True)

    async def _is_in_line(self, seat: Seat) -> bool:
        """Return whether the server still has our session, as far as can be told; looked up now and then."""
        claim, now = seat.claim, self._world.now()
        if now - seat.looked < max(LOOK_SECONDS, claim.ttl / 3) or claim.id in self._gone:
            return True
        try:
            rows = await self._links.run(GRANTED, (seat.link.pid,), answer_time(claim.ttl, SHORTEST))
        except EngineUnavailable:
            return True  # no connection to be had, perhaps, which says nothing of ours
        seat.looked = now
        return rows != [(None,)]

    async def _granted(self, seat: Seat, timeout: float) -> Grant | None:
        """Wait for the answer to LINE_UP; return None if it is still to come."""
        link, claim = seat.link, seat.claim
        try:
            ((token, waited),) = await link.answer(timeout, keep=True)
            seat.token = int(token or 0)
            if waited != b"t":
                self._contended.discard(seat.key)
            if self._world.now() - seat.sent > claim.ttl / 3:
                # The server counts from when it granted the lock, and who knows when that was: ask whether it still stands.
                seat.sent = self._world.now()
                await link.ask(ALIVE, (), answer_time(claim.ttl, SHORTEST))
        except Unanswered:
            if link.open:
                return None
            raise
        except ServerError as error:
            if claim.id in self._gone:
                return None  # it was cancelled by `abandon`, which waits for its turn
            self._drop(seat)
            raise translate(error, self._links.address) from error
        return Grant(claim, seat.token, seat.sent)

    async def _again(self, seat: Seat, queue: bool) -> Grant | Busy | None:
        """Repeat an attempt, on its own session; return None if that has ended."""
        claim = seat.claim
        if not await seat.take(answer_time(claim.ttl, SHORTEST)):
            raise Unanswered(f"{self._links.address}: no answer on the session of {claim.name!r}")
        try:
            if not self._is_current(seat):
                return None
            if seat.token is None:
                sent = self._world.now()
                rows = await self._links.run(GRANTED, (seat.link.pid,), answer_time(claim.ttl, SHORTEST))
                grant = await self._granted(seat, answer_time(claim.ttl, SHORTEST) if rows == [(b"t",)] else 0.0)
                if grant is None and not queue:
                    await self._leave(seat)
                return grant or Busy(claim, sent)
            sent = self._world.now()
            if await self._renew_one(seat, answer_time(claim.ttl, SHORTEST)) is Renewal.RENEWED:
                seat.sent = sent
                return Grant(claim, seat.token, sent)
        except Unanswered:
            pass
        finally:
            seat.give()
        self._drop(seat)
        return None

    async def abandon(self, claim: Claim) -> None:
        """Leave the server's queue, or give back the lock, and end what may still be on its way."""
        seat = self._seats.get(claim.id)
        if seat is not None:
            if seat.try_take():
                seat.give()
            else:
                # Somebody waits there, as the client is being closed: have the server send it away.
                self._gone[claim.id] = None
                await self._links.run(CANCEL, (seat.link.pid,), answer_time(claim.ttl, SHORTEST))
            if await seat.take(answer_time(claim.ttl, SHORTEST)):
                try:
                    if self._is_current(seat):
                        await self._leave(seat)
                finally:
                    seat.give()
            else:
                # Whoever has the turn does not let go of it, or was interrupted just as it would have.
                self._seats.pop(claim.id, None)
                self._doomed.setdefault(claim.id, []).append(seat.link.pid)
                seat.link.hang_up()
        for pid in self._doomed.get(claim.id, ()):
            await self._links.run(END, (pid,), LONGEST)
        self._doomed.pop(claim.id, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Ask all sessions at once whether they live, which also is what keeps them from being idle."""
        until = self._world.now() + answer_time(min(grant.claim.ttl for grant in grants), SHORTEST)
        asked: list[Seat | None] = []
        answers = [Renewal.LOST] * len(grants)
        try:
            for place, grant in enumerate(grants):
                seat = self._seats.get(grant.claim.id)
                mine = seat is not None and seat.token is not None and self._try_take(seat)
                if mine and seat is not None:
                    self._knock(seat)
                if seat is not None and not mine:
                    answers[place] = Renewal.UNKNOWN  # it is being released, or taken
                asked.append(seat if mine else None)
            for place, seat in enumerate(asked):
                if seat is not None:
                    answers[place] = await self._heard(seat, until)
        finally:
            for seat in asked:
                if seat is not None:
                    seat.give()
        return answers

    async def release(self, grant: Grant) -> bool:
        """Give back the lock, and the session to the others."""
        claim = grant.claim
        seat = self._seats.get(claim.id)
        if seat is None or seat.token is None:
            return False
        if not await seat.take(answer_time(claim.ttl, SHORTEST)):
            raise Unanswered(f"{self._links.address}: no answer on the session of {claim.name!r}", claim.name)
        try:
            if not self._is_current(seat):
                return False
            self._seats.pop(claim.id, None)
            return await self._unlock(seat)
        finally:
            seat.give()

    async def inspect(self, name: str) -> Snapshot:
        """Look at the server's table of locks."""
        rows = await self._links.run(INSPECT, (self._key(name),), LONGEST)
        return Snapshot(
            name,
            tuple(
                Holder(_text(owner), int(token), float(left or 0), shared == b"t")
                for owner, token, left, shared in rows
                if token is not None
            ),
            tuple(
                Waiter(_text(owner), float(left or 0), shared == b"t")
                for owner, token, left, shared in rows
                if token is None
            ),
        )

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for (name,) in await self._links.run(NAMES, (self._namespace, prefix), LONGEST):
            yield _text(name)

    async def force_release(self, name: str) -> int:
        """End the sessions of the holders. Never twice: the second time it would be whoever was let in by the first."""
        _, ((dropped,),) = await self._links.timed(EVICT, (self._key(name),), 2 * LONGEST)
        return int(dropped or 0)

    async def close(self) -> None:
        """End all sessions, and with them whatever they still have."""
        self._links.close()
        for seat in list(self._seats.values()):
            if seat.try_take():
                self._drop(seat)

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's sessions without a word, and makes its own."""
        if child:
            self._seats.clear()
            self._doomed.clear()
            self._gone.clear()
            self._links.forget()

    # ------------------------------------------------------------------ sessions; the turn is had

    async def _begin(self, link: Link) -> None:
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
            await link.ask(BEGIN, (), LONGEST)
        except ServerError as error:
            raise translate(error, self._links.address) from error

    def _is_current(self, seat: Seat) -> bool:
        """Return whether the claim still has this seat: if not, its session may be somebody else's by now."""
        return self._seats.get(seat.claim.id) is seat

    def _try_take(self, seat: Seat) -> bool:
        """Take the turn, if nobody has it and the claim still has the seat."""
        if not seat.try_take():
            return False
        if self._is_current(seat):
            return True
        seat.give()
        return False

    async def _heard(self, seat: Seat, until: float) -> Renewal:
        """Take in the answer to ALIVE; if it was one to an earlier one, ask again."""
        link = seat.link
        try:
            if not link.open:
                raise Unanswered("its session has ended")
            await link.answer(until - self._world.now(), keep=True)
            if seat.late:
                link.send(ALIVE, ())
                await link.answer(until - self._world.now(), keep=True)
        except Unanswered:
            if link.open:
                return Renewal.UNKNOWN
        except ServerError:
            pass
        else:
            return Renewal.RENEWED
        self._drop(seat)
        return Renewal.LOST

    def _knock(self, seat: Seat) -> None:
        """Send a sign of life, unless the answer to the last one is still to come, whoever was interrupted waiting for it."""
        seat.late = seat.link.pending
        if not seat.late and seat.link.open:
            try:
                seat.link.send(ALIVE, ())
            except Unanswered:
                pass  # the link is closed, as whoever waits for the answer will see

    async def _renew_one(self, seat: Seat, patience: float) -> Renewal:
        self._knock(seat)
        return await self._heard(seat, self._world.now() + patience)

    async def _unlock(self, seat: Seat) -> bool:
        """Give back a lock; the session is used again only if that was answered."""
        link, claim = seat.link, seat.claim
        patience = answer_time(claim.ttl, SHORTEST)
        try:
            if link.pending:
                await link.answer(patience)  # to a renewal
            if not link.alive():
                self._links.drop(link)
                return False  # the session has ended, and the lock with it
            statement = UNLOCK_SHARED if claim.shared else UNLOCK
            rows = await link.ask(statement, (seat.key, self._links.idle_default), patience)
        except ServerError as error:
            self._links.drop(link)
            raise translate(error, self._links.address) from error
        except BaseException:
            self._links.drop(link)  # the server ends the session when it sees that, or at the end of the ttl
            raise
        if rows[0][0] != b"t":
            self._links.drop(link)
            return False
        self._links.keep(link)
        return True

    async def _leave(self, seat: Seat) -> None:
        """Leave the line, or give back the lock; a session that does not do so in time is ended."""
        link, claim = seat.link, seat.claim
        self._seats.pop(claim.id, None)
        if not link.open:
            return
        try:
            if link.pending and seat.token is None and seat.lined_up:
                await self._links.run(CANCEL, (link.pid,), SHORTEST)
            if link.pending:
                try:
                    await link.answer(SHORTEST)
                except ServerError:
                    pass  # cancelled; the lock may have been granted all the same
            await link.ask(UNLOCK_ALL, (0, self._links.idle_default), SHORTEST)
            self._links.keep(link)
        except (FencelockError, ServerError):
            self._doom(claim, link)
        except BaseException:
            self._doom(claim, link)
            raise

    def _sweep(self) -> None:
        """Forget the sessions that have ended while nobody looked: those of leases that were lost."""
        for seat in list(self._seats.values()):
            if seat.token is not None and not seat.link.pending and self._try_take(seat):
                if not seat.link.alive():
                    self._drop(seat)
                seat.give()
        self._sweep_at = max(SWEEP_AT, 2 * len(self._seats))

    def _drop(self, seat: Seat) -> None:
        self._seats.pop(seat.claim.id, None)
        self._links.drop(seat.link)

    def _doom(self, claim: Claim, link: Link) -> None:
        """Give up a session that may still get the lock; `abandon` ends it, else the server at the end of the ttl."""
        self._doomed.setdefault(claim.id, []).append(link.pid)
        self._links.drop(link)

    def _key(self, name: str) -> int:
        """Return a name's 64 bits. Neither part can contain a NUL."""
        digest = blake2b(f"{self._namespace}\0{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)


def _ms(ttl: float) -> str:
    return f"{ceil(ttl * 1000)}ms"


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
