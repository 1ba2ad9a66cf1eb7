"""The queue of a name in the database: each method is a step of one transaction, and knows nothing of who runs it.

Statements are in one place, at the top. `rings` collects the bells of those whom a step handed the lock; they are rung
after the commit.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from fencelock.core.clock import wall_us
from fencelock.engines.sqlite.database import Database
from fencelock.errors import ClientClosed, LimitMismatch
from fencelock.model import Claim, Grant, Holder, Renewal, Snapshot, Waiter, advance_queue, held_for, limit_conflict

Taken = tuple[int | None, int | None, float | None]
"""What an attempt got: a token, a ticket, and for the first in line the seconds until the holders run out."""

# The claims of a name, oldest first.
QUEUE = """SELECT id, shared, permits, token, expires, ticket, ttl, bell FROM claim
           WHERE space = ? AND name = ? ORDER BY ticket"""
ANYBODY = "SELECT 1 FROM claim WHERE space = ? AND name = ? LIMIT 1"
JOIN = """INSERT INTO claim (space, name, ticket, id, shared, permits, ttl, owner, bell, token, expires)
          VALUES (?, ?, (SELECT coalesce(max(ticket), 0) + 1 FROM claim WHERE space = ? AND name = ?),
                  ?, ?, ?, ?, ?, ?, ?, ?) RETURNING ticket"""
REFRESH = "UPDATE claim SET expires = ? WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"
RENEW = REFRESH + " AND token IS NOT NULL"
FIND = "SELECT ticket FROM claim WHERE space = ? AND name = ? AND id = ?"
HAND_OVER = "UPDATE claim SET token = ?, expires = ? WHERE space = ? AND name = ? AND ticket = ?"
LOOK = "SELECT token FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"
# The same, and whether a holder has run out: who should have noticed, the first in line, may have died as well.
PEEK = """SELECT token, EXISTS (SELECT 1 FROM claim WHERE space = ? AND name = ? AND token IS NOT NULL AND expires <= ?)
          FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"""
BURY = "DELETE FROM claim WHERE space = ? AND name = ? AND ticket = ?"
LEAVE = "DELETE FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? RETURNING token, expires"
LEAVE_BY_ID = "DELETE FROM claim WHERE space = ? AND name = ? AND id = ? RETURNING token, expires"
OTHER_LIMIT = """SELECT permits FROM claim WHERE space = ? AND name = ? AND shared AND permits IS NOT ? AND expires > ?
                 LIMIT 1"""


class Row(NamedTuple):
    """A line of QUEUE."""

    id: str
    shared: bool
    limit: int | None
    token: int | None
    expires: int
    ticket: int
    ttl: int
    bell: str | None


class Queue:
    """The claims of one namespace, oldest first."""

    def __init__(self, database: Database, space: str, bell: Callable[[Claim], str | None]) -> None:
        self._mint = database.mint
        self._space = space
        self._now = database.now
        self._bell = bell
        self.abandoned: dict[str, None] = {}
        """Claims that must not line up again, as an abandon may overtake an attempt of another thread."""

    def take(self, db: sqlite3.Cursor, rings: list[str], claim: Claim, queue: bool, ticket: int | None) -> Taken:
        """Take the lock or, if `queue`, a place in line; mint the token; hand over what others should have got."""
        if claim.id in self.abandoned:
            raise ClientClosed("this client is closed; connect again")
        now = int(self._now() * 1e6)
        ttl = int(claim.ttl * 1e6) + 1
        place = (self._space, claim.name)
        if db.execute(ANYBODY, place).fetchone() is None:
            minted = self._mint(db)
            return minted, self._join(db, claim, None, minted, now + ttl), None
        ticket = self._refresh(db, claim, ticket, now, now + ttl)
        mine = Row(claim.id, claim.shared, claim.limit, None, now + ttl, 0, ttl, None)
        rows = self._rows(db, claim.name)
        settled = advance_queue(rows if ticket is not None else chain(rows, (mine,)), now)
        del rows
        for row in settled.dead:
            db.execute(BURY, (*place, row.ticket))
        token = None
        for row in settled.admitted:
            minted = self._mint(db)
            if row is mine:
                token = minted
                ticket = self._join(db, claim, None, token, now + ttl)
            else:
                self._hand_over(db, rings, claim.name, row, minted, now)
        if ticket is None:
            first = settled.first is mine
            if queue:
                ticket = self._join(db, claim, self._bell(claim), None, now + ttl)
        else:
            first = settled.first is not None and settled.first.id == claim.id
            if token is None:
                found = self._look(db, claim, ticket)
                token = found[0] if found else None
                if token is None and not queue:
                    db.execute(BURY, (*place, ticket))
        if not first or settled.holders_end is None:
            return token, ticket, None
        return token, ticket, (settled.holders_end - now) / 1e6

    def _refresh(self, db: sqlite3.Cursor, claim: Claim, ticket: int | None, now: int, expires: int) -> int | None:
        """Count the ttl of an earlier attempt anew; return its ticket, or None if there is none."""
        if ticket is None:
            found = db.execute(FIND, (self._space, claim.name, claim.id)).fetchone()
            ticket = None if found is None else found[0]
        if ticket is not None:
            if db.execute(REFRESH, (expires, self._space, claim.name, ticket, claim.id, now)).rowcount:
                return ticket
            db.execute(LEAVE, (self._space, claim.name, ticket, claim.id)).fetchall()  # it ran out: line up anew
        if claim.shared:
            other = db.execute(OTHER_LIMIT, (self._space, claim.name, claim.limit, now)).fetchone()
            if other is not None:
                raise _mismatch(claim, other[0])
        return None

    def leave(self, db: sqlite3.Cursor, rings: list[str], claim: Claim, ticket: int | None) -> bool:
        now = int(self._now() * 1e6)
        if ticket is None:
            left = db.execute(LEAVE_BY_ID, (self._space, claim.name, claim.id)).fetchone()
        else:
            left = db.execute(LEAVE, (self._space, claim.name, ticket, claim.id)).fetchone()
        if db.execute(ANYBODY, (self._space, claim.name)).fetchone() is not None:
            self._settle(db, rings, claim.name, now)
        return left is not None and left[0] is not None and left[1] > now

    def renew(self, db: sqlite3.Cursor, rings: list[str], grants: Sequence[Grant]) -> list[Renewal]:  # noqa: ARG002
        now = int(self._now() * 1e6)
        answers = []
        for grant in grants:
            claim = grant.claim
            args = (now + int(claim.ttl * 1e6) + 1, self._space, claim.name, grant.handle, claim.id, now)
            answers.append(Renewal.RENEWED if db.execute(RENEW, args).rowcount else Renewal.LOST)
        return answers

    def _look(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None] | None:
        """Return the claim's token, None in its place while it waits, or None if the claim is no longer there."""
        args = (self._space, claim.name, ticket, claim.id, int(self._now() * 1e6))
        return db.execute(LOOK, args).fetchone()  # type: ignore[no-any-return]

    def peek(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None, int] | None:
        now = int(self._now() * 1e6)
        args = (self._space, claim.name, now, self._space, claim.name, ticket, claim.id, now)
        return db.execute(PEEK, args).fetchone()  # type: ignore[no-any-return]

    def force(self, db: sqlite3.Cursor, rings: list[str], name: str) -> int:
        now = int(self._now() * 1e6)
        holders = [row for row in self._rows(db, name) if row.token is not None]
        for row in holders:
            db.execute(BURY, (self._space, name, row.ticket))
        self._mint(db)
        self._settle(db, rings, name, now)
        return sum(row.expires > now for row in holders)

    def _settle(self, db: sqlite3.Cursor, rings: list[str], name: str, now: int) -> None:
        settled = advance_queue(self._rows(db, name), now)
        for row in settled.dead:
            db.execute(BURY, (self._space, name, row.ticket))
        for row in settled.admitted:
            self._hand_over(db, rings, name, row, self._mint(db), now)

    def _hand_over(self, db: sqlite3.Cursor, rings: list[str], name: str, row: Row, token: int, now: int) -> None:
        db.execute(HAND_OVER, (token, now + row.ttl, self._space, name, row.ticket))
        if row.bell:
            rings.append(row.bell)

    def _join(self, db: sqlite3.Cursor, claim: Claim, bell: str | None, token: int | None, expires: int) -> int:
        args = (
            self._space, claim.name, self._space, claim.name, claim.id, claim.shared, claim.limit,
            int(claim.ttl * 1e6) + 1, claim.owner, bell, token, expires,
        )  # fmt: skip
        return db.execute(JOIN, args).fetchone()[0]  # type: ignore[no-any-return]

    def _rows(self, db: sqlite3.Cursor, name: str) -> Iterator[Row]:
        return map(Row._make, db.execute(QUEUE, (self._space, name)))

    def snapshot(self, db: sqlite3.Cursor, name: str) -> Snapshot:
        now, wall = int(self._now() * 1e6), wall_us()
        holders: list[Holder] = []
        waiters: list[Waiter] = []
        for owner, token, expires, shared, limit in db.execute(
            "SELECT owner, token, expires, shared, permits FROM claim WHERE space = ? AND name = ? AND expires > ? "
            "ORDER BY ticket",
            (self._space, name, now),
        ):
            left = (expires - now) / 1e6
            if token is None:
                waiters.append(Waiter(owner, left, bool(shared), limit))
            else:
                holders.append(Holder(owner, token, left, bool(shared), limit, held_for(token, wall)))
        return Snapshot(name, tuple(holders), tuple(waiters))

    def names(self, db: sqlite3.Cursor, prefix: str) -> list[str]:
        rows = db.execute(
            "SELECT DISTINCT name FROM claim WHERE space = ? AND substr(name, 1, ?) = ? AND expires > ? ORDER BY name",
            (self._space, len(prefix), prefix, int(self._now() * 1e6)),
        )
        return [name for (name,) in rows]


def _mismatch(claim: Claim, permits: int | None) -> LimitMismatch:
    other = Claim(claim.name, claim.ttl, shared=True, limit=permits)
    return LimitMismatch(f"{claim.name!r}: {limit_conflict([other], claim)}", claim.name)
