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

LITE_SLICE = 1.0
"""Seconds for which one statement waits in SQLite, where Python handles no signal: Ctrl-C ends a longer wait as well."""

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
# A finished key takes no lock at all: its replays do not wait for each other's transactions. The table's oid keeps apart
# schemas; advisory locks are already local to their database.
PG_TURN = "CAST(:turn AS bigint) # CAST(CAST(CAST('fencelock_idempotency' AS regclass) AS oid) AS bigint)"
PG_CLAIM = f"""WITH turn AS MATERIALIZED (SELECT {{turn}} AS mine WHERE NOT EXISTS (
    SELECT 1 FROM fencelock_idempotency WHERE name = CAST(:name AS text) AND result IS NOT NULL AND ends > {PG_NOW}))
INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
SELECT CAST(:name AS text), {PG_CLAIM_ID}, CAST(:payload AS text), {PG_NOW} + CAST(:ttl AS bigint) FROM turn {{where}}
{_OVER.format(now=PG_NOW)}"""
PG_WAIT = PG_CLAIM.format(turn=f"pg_advisory_xact_lock({PG_TURN})", where="")
PG_TRY = PG_CLAIM.format(turn=f"pg_try_advisory_xact_lock({PG_TURN})", where="WHERE mine")

LITE_CLAIM = f"""INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (:name, :claim, :payload, {LITE_NOW} + :ttl) {_OVER.format(now=LITE_NOW)}"""

# GET_LOCK is about the whole server: the name has the database in it. It is returned, as USE may change the database
# before the lock is released. At most 64 characters.
MY_TURN = """SELECT GET_LOCK(turn, :seconds), turn FROM (SELECT
CONCAT('fencelock.idempotency.', LEFT(SHA2(CONCAT(IFNULL(DATABASE(), ''), '/', :key), 256), 32)) AS turn) AS named"""

# IGNORE, as its count is the same for all connections: that of ON DUPLICATE KEY depends on a flag that drivers set or not.
MY_CLAIM = """INSERT IGNORE INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (:name, :claim, :payload, UNIX_TIMESTAMP() + :ttl)"""
MY_OVER = """UPDATE fencelock_idempotency
SET claim = :claim, fingerprint = :payload, result = NULL, ends = UNIX_TIMESTAMP() + :ttl
WHERE name = :name AND ends <= UNIX_TIMESTAMP()"""

# Past the block the first one has let its turn go, but until its commit it keeps the row.
MY_BOUND = "/*M!100302 SET STATEMENT innodb_lock_wait_timeout = :bound FOR */ "
MY_TOO_LONG = "1205"
LITE_LOCKED = "database is locked"

READ = "SELECT fingerprint, result FROM fencelock_idempotency WHERE name = :name"
CURRENT = {dialect: f" AND ends > {now}" for dialect, now in NOW.items()}
"""Who has no lock may find one that has run out and is being run anew."""
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
    result: str | None
    """None: it was too large to be stored."""


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
        if done is not None:
            await self._release_turn()  # a replay has nothing to do that others would have to wait for
        elif self._on.dialect != POSTGRESQL:
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
        try:
            await self._release_turn()
        except Exception:
            if error is None:
                raise

    async def _release_turn(self) -> None:
        turn, self._turn = self._turn, ""
        if turn:
            await self._on.execute("DO RELEASE_LOCK(:turn)", {"turn": turn})

    async def _claim_pg(self, patience: float | None) -> Done | None:
        number = sha256(f"fencelock.idempotency:{self._key}".encode()).digest()[:8]
        args = {**self._args, "turn": int.from_bytes(number, signed=True)}
        runtime = world_of(awaited=self.awaited)
        until, pause = runtime.now() + (patience or 0.0), FIRST_PAUSE
        while True:  # only once for who waits, unless what it waited for was collected before it could be read
            if (await self._on.execute(PG_WAIT if patience is None else PG_TRY, args)).touched:
                return None
            if (done := await self._read(CURRENT[POSTGRESQL])) is not None:
                return done
            if patience is None:
                continue
            left = until - runtime.now()
            if left <= 0:
                raise in_progress(self._key)
            await runtime.sleep(min(left, pause * (0.5 + runtime.random() / 2)))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _claim_my(self, patience: float | None) -> Done | None:
        seconds = FOR_EVER if patience is None else patience
        runtime = world_of(awaited=self.awaited)
        until = runtime.now() + seconds
        key = sha256(self._key.encode()).hexdigest()
        ((got, turn),) = (await self._on.execute(MY_TURN, {"key": key, "seconds": seconds})).rows
        if got != 1:
            return await self._finished_or_in_progress(None)
        self._turn = turn
        # Who waits without an end waits as long as the server lets it: a deadlock with the turn is noticed by nothing else.
        bound = "" if patience is None else MY_BOUND
        try:
            while True:  # once, unless what is in the way is collected before it can be read
                args = {**self._args, "bound": math.ceil(max(0.0, until - runtime.now()))}
                if (await self._on.execute(bound + MY_CLAIM, args)).touched:
                    return None
                # Past the snapshot that the transaction may have taken before. A shared lock, which MY_CLAIM took already:
                # other replays do not wait for this transaction.
                if (done := await self._read(CURRENT[MYSQL] + " LOCK IN SHARE MODE")) is not None:
                    return done
                if (await self._on.execute(bound + MY_OVER, args)).touched:
                    return None
        except Exception as error:
            if patience is None or MY_TOO_LONG not in codes(error):
                raise
            return await self._finished_or_in_progress(error)

    async def _claim_lite(self, patience: float | None) -> Done | None:
        outside = await self._is_outside_transaction()
        if outside:
            # Replays then write nothing. Inside a transaction a read would have its later write refused.
            try:
                done = await self._read_unless_locked()
            finally:
                await self._on.execute("ROLLBACK")
            if done is not None:
                return done
        ((own,),) = (await self._on.execute("PRAGMA busy_timeout")).rows
        try:
            claimed = await self._insert_lite(patience, own / 1000)
        except KeyInProgress:
            if outside or (done := await self._read_unless_locked()) is None:
                raise
            return done
        finally:
            if patience != 0:
                await self._on.execute(f"PRAGMA busy_timeout = {own}")
        return None if claimed else await self._read()

    async def _is_outside_transaction(self) -> bool:
        """Begin a transaction of our own; return False if the caller has begun one."""
        try:
            await self._on.execute("BEGIN")
        except Exception:
            return False
        return True

    async def _insert_lite(self, patience: float | None, own_timeout: float) -> bool:
        """Insert the claim, as soon as no other transaction writes; return False if the key has a row already."""
        runtime = world_of(awaited=self.awaited)
        until = math.inf if patience is None else runtime.now() + patience
        while True:
            started = runtime.now()
            timeout = own_timeout
            if patience != 0:
                timeout = max(0.001, min(LITE_SLICE, until - started))
                await self._on.execute(f"PRAGMA busy_timeout = {math.ceil(timeout * 1000)}")
            try:
                return bool((await self._on.execute(LITE_CLAIM, self._args)).touched)
            except Exception as error:
                if LITE_LOCKED not in str(error):
                    raise
                now = runtime.now()
                # SQLite refuses without waiting if this transaction has read: waiting could never end, or would keep the
                # other one from committing.
                if now - started < timeout / 2:
                    raise FencelockError(
                        f"SQLite cannot claim {self._key!r} in this transaction, which has read before another one began to "
                        "write: roll it back and run it again, and begin it with the block, or with BEGIN IMMEDIATE",
                        self._key,
                    ) from error
                if patience == 0 or now >= until:
                    raise in_progress(self._key) from error

    async def _read_unless_locked(self) -> Done | None:
        """Return the result of a finished run; None also if another transaction is being committed at this moment."""
        try:
            return await self._read(CURRENT[SQLITE])
        except Exception as error:
            if LITE_LOCKED in str(error):
                return None
            raise

    async def _finished_or_in_progress(self, cause: Exception | None) -> Done:
        """Return the result of a finished run, if that is what others replay at this moment; else raise KeyInProgress."""
        done = await self._read(CURRENT[self._on.dialect])
        if done is None:
            raise in_progress(self._key) from cause
        return done

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
