"""Idempotency keys in the caller's own transaction: claim, business write and result are committed together, or not at all.

Who comes second waits for the first one's transaction, or is told. A crash needs no care: the claim dies with its
transaction.
"""

from __future__ import annotations

import math
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

from fencelock.errors import FencelockError, KeyInProgress
from fencelock.lockfree.colour import world_of
from fencelock.lockfree.schema import explain
from fencelock.model import new_id
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, Link, codes

FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5
FOR_EVER = 31_536_000
"""Seconds: MariaDB has no number that stands for no end."""

LITE_LONGEST = 2**31 - 1
"""Milliseconds: SQLite takes a larger number for none."""

PG_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS bigint)"
LITE_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
NOW = {POSTGRESQL: PG_NOW, MYSQL: "UNIX_TIMESTAMP()", SQLITE: LITE_NOW}

_OVER = """ON CONFLICT (name) DO UPDATE
SET claim = excluded.claim, fingerprint = excluded.fingerprint, result = NULL, ends = excluded.ends
WHERE fencelock_idempotency.ends <= {now}"""

# What only the transaction of the claim can give again, so that a commit inside the block is noticed. PostgreSQL's number
# costs no statement of its own; elsewhere it is a savepoint, which goes when its transaction does.
PG_CLAIM_ID = "CAST(:claim AS text) || ':' || txid_current()"
SAVEPOINT = "SAVEPOINT fencelock_{claim}"
RELEASE = "RELEASE SAVEPOINT fencelock_{claim}"
MY_NO_SAVEPOINT = "1305"

# The turn is a lock of the transaction that comes before the row's: it can be tried without an error, which would end the
# transaction, and only one at a time waits for the row itself.
PG_CLAIM = f"""WITH turn AS MATERIALIZED (SELECT {{turn}} AS mine)
INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
SELECT CAST(:name AS text), {PG_CLAIM_ID}, CAST(:payload AS text), {PG_NOW} + CAST(:ttl AS bigint) FROM turn {{where}}
{_OVER.format(now=PG_NOW)}"""
PG_WAIT = PG_CLAIM.format(turn="pg_advisory_xact_lock(CAST(:turn AS bigint))", where="")
PG_TRY = PG_CLAIM.format(turn="pg_try_advisory_xact_lock(CAST(:turn AS bigint))", where="WHERE mine")

LITE_CLAIM = f"""INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (:name, :claim, :payload, {LITE_NOW} + :ttl) {_OVER.format(now=LITE_NOW)}"""

# IGNORE, as its count is the same for all connections: that of ON DUPLICATE KEY depends on a flag that drivers set or not.
MY_CLAIM = """INSERT IGNORE INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (:name, :claim, :payload, UNIX_TIMESTAMP() + :ttl)"""
MY_OVER = """UPDATE fencelock_idempotency
SET claim = :claim, fingerprint = :payload, result = NULL, ends = UNIX_TIMESTAMP() + :ttl
WHERE name = :name AND ends <= UNIX_TIMESTAMP()"""

# Past the block the first one has let its turn go, but until its commit it keeps the row.
MY_BOUND = "/*M!100302 SET STATEMENT innodb_lock_wait_timeout = :bound FOR */ "
MY_TOO_LONG = "1205"

READ = "SELECT fingerprint, result FROM fencelock_idempotency WHERE name = :name"
PG_CURRENT = f" AND ends > {PG_NOW}"  # who tries may find one that has run out and is being run anew
WITHDRAW = "DELETE FROM fencelock_idempotency WHERE name = :name AND claim = {mine}"
FINISH = "UPDATE fencelock_idempotency SET result = :result, ends = {now} + :ttl WHERE name = :name AND claim = {mine}"
COLLECT = {
    POSTGRESQL: """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT :limit FOR UPDATE SKIP LOCKED)""",
    MYSQL: "DELETE FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT :limit",
    SQLITE: """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT :limit)""",
}


class Done(NamedTuple):
    """What an earlier run left: the fingerprint of its payload, and its result as JSON."""

    fingerprint: str
    result: str


class SqlStore:
    """Keeps one key, in the transaction of one connection."""

    def __init__(self, on: Link, key: str) -> None:
        self._on = on
        self.awaited = on.awaited
        self._key = key
        self._args: dict[str, Any] = {"name": key.encode() if on.dialect == MYSQL else key, "claim": new_id()}
        self._mine = PG_CLAIM_ID if on.dialect == POSTGRESQL else ":claim"
        self._claimed = False
        self._turn = ""

    async def claim(self, fingerprint: str, ttl: float, patience: float | None) -> Done | None:
        """Return what an earlier run left, or None: it is for us to run. Raise KeyInProgress."""
        if await self._on.commits_each():
            raise FencelockError(
                f"the idempotency key {self._key!r} needs a transaction, and this connection commits each statement by "
                "itself: begin one first, or turn autocommit off",
                self._key,
            )
        self._args |= {"payload": fingerprint, "ttl": math.ceil(ttl)}
        claim = {POSTGRESQL: self._claim_pg, MYSQL: self._claim_my, SQLITE: self._claim_lite}[self._on.dialect]
        try:
            done = await claim(patience)
        except Exception as error:
            explain(error, self._key)
            raise
        if done is None and self._on.dialect != POSTGRESQL:
            await self._on.execute(SAVEPOINT.format(**self._args))
        self._claimed = done is None
        return done

    async def finish(self, result: str, ttl: float) -> None:
        """Keep the result, for so long."""
        await self._release_savepoint()
        finish = FINISH.format(now=NOW[self._on.dialect], mine=self._mine)
        done = await self._on.execute(finish, {**self._args, "result": result, "ttl": math.ceil(ttl)})
        if done.touched != 1:
            raise self._ended()

    async def _release_savepoint(self) -> None:
        if self._on.dialect == POSTGRESQL:
            return
        try:
            await self._on.execute(RELEASE.format(**self._args))
        except Exception as error:
            if MY_NO_SAVEPOINT in codes(error) or "no such savepoint" in str(error):
                raise self._ended() from error
            raise

    def _ended(self) -> FencelockError:
        return FencelockError(
            f"the claim on {self._key!r} is gone: the transaction that it was made in was ended inside the block. What a "
            "commit there has written stays, without a result, so a repetition is refused: look after it, and leave the "
            "commit to whoever began the transaction, after the block",
            self._key,
        )

    async def leave(self, error: BaseException | None) -> None:
        """End the block; the row's own lock lasts until the caller's commit."""
        if self._claimed and isinstance(error, Exception):
            # For who commits all the same. Mostly it is rolled back anyway, or cannot be done any more.
            with suppress(Exception):
                await self._release_savepoint()
                await self._on.execute(WITHDRAW.format(mine=self._mine), self._args)
        if not self._turn:
            return
        try:
            await self._on.execute("DO RELEASE_LOCK(:turn)", {"turn": self._turn})
        except Exception:
            if error is None:
                raise

    async def _claim_pg(self, patience: float | None) -> Done | None:
        number = sha256(f"fencelock.idempotency:{self._key}".encode()).digest()[:8]
        args = {**self._args, "turn": int.from_bytes(number, signed=True)}
        world = world_of(awaited=self.awaited)
        until, pause = world.now() + (patience or 0.0), FIRST_PAUSE
        while True:  # only once for who waits, unless what it waited for was collected before it could be read
            if (await self._on.execute(PG_WAIT if patience is None else PG_TRY, args)).touched:
                return None
            if (done := await self._read(PG_CURRENT)) is not None:
                return done
            if patience is None:
                continue
            left = until - world.now()
            if left <= 0:
                raise in_progress(self._key)
            await world.sleep(min(left, pause * (0.5 + world.random() / 2)))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _claim_my(self, patience: float | None) -> Done | None:
        turn = f"fencelock.idempotency.{sha256(self._key.encode()).hexdigest()[:32]}"
        seconds = FOR_EVER if patience is None else patience
        world = world_of(awaited=self.awaited)
        until = world.now() + seconds
        got = await self._on.execute("SELECT GET_LOCK(:turn, :seconds)", {"turn": turn, "seconds": seconds})
        if got.rows != [(1,)]:
            raise in_progress(self._key)
        self._turn = turn
        # Who waits without an end waits as long as the server lets it: a deadlock with the turn is noticed by nothing else.
        bound = "" if patience is None else MY_BOUND
        try:
            while True:  # once, unless what is in the way is collected before it can be read
                args = {**self._args, "bound": math.ceil(max(0.0, until - world.now()))}
                if (await self._on.execute(bound + MY_CLAIM, args)).touched:
                    return None
                if (await self._on.execute(bound + MY_OVER, args)).touched:
                    return None
                # Past the snapshot that the transaction may have taken before.
                if (done := await self._read(" FOR UPDATE")) is not None:
                    return done
        except Exception as error:
            if patience is None or MY_TOO_LONG not in codes(error):
                raise
            raise in_progress(self._key) from error

    async def _claim_lite(self, patience: float | None) -> Done | None:
        before: int | None = None
        if patience:
            ((before,),) = (await self._on.execute("PRAGMA busy_timeout")).rows
            await self._on.execute(f"PRAGMA busy_timeout = {min(int(patience * 1000), LITE_LONGEST)}")
        try:
            if (await self._on.execute(LITE_CLAIM, self._args)).touched:
                return None
        except Exception as error:
            if patience is None or "database is locked" not in str(error):
                raise
            raise in_progress(self._key) from error
        finally:
            if before is not None:
                await self._on.execute(f"PRAGMA busy_timeout = {before}")
        return await self._read()

    async def _read(self, how: str = "") -> Done | None:
        rows = (await self._on.execute(READ + how, self._args)).rows
        if rows and rows[0][1] is None:
            raise FencelockError(
                f"{self._key!r} was begun and has no result, and yet it is to be seen: its transaction was committed inside "
                "its block, so that what it wrote stays, and nobody knows how far it came; or this is inside that block. "
                "Look after it, and delete its row in fencelock_idempotency to have it done again",
                self._key,
            )
        return Done(*rows[0]) if rows else None


def in_progress(key: str) -> KeyInProgress:
    """Return the error for whoever does not want to wait."""
    return KeyInProgress(f"{key!r} is being worked on by somebody else at this moment; ask again in a while", key)


async def kept(on: Link, key: str) -> bool:
    """Return whether a result is there."""
    name = key.encode() if on.dialect == MYSQL else key
    return bool((await on.execute(READ + " AND result IS NOT NULL", {"name": name})).rows)


async def collect(on: Link, limit: int) -> int:
    """Remove results whose time is over, so many at most; return how many."""
    try:
        return (await on.execute(COLLECT[on.dialect].format(now=NOW[on.dialect]), {"limit": limit})).touched
    except Exception as error:
        explain(error)
        raise
