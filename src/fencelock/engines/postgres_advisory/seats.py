"""What is said on a claim's own session, by whoever has its turn: signs of life, giving the lock back, leaving the line."""

from __future__ import annotations

from fencelock.core import dedicated
from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.links import Links
from fencelock.engines.postgres.trouble import ServerError, translate
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.engines.postgres_advisory.seat import SHORTEST, Seat
from fencelock.errors import FencelockError, OutcomeUnknown
from fencelock.model import Claim, Renewal


class Seats(dedicated.DedicatedSessions[Seat]):
    """All sessions of a client that have a lock or wait for one, and those of which that is not known."""

    def __init__(self, runtime: Runtime, links: Links) -> None:
        super().__init__()
        self._runtime = runtime
        self._links = links
        self._doomed: dict[str, list[int]] = {}
        """Sessions that were given up without an answer, by claim: they may yet get the lock."""

    def knock(self, seat: Seat) -> None:
        """Send a sign of life, unless the answer to the last one is still to come, whoever was interrupted waiting for it."""
        seat.late = seat.link.pending
        if not seat.late and seat.link.open:
            try:
                seat.link.send(sql.ALIVE, ())
            except OutcomeUnknown:
                pass  # the link is closed, as whoever waits for the answer will see

    async def heard(self, seat: Seat, until: float) -> Renewal:
        """Take in the answer to a sign of life; if it was one to an earlier one, ask again."""
        link = seat.link
        try:
            if not link.open:
                raise OutcomeUnknown("its session has ended")
            await link.answer(until - self._runtime.now(), keep=True)
            if seat.late:
                link.send(sql.ALIVE, ())
                await link.answer(until - self._runtime.now(), keep=True)
        except OutcomeUnknown:
            if link.open:
                return Renewal.UNKNOWN
        except ServerError:
            pass
        else:
            return Renewal.RENEWED
        self.drop(seat)
        return Renewal.LOST

    async def unlock(self, seat: Seat) -> bool:
        """Give back a lock; the session is used again only if that was answered."""
        link, claim = seat.link, seat.claim
        self.pop(claim.id, None)
        try:
            if link.pending:
                await link.answer(seat.patience)  # to a renewal
            if not link.alive():
                self._links.drop(link)
                return False  # the session has ended, and the lock with it
            statement = sql.UNLOCK_SHARED if claim.shared else sql.UNLOCK
            rows = await link.request(statement, (seat.key, self._links.idle_default), seat.patience)
        except ServerError as error:
            self._links.drop(link)
            raise translate(error, self._links.address) from error
        except FencelockError:
            self._links.drop(link)  # the server ends the session when it sees that, or at the end of the ttl
            raise
        except BaseException:
            self.doom(seat)  # whoever was interrupted abandons the claim next, and has the server end the session
            raise
        if rows[0][0] != b"t":
            self._links.drop(link)
            return False
        self._links.keep(link)
        return True

    async def leave(self, seat: Seat, limit: Deadline) -> None:
        """Leave the line, or give back the lock; a session that does not do so in time is ended."""
        link, claim = seat.link, seat.claim
        self.pop(claim.id, None)
        if not link.open:
            return
        try:
            if link.pending and seat.token is None and seat.lined_up:
                await self._links.run(sql.CANCEL, (link.pid,), SHORTEST, limit=limit)
            if link.pending:
                try:
                    await link.answer(SHORTEST)
                except ServerError:
                    pass  # cancelled; the lock may have been granted all the same
            await link.request(sql.UNLOCK_ALL, (0, self._links.idle_default), SHORTEST)
            self._links.keep(link)
        except (FencelockError, ServerError):
            self.doom(seat)
        except BaseException:
            self.doom(seat)
            raise

    def drop(self, seat: Seat) -> None:
        """Forget a seat, and close its connection: the server ends the session when it sees that."""
        self.pop(seat.claim.id, None)
        self._links.drop(seat.link)

    def doom(self, seat: Seat) -> None:
        """Give up a session that may still get the lock: `end_doomed` ends it, else the server at the end of the ttl."""
        self._doomed.setdefault(seat.claim.id, []).append(seat.link.pid)
        self._links.drop(seat.link)

    def hang_up(self, seat: Seat) -> None:
        """Doom a seat whose turn another has, who learns of it."""
        self.pop(seat.claim.id, None)
        self._doomed.setdefault(seat.claim.id, []).append(seat.link.pid)
        seat.link.hang_up()

    async def end_doomed(self, claim: Claim, limit: Deadline) -> None:
        """Have the server end what may still get the lock for a claim."""
        for pid in self._doomed.get(claim.id, ()):
            await self._links.run(sql.END, (pid,), MIN_REPLY_TIMEOUT, limit=limit)
        self._doomed.pop(claim.id, None)

    def forget(self) -> None:
        """Begin anew in a forked child: the parent's sessions are not ours to end."""
        self.clear()
        self._doomed.clear()
