"""The queue of a name in the database. Each method is one step that the caller runs in a transaction.

All statements are at the top. `wakeups` collects the addresses of the claims that a step granted the lock; the caller
wakes them after the commit. The column `wakeup` holds that address.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from fencelock.core.clock import wall_us
from fencelock.engines.sqlite.database import Database
from fencelock.errors import ClientClosed
from fencelock.model import Claim, Grant, Renewal, Snapshot, advance_queue

AttemptResult = tuple[int | None, int | None, float | None]
"""What an attempt returns: token, ticket, and for the first waiter the seconds until the holders expire."""

# The claims of a name, oldest first.
QUEUE = """SELECT id, shared, permits, token, expires, ticket, ttl, wakeup FROM claim
           WHERE space = ? AND name = ? ORDER BY ticket"""
ANY_CLAIM = "SELECT 1 FROM claim WHERE space = ? AND name = ? LIMIT 1"
INSERT = """INSERT INTO claim (space, name, ticket, id, shared, permits, ttl, owner, value, wakeup, token, expires)
          VALUES (?, ?, (SELECT coalesce(max(ticket), 0) + 1 FROM claim WHERE space = ? AND name = ?),
                  ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING ticket"""
REFRESH = "UPDATE claim SET expires = ? WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"
RENEW = REFRESH + " AND token IS NOT NULL"
FIND = "SELECT ticket FROM claim WHERE space = ? AND name = ? AND id = ?"
GRANT = "UPDATE claim SET token = ?, expires = ? WHERE space = ? AND name = ? AND ticket = ?"
# The token, and whether a holder has expired: the first waiter should notice that, but it may have died too.
PEEK = """SELECT token, EXISTS (SELECT 1 FROM claim WHERE space = ? AND name = ? AND token IS NOT NULL AND expires <= ?)
          FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"""
SNAPSHOT = """SELECT owner, token, expires, shared, permits, value FROM claim
              WHERE space = ? AND name = ? AND expires > ? ORDER BY ticket"""
DELETE = "DELETE FROM claim WHERE space = ? AND name = ? AND ticket = ?"
REMOVE = "DELETE FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? RETURNING token, expires"
REMOVE_BY_ID = "DELETE FROM claim WHERE space = ? AND name = ? AND id = ? RETURNING token, expires"
DOWNGRADE = """UPDATE claim SET shared = 1, expires = ?
               WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ? AND token IS NOT NULL"""


class Row(NamedTuple):
    """A row of QUEUE."""

    id: str
    shared: bool
    limit: int | None
    token: int | None
    expires: int
    ticket: int
    ttl: int
    wakeup: str | None


class Queue:
    """The claims of one namespace, oldest first."""

    def __init__(self, database: Database, space: str, wakeup_address: Callable[[Claim], str | None]) -> None:
        self._space = space
        self._database = database
        self._wakeup_address = wakeup_address
        self.abandoned: dict[str, None] = {}
        """Claims that must not be enqueued again, as an abandon may overtake an attempt of another thread."""

    def _now_us(self) -> int:
        return int(self._database.now() * 1e6)

    def attempt(
        self, db: sqlite3.Cursor, wakeups: list[str], claim: Claim, enqueue: bool, ticket: int | None
    ) -> AttemptResult:
        """Grant the lock or, if `enqueue`, enqueue the claim. Other waiters that may hold the lock now are granted it too."""
        if claim.id in self.abandoned:
            raise ClientClosed("this client is closed; connect again")
        now = self._now_us()
        ttl = int(claim.ttl * 1e6) + 1
        key = (self._space, claim.name)
        if db.execute(ANY_CLAIM, key).fetchone() is None:
            minted = self._database.mint(db)
            return minted, self._insert(db, claim, None, minted, now + ttl), None
        ticket = self._refresh(db, claim, ticket, now, now + ttl)
        mine = Row(claim.id, claim.shared, claim.limit, None, now + ttl, 0, ttl, None)
        rows = self._rows(db, claim.name)
        update = advance_queue(rows if ticket is not None else chain(rows, (mine,)), now)
        del rows
        for row in update.dead:
            db.execute(DELETE, (*key, row.ticket))
        token = None
        for row in update.admitted:
            minted = self._database.mint(db)
            if row is mine:
                token = minted
                ticket = self._insert(db, claim, None, token, now + ttl)
            else:
                self._grant(db, wakeups, claim.name, row, minted, now)
        if ticket is None:
            first = update.first is mine
            if enqueue:
                ticket = self._insert(db, claim, self._wakeup_address(claim), None, now + ttl)
        else:
            first = update.first is not None and update.first.id == claim.id
            if token is None:
                found = self.peek(db, claim, ticket)
                token = found[0] if found else None
                if token is None and not enqueue:
                    db.execute(DELETE, (*key, ticket))
        if not first or update.holders_end is None:
            return token, ticket, None
        return token, ticket, (update.holders_end - now) / 1e6

    def _refresh(self, db: sqlite3.Cursor, claim: Claim, ticket: int | None, now: int, expires: int) -> int | None:
        """Restart the ttl of an earlier attempt; return its ticket, or None if the claim is not in the queue."""
        if ticket is None:
            found = db.execute(FIND, (self._space, claim.name, claim.id)).fetchone()
            ticket = None if found is None else found[0]
        if ticket is not None:
            if db.execute(REFRESH, (expires, self._space, claim.name, ticket, claim.id, now)).rowcount:
                return ticket
            # It has expired: enqueue it again. By now another claim may have its ticket.
            db.execute(REMOVE, (self._space, claim.name, ticket, claim.id)).fetchall()
        return None

    def remove(self, db: sqlite3.Cursor, wakeups: list[str], claim: Claim, ticket: int | None) -> bool:
        """Remove the claim and grant the lock to the next waiter; return whether the claim held the lock."""
        now = self._now_us()
        if ticket is None:
            removed = db.execute(REMOVE_BY_ID, (self._space, claim.name, claim.id)).fetchone()
        else:
            removed = db.execute(REMOVE, (self._space, claim.name, ticket, claim.id)).fetchone()
        if db.execute(ANY_CLAIM, (self._space, claim.name)).fetchone() is not None:
            self._advance(db, wakeups, claim.name, now)
        return removed is not None and removed[0] is not None and removed[1] > now

    def renew(self, db: sqlite3.Cursor, wakeups: list[str], grants: Sequence[Grant]) -> list[Renewal]:  # noqa: ARG002
        now = self._now_us()
        return [
            Renewal.RENEWED if db.execute(RENEW, self._renewal(grant, now)).rowcount else Renewal.LOST
            for grant in grants
        ]

    def _renewal(self, grant: Grant, now: int) -> tuple[int, str, str, int, str, int]:
        """Return the arguments of RENEW and DOWNGRADE."""
        claim = grant.claim
        return now + int(claim.ttl * 1e6) + 1, self._space, claim.name, grant.engine_state, claim.id, now

    def downgrade(self, db: sqlite3.Cursor, wakeups: list[str], grant: Grant) -> bool:
        """Make an exclusive holder a shared one and admit the readers behind it; return whether it still held the lock."""
        now = self._now_us()
        if not db.execute(DOWNGRADE, self._renewal(grant, now)).rowcount:
            return False
        self._advance(db, wakeups, grant.claim.name, now)
        return True

    def peek(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None, int] | None:
        now = self._now_us()
        args = (self._space, claim.name, now, self._space, claim.name, ticket, claim.id, now)
        return db.execute(PEEK, args).fetchone()  # type: ignore[no-any-return]

    def force_release(self, db: sqlite3.Cursor, wakeups: list[str], name: str) -> int:
        now = self._now_us()
        holders = [row for row in self._rows(db, name) if row.token is not None]
        for row in holders:
            db.execute(DELETE, (self._space, name, row.ticket))
        self._database.mint(db)
        self._advance(db, wakeups, name, now)
        return sum(row.expires > now for row in holders)

    def _advance(self, db: sqlite3.Cursor, wakeups: list[str], name: str, now: int) -> None:
        update = advance_queue(self._rows(db, name), now)
        for row in update.dead:
            db.execute(DELETE, (self._space, name, row.ticket))
        for row in update.admitted:
            self._grant(db, wakeups, name, row, self._database.mint(db), now)

    def _grant(self, db: sqlite3.Cursor, wakeups: list[str], name: str, row: Row, token: int, now: int) -> None:
        db.execute(GRANT, (token, now + row.ttl, self._space, name, row.ticket))
        if row.wakeup:
            wakeups.append(row.wakeup)

    def _insert(self, db: sqlite3.Cursor, claim: Claim, wakeup: str | None, token: int | None, expires: int) -> int:
        args = (
            self._space, claim.name, self._space, claim.name, claim.id, claim.shared, claim.limit,
            int(claim.ttl * 1e6) + 1, claim.owner, claim.value, wakeup, token, expires,
        )  # fmt: skip
        return db.execute(INSERT, args).fetchone()[0]  # type: ignore[no-any-return]

    def _rows(self, db: sqlite3.Cursor, name: str) -> Iterator[Row]:
        return map(Row._make, db.execute(QUEUE, (self._space, name)))

    def snapshot(self, db: sqlite3.Cursor, name: str) -> Snapshot:
        now = self._now_us()
        rows = db.execute(SNAPSHOT, (self._space, name, now))
        claims = ((*row[:2], (row[2] - now) / 1e6, *row[3:]) for row in rows)
        return Snapshot.of(name, claims, wall_us())

    def names(self, db: sqlite3.Cursor, prefix: str) -> list[str]:
        rows = db.execute(
            "SELECT DISTINCT name FROM claim WHERE space = ? AND substr(name, 1, ?) = ? AND expires > ? ORDER BY name",
            (self._space, len(prefix), prefix, self._now_us()),
        )
        return [name for (name,) in rows]
