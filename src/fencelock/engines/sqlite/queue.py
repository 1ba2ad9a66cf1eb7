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
from fencelock.model import Claim, Grant, QueueUpdate, Renewal, Snapshot, advance_queue

AttemptResult = tuple[int | None, int | None, float | None]
"""What an attempt returns: token, ticket, and for the first waiter the seconds until the holders expire."""

FIRST_TICKET = 1
ANY_CLAIM = "SELECT 1 FROM claim WHERE space = ? AND name = ? LIMIT 1"
# The claims of a name, oldest first.
QUEUE = """SELECT id, shared, permits, token, expires, ticket, ttl, wakeup FROM claim
           WHERE space = ? AND name = ? ORDER BY ticket"""
FIND = "SELECT ticket, token, expires FROM claim WHERE space = ? AND name = ? AND id = ?"
NEXT_TICKET = "SELECT coalesce(max(ticket), 0) + 1 FROM claim WHERE space = ? AND name = ?"
INSERT = """INSERT INTO claim (space, name, ticket, id, shared, permits, ttl, owner, value, wakeup, token, expires)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
REFRESH = "UPDATE claim SET expires = ? WHERE space = ? AND name = ? AND ticket = ?"
GRANT = "UPDATE claim SET token = ?, expires = ? WHERE space = ? AND name = ? AND ticket = ?"
DELETE = "DELETE FROM claim WHERE space = ? AND name = ? AND ticket = ?"
ABANDON = "DELETE FROM claim WHERE space = ? AND name = ? AND id = ?"
# What a holder may do only while it holds the lock. Another claim may have its ticket by now, so the id is compared.
HELD = "WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND token IS NOT NULL AND expires > ?"
RENEW = f"UPDATE claim SET expires = ? {HELD}"
DOWNGRADE = f"UPDATE claim SET shared = 1, expires = ? {HELD}"
RELEASE = f"DELETE FROM claim {HELD}"
# The token, and whether a holder has expired: the first waiter should notice that, but it may have died too.
PEEK = """SELECT token, EXISTS (SELECT 1 FROM claim WHERE space = ? AND name = ? AND token IS NOT NULL AND expires <= ?)
          FROM claim WHERE space = ? AND name = ? AND ticket = ? AND id = ? AND expires > ?"""
SNAPSHOT = """SELECT owner, token, expires, shared, permits, value FROM claim
              WHERE space = ? AND name = ? AND expires > ? ORDER BY ticket"""
NAMES = """SELECT DISTINCT name FROM claim WHERE space = ? AND substr(name, 1, ?) = ? AND expires > ? ORDER BY name"""


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

    def attempt(self, db: sqlite3.Cursor, wakeups: list[str], claim: Claim, enqueue: bool) -> AttemptResult:
        """Grant the lock or, if `enqueue`, enqueue the claim. Other waiters that may hold the lock now are granted it too."""
        if claim.id in self.abandoned:
            raise ClientClosed("this client is closed; connect again")
        now = self._now_us()
        key = (self._space, claim.name)
        if db.execute(ANY_CLAIM, key).fetchone() is None:
            minted = self._database.mint(db)
            self._insert(db, claim, FIRST_TICKET, None, minted, now)
            return minted, FIRST_TICKET, None
        ticket, token = self._refresh(db, claim, now)
        rows = self._rows(db, claim.name)
        if ticket is None:
            ttl = _ttl_us(claim)
            rows = chain(rows, [Row(claim.id, claim.shared, claim.limit, None, now + ttl, 0, ttl, None)])
        update = advance_queue(rows, now)
        granted = self._write(db, wakeups, claim.name, update, now)
        token = granted.get(claim.id, token)
        if token is None and not enqueue:
            if ticket is not None:
                db.execute(DELETE, (*key, ticket))
        elif ticket is None:
            ticket = db.execute(NEXT_TICKET, key).fetchone()[0]
            wakeup = self._wakeup_address(claim) if token is None else None
            self._insert(db, claim, ticket, wakeup, token, now)
        is_first = update.first_blocked is not None and update.first_blocked.id == claim.id
        if not is_first or update.holders_end is None:
            return token, ticket, None
        return token, ticket, (update.holders_end - now) / 1e6

    def _refresh(self, db: sqlite3.Cursor, claim: Claim, now: int) -> tuple[int | None, int | None]:
        """Restart the ttl of an earlier attempt; return its ticket and token, or None if the claim is not in the queue."""
        found = db.execute(FIND, (self._space, claim.name, claim.id)).fetchone()
        if found is None:
            return None, None
        ticket, token, expires = found
        if expires <= now:
            db.execute(DELETE, (self._space, claim.name, ticket))
            return None, None
        db.execute(REFRESH, (now + _ttl_us(claim), self._space, claim.name, ticket))
        return ticket, token

    def release(self, db: sqlite3.Cursor, wakeups: list[str], grant: Grant) -> bool:
        """Remove a holder and grant the lock to the next waiter; return whether it still held the lock."""
        now = self._now_us()
        held = db.execute(RELEASE, self._held(grant, now)).rowcount == 1
        self._advance(db, wakeups, grant.claim.name, now)
        return held

    def abandon(self, db: sqlite3.Cursor, wakeups: list[str], claim: Claim) -> None:
        """Remove the claim, whether it waits or holds the lock, and grant the lock to the next waiter."""
        db.execute(ABANDON, (self._space, claim.name, claim.id))
        self._advance(db, wakeups, claim.name, self._now_us())

    def renew(self, db: sqlite3.Cursor, grants: Sequence[Grant]) -> list[Renewal]:
        """Restart the ttl of each holder."""
        now = self._now_us()
        answers = []
        for grant in grants:
            renewed = db.execute(RENEW, (now + _ttl_us(grant.claim), *self._held(grant, now))).rowcount
            answers.append(Renewal.RENEWED if renewed else Renewal.LOST)
        return answers

    def downgrade(self, db: sqlite3.Cursor, wakeups: list[str], grant: Grant) -> bool:
        """Make an exclusive holder a shared one and admit the readers behind it; return whether it still held the lock."""
        now = self._now_us()
        if not db.execute(DOWNGRADE, (now + _ttl_us(grant.claim), *self._held(grant, now))).rowcount:
            return False
        self._advance(db, wakeups, grant.claim.name, now)
        return True

    def peek(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None, int] | None:
        """Return the row of PEEK, or None if the claim has expired."""
        now = self._now_us()
        args = (self._space, claim.name, now, self._space, claim.name, ticket, claim.id, now)
        return db.execute(PEEK, args).fetchone()  # type: ignore[no-any-return]

    def force_release(self, db: sqlite3.Cursor, wakeups: list[str], name: str) -> int:
        """Remove the holders, skip a token, and grant the lock to the next waiter; return how many held the lock."""
        now = self._now_us()
        holders = [row for row in self._rows(db, name) if row.token is not None]
        for row in holders:
            db.execute(DELETE, (self._space, name, row.ticket))
        self._database.mint(db)
        self._advance(db, wakeups, name, now)
        return sum(row.expires > now for row in holders)

    def snapshot(self, db: sqlite3.Cursor, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        now = self._now_us()
        rows = db.execute(SNAPSHOT, (self._space, name, now))
        claims = ((*row[:2], (row[2] - now) / 1e6, *row[3:]) for row in rows)
        return Snapshot.of(name, claims, wall_us())

    def names(self, db: sqlite3.Cursor, prefix: str) -> list[str]:
        """Return the names that have a holder or a waiter."""
        rows = db.execute(NAMES, (self._space, len(prefix), prefix, self._now_us()))
        return [name for (name,) in rows]

    # ------------------------------------------------------------------ within a step

    def _now_us(self) -> int:
        return int(self._database.now() * 1e6)

    def _rows(self, db: sqlite3.Cursor, name: str) -> Iterator[Row]:
        return map(Row._make, db.execute(QUEUE, (self._space, name)))

    def _held(self, grant: Grant, now: int) -> tuple[str, str, int, str, int]:
        """Return the arguments of HELD."""
        return self._space, grant.claim.name, grant.engine_state, grant.claim.id, now

    def _advance(self, db: sqlite3.Cursor, wakeups: list[str], name: str, now: int) -> None:
        """Remove expired claims and grant the lock to the waiters that may hold it now."""
        self._write(db, wakeups, name, advance_queue(self._rows(db, name), now), now)

    def _write(
        self, db: sqlite3.Cursor, wakeups: list[str], name: str, update: QueueUpdate[Row], now: int
    ) -> dict[str, int]:
        """Write the changes of `advance_queue`; return the tokens of the granted claims, by id."""
        for row in update.expired:
            db.execute(DELETE, (self._space, name, row.ticket))
        granted = {}
        for row in update.admitted:
            token = granted[row.id] = self._database.mint(db)
            db.execute(GRANT, (token, now + row.ttl, self._space, name, row.ticket))
            if row.wakeup:
                wakeups.append(row.wakeup)
        return granted

    def _insert(
        self, db: sqlite3.Cursor, claim: Claim, ticket: int, wakeup: str | None, token: int | None, now: int
    ) -> None:
        ttl = _ttl_us(claim)
        args = (
            self._space, claim.name, ticket, claim.id, claim.shared, claim.limit, ttl, claim.owner, claim.value,
            wakeup, token, now + ttl,
        )  # fmt: skip
        db.execute(INSERT, args)


def _ttl_us(claim: Claim) -> int:
    """Return the ttl in µs, rounded up: the database must not drop a claim before its client does."""
    return int(claim.ttl * 1e6) + 1
