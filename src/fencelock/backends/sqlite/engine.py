"""The engine over the database: first come, first served; the lock is handed over, and the next holder's bell rung."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar, TypeVarTuple

from fencelock.backends.sqlite.database import Database, NeedsReserve, Occupied
from fencelock.core.clock import Deadline, wall_us
from fencelock.core.doorbell import Ringer
from fencelock.core.world import Doorbell, World
from fencelock.errors import ClientClosed, EngineUnavailable, LimitMismatch
from fencelock.model import (
    Busy,
    Claim,
    Grant,
    Holder,
    Renewal,
    Snapshot,
    Strength,
    Traits,
    Waiter,
    contradiction,
    settle,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TRAITS = Traits(engine="sqlite", strength=Strength.DURABLE, fair=True, push=True, loss_pushed=False)

OCCUPIED_SLICE = 0.1
"""How long a thread waits for the write lock before it looks up: the longest that a cancellation has to wait."""
OCCUPIED_PATIENCE = 10.0
POLL_WITH_BELL = 1.0
POLL_FIRST, POLL_LAST = 0.002, 0.1
ABANDONED_KEPT = 10_000
"""How many claims are remembered as given up: as many as may be waiting when a client is closed."""

# The claims of a name, oldest first.
QUEUE = """SELECT id, shared, permits, token, expires, ticket, ttl, bell FROM claim
           WHERE space = ? AND name = ? ORDER BY ticket"""
ANYBODY = "SELECT 1 FROM claim WHERE space = ? AND name = ? LIMIT 1"
# The next token: above every earlier one and, as long as the clock does not go back, above those of lost databases too.
# No row: the reserve is used up.
MINT = """UPDATE counter SET token = max(token + 1, ?) WHERE boot = ? AND max(token + 1, ?) <= reserved
          RETURNING token"""
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


class SqliteBackend:
    """`fencelock.core.backend.Backend` on a SQLite database."""

    traits = TRAITS

    def __init__(self, world: World, database: Database, namespace: str) -> None:
        self._world = world
        self._now = world.now
        self._database = database
        self._space = namespace
        self._bells: dict[str, Doorbell | None] = {}
        self._ringer = Ringer()
        self._abandoned: dict[str, None] = {}

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, ticket: int | None = None) -> Grant | Busy:
        """Take the lock or a place in line, in one transaction."""
        sent = self._world.now()
        rings: list[str] = []
        first = ticket is None
        try:
            try:
                token, ticket, retry_in = self._database.write(0, self._take, rings, claim, queue, ticket)
            except Occupied:
                token, ticket, retry_in = await self._later(self._take, claim, queue, ticket)
        except BaseException:
            if first:
                self._silence(claim)  # it has no place in line to be called from
            raise
        if rings:
            self._ring(rings)
        if token is None:
            return Busy(claim, sent, retry_in, ticket)
        if self._bells:
            self._silence(claim)
        return Grant(claim, token, sent, ticket)

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Sleep until the bell rings; look now and then, as rings may get lost."""
        claim, ticket = busy.claim, busy.handle
        bell = self._bells.get(claim.id)
        if busy.retry_in is not None:
            timeout = min(timeout, busy.retry_in)
        until = Deadline(self._world.now, timeout)
        poll = POLL_FIRST
        while not until.passed:
            if bell is not None:
                await bell.wait(until.at_most(POLL_WITH_BELL))
            else:
                await self._world.sleep(until.at_most(poll * (0.5 + self._world.random() / 2)))
                poll = min(poll * 2, POLL_LAST)
            found = await self._read(self._peek, claim, ticket)
            if found is None or found[1]:
                break
            if found[0] is not None:
                self._silence(claim)
                return Grant(claim, found[0], busy.since, ticket)
        return await self.attempt(claim, queue=True, ticket=ticket)

    async def abandon(self, claim: Claim) -> None:
        """Leave the queue, or give back the lock."""
        # close() abandons what other threads and tasks still ask for: they must not line up again behind its back.
        self._abandoned[claim.id] = None
        if len(self._abandoned) > ABANDONED_KEPT:
            self._abandoned.pop(next(iter(self._abandoned)), None)
        self._silence(claim)
        await self._write(self._leave, claim, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew all in one transaction."""
        return await self._write(self._renew, grants)

    async def release(self, grant: Grant) -> bool:
        """Give back the lock and hand it over, in one transaction."""
        rings: list[str] = []
        try:
            released = self._database.write(0, self._leave, rings, grant.claim, grant.handle)
        except Occupied:
            return await self._later(self._leave, grant.claim, grant.handle)
        if rings:
            self._ring(rings)
        return released

    async def inspect(self, name: str) -> Snapshot:
        """Read the queue."""
        return await self._read(self._snapshot, name)

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what was in use at the time of the call."""
        for name in await self._read(self._names, prefix):
            yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders, skip a token, hand over."""
        return await self._write(self._force, name)

    async def close(self) -> None:
        """Close the connection; the last one out tidies the log, which may take a sync."""
        await self._world.block(self._database.close)
        self._ringer.close()
        self._close_bells()

    def before_fork(self) -> None:
        """Have no connection open."""
        self._database.before_fork()

    def after_fork(self, *, child: bool) -> None:
        """Open anew when needed."""
        self._database.after_fork(child=child)
        if child:
            self._close_bells()
            self._ringer.close()
            self._ringer = Ringer()

    # ------------------------------------------------------------------ each a step of one transaction

    def _take(
        self, db: sqlite3.Cursor, rings: list[str], claim: Claim, queue: bool, ticket: int | None
    ) -> tuple[int | None, int | None, float | None]:
        if claim.id in self._abandoned:
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
        settled = settle(rows if ticket is not None else chain(rows, (mine,)), now)
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

    def _leave(self, db: sqlite3.Cursor, rings: list[str], claim: Claim, ticket: int | None) -> bool:
        now = int(self._now() * 1e6)
        if ticket is None:
            left = db.execute(LEAVE_BY_ID, (self._space, claim.name, claim.id)).fetchone()
        else:
            left = db.execute(LEAVE, (self._space, claim.name, ticket, claim.id)).fetchone()
        if db.execute(ANYBODY, (self._space, claim.name)).fetchone() is not None:
            self._settle(db, rings, claim.name, now)
        return left is not None and left[0] is not None and left[1] > now

    def _renew(self, db: sqlite3.Cursor, rings: list[str], grants: Sequence[Grant]) -> list[Renewal]:  # noqa: ARG002
        now = int(self._now() * 1e6)
        answers = []
        for grant in grants:
            claim = grant.claim
            args = (now + _us(claim.ttl), self._space, claim.name, grant.handle, claim.id, now)
            answers.append(Renewal.RENEWED if db.execute(RENEW, args).rowcount else Renewal.LOST)
        return answers

    def _look(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None] | None:
        """Return the claim's token, None in its place while it waits, or None if the claim is no longer there."""
        args = (self._space, claim.name, ticket, claim.id, int(self._now() * 1e6))
        return db.execute(LOOK, args).fetchone()  # type: ignore[no-any-return]

    def _peek(self, db: sqlite3.Cursor, claim: Claim, ticket: int) -> tuple[int | None, int] | None:
        now = int(self._now() * 1e6)
        args = (self._space, claim.name, now, self._space, claim.name, ticket, claim.id, now)
        return db.execute(PEEK, args).fetchone()  # type: ignore[no-any-return]

    def _force(self, db: sqlite3.Cursor, rings: list[str], name: str) -> int:
        now = int(self._now() * 1e6)
        holders = [row for row in self._rows(db, name) if row.token is not None]
        for row in holders:
            db.execute(BURY, (self._space, name, row.ticket))
        self._mint(db)
        self._settle(db, rings, name, now)
        return sum(row.expires > now for row in holders)

    def _settle(self, db: sqlite3.Cursor, rings: list[str], name: str, now: int) -> None:
        settled = settle(self._rows(db, name), now)
        for row in settled.dead:
            db.execute(BURY, (self._space, name, row.ticket))
        for row in settled.admitted:
            self._hand_over(db, rings, name, row, self._mint(db), now)

    def _hand_over(self, db: sqlite3.Cursor, rings: list[str], name: str, row: Row, token: int, now: int) -> None:
        db.execute(HAND_OVER, (token, now + row.ttl, self._space, name, row.ticket))
        if row.bell:
            rings.append(row.bell)

    def _mint(self, db: sqlite3.Cursor) -> int:
        wall = wall_us()
        row = db.execute(MINT, (wall, self._database.boot, wall)).fetchone()
        if row is None:
            raise NeedsReserve
        return row[0]  # type: ignore[no-any-return]

    def _join(self, db: sqlite3.Cursor, claim: Claim, bell: str | None, token: int | None, expires: int) -> int:
        args = (
            self._space, claim.name, self._space, claim.name, claim.id, claim.shared, claim.limit,
            int(claim.ttl * 1e6) + 1, claim.owner, bell, token, expires,
        )  # fmt: skip
        return db.execute(JOIN, args).fetchone()[0]  # type: ignore[no-any-return]

    def _rows(self, db: sqlite3.Cursor, name: str) -> Iterator[Row]:
        return map(Row._make, db.execute(QUEUE, (self._space, name)))

    def _snapshot(self, db: sqlite3.Cursor, name: str) -> Snapshot:
        now = int(self._now() * 1e6)
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
                holders.append(Holder(owner, token, left, bool(shared), limit))
        return Snapshot(name, tuple(holders), tuple(waiters))

    def _names(self, db: sqlite3.Cursor, prefix: str) -> list[str]:
        rows = db.execute(
            "SELECT DISTINCT name FROM claim WHERE space = ? AND substr(name, 1, ?) = ? AND expires > ? ORDER BY name",
            (self._space, len(prefix), prefix, int(self._now() * 1e6)),
        )
        return [name for (name,) in rows]

    # ------------------------------------------------------------------ bells, and running a step

    def _bell(self, claim: Claim) -> str | None:
        if claim.id not in self._bells:
            try:
                self._bells[claim.id] = self._world.doorbell()
            except OSError:  # no descriptor left: look now and then instead
                self._bells[claim.id] = None
        bell = self._bells[claim.id]
        return None if bell is None else bell.address

    def _silence(self, claim: Claim) -> None:
        bell = self._bells.pop(claim.id, None)
        if bell is not None:
            bell.close()

    def _close_bells(self) -> None:
        for id in list(self._bells):
            if (bell := self._bells.pop(id, None)) is not None:
                bell.close()

    async def _later(self, step: Callable[[sqlite3.Cursor, list[str], *Ts], T], *args: *Ts) -> T:
        """Run a step where it may wait."""
        rings: list[str] = []
        try:
            return await self._insist(self._database.write, step, rings, *args)
        finally:
            self._ring(rings)  # also if we are cancelled: by then the step is done

    def _ring(self, rings: list[str]) -> None:
        """Ring whom a step handed a lock. One ring too many, after a step that was rolled back, does no harm."""
        for address in rings:
            self._ringer.ring(address)

    async def _write(self, step: Callable[[sqlite3.Cursor, list[str], *Ts], T], *args: *Ts) -> T:
        """Run a step right here, which is shorter than a change of threads, or later if somebody is in the way."""
        rings: list[str] = []
        try:
            result = self._database.write(0, step, rings, *args)
        except Occupied:
            return await self._later(step, *args)
        self._ring(rings)
        return result

    async def _read(self, step: Callable[[sqlite3.Cursor, *Ts], T], *args: *Ts) -> T:
        try:
            return self._database.read(0, step, *args)
        except Occupied:
            return await self._insist(self._database.read, step, *args)

    async def _insist(self, action: Callable[[float, *Ts], T], *args: *Ts) -> T:
        until = Deadline(self._world.now, OCCUPIED_PATIENCE)
        while True:
            try:
                return await self._world.block(action, OCCUPIED_SLICE, *args)
            except Occupied as error:
                if until.passed:
                    raise EngineUnavailable(
                        f"{self._database.path}: another process has kept it locked for {OCCUPIED_PATIENCE:g} s; is one "
                        "stopped in the middle of a transaction?"
                    ) from error


def _us(seconds: float) -> int:
    return int(seconds * 1e6) + 1


def _mismatch(claim: Claim, permits: int | None) -> LimitMismatch:
    other = Claim(claim.name, claim.ttl, shared=True, limit=permits)
    return LimitMismatch(f"{claim.name!r}: {contradiction([other], claim)}", claim.name)
