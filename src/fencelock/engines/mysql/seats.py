"""What is said on a claim's own connection, by whoever has its turn: lining up, what became of it, giving the lock back."""

from __future__ import annotations

from math import ceil
from typing import Any

from fencelock.core import dedicated
from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import time_to_answer
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.link import Reply
from fencelock.engines.mysql.links import Links
from fencelock.engines.mysql.packets import Ok, Rows, ServerError
from fencelock.engines.mysql.seat import Seat, Stage
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Grant

IN_LINE = 3600
"""Seconds for which a place in line is asked for at most; then it is asked for again, behind the others."""


class Seats(dedicated.DedicatedSessions[Seat]):
    """All connections of a client that have a lock or ask for one."""

    def __init__(self, runtime: Runtime, links: Links) -> None:
        super().__init__()
        self._runtime = runtime
        self._links = links

    def line_up(self, seat: Seat, patience: float | None) -> None:
        """Ask the server to wait for the lock, for as long as whoever waits for it has time."""
        seconds = IN_LINE if patience is None else min(IN_LINE, ceil(patience) + 1)
        seat.stage = Stage.WAITING
        seat.sent = seat.heard = self._runtime.now()
        seat.replies = seat.link.say(seat.taking.in_line(seconds))

    async def minted(self, seat: Seat) -> int:
        """Return the token if the answers say that the lock is ours, else 0; raise what the server refuses with."""
        answers = [reply.answer for reply in seat.replies]
        for answer in answers:
            if isinstance(answer, ServerError):
                seat.link.ttl = 0  # perhaps it was not set
                if await self.given_back(seat) is None:
                    await self.end(seat)
                if answer.code == sql.FULL and (await self._links.run(sql.SWEEP))[0].affected:
                    raise OutcomeUnknown(f"{self._links.address}: {answer}; there is room now") from answer
                if answer.code in sql.INTERRUPTED:  # and what it had done ended with the session
                    raise OutcomeUnknown(f"{self._links.address} broke it off: {answer}") from answer
                self._links.check(answer)
        minted = answers[-1]
        if not isinstance(minted, Ok) or not minted.affected:
            return 0
        try:
            await self._links.reserve(seat.link, minted.insert_id, seat.patience)
        except OutcomeUnknown:
            raise
        except EngineUnavailable:
            await self.end(seat)
            raise
        seat.stage, seat.token = Stage.HELD, minted.insert_id
        return seat.token

    async def confirm(self, seat: Seat, limit: Deadline) -> Grant | None:
        """Make sure of a lock that we should hold, and count its ttl anew; None if it is gone."""
        sent = self._runtime.now()
        replies = seat.link.say([sql.is_mine(seat.key)])
        patience = time_to_answer(limit, seat.patience)
        if not await seat.link.hear(replies, patience) and seat.link.open:
            raise OutcomeUnknown(f"{self._links.address}: no answer within {patience:.3g} s")
        if self.is_held(seat, replies[0]):
            return seat.grant(sent)
        await self.end(seat, limit)
        return None

    def is_held(self, seat: Seat, reply: Reply) -> bool:
        """Return whether the server says that the lock is this session's: not one that something in between has made."""
        answer = reply.answer
        return isinstance(answer, Rows) and answer.rows == [(str(seat.link.id).encode(),)]

    async def given_back(self, seat: Seat, limit: Deadline = PATIENT) -> bool | None:
        """Release on the claim's own connection; None if that cannot be told, and the session has to end."""
        ours = False
        answer = await self._asked(seat, sql.release(seat.link.id), limit)
        if isinstance(answer, Ok) and answer.affected:
            ours = True
        elif answer is not NO_REPLY:
            # Nobody has written down that we hold it, or nothing can be written now: that is no reason to keep it.
            failed = isinstance(answer, ServerError)
            answer = await self._asked(seat, sql.RELEASE_ALL, limit)
            if not isinstance(answer, Rows):
                return None
            ours = answer.rows != [(b"0",)]
            if failed and not ours:
                return None  # what failed may have given it back first: nobody can say that it was lost
        else:
            return None
        self.let_go(seat)
        return ours

    async def _asked(self, seat: Seat, statement: str, limit: Deadline) -> Any:
        """Return the answer, or NO_ANSWER."""
        (reply,) = seat.link.say([statement])
        await seat.link.hear([reply], time_to_answer(limit, seat.patience))
        return reply.answer

    def let_go(self, seat: Seat) -> None:
        """Forget a claim that has nothing on the server any more; its connection is for others."""
        if self.pop(seat.claim.id, None) is not None:
            self._links.give(seat.link)

    def drop(self, seat: Seat) -> None:
        """Forget a claim whose session has ended."""
        self.pop(seat.claim.id, None)
        self._links.drop(seat.link)

    async def end(self, seat: Seat, limit: Deadline = PATIENT) -> None:
        """End a claim together with its session."""
        await self._links.end(seat.link, seat.patience, limit)
        if self.is_current(seat):
            del self[seat.claim.id]
