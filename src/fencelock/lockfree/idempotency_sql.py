"""Idempotency keys in the caller's own transaction: claim, business write and result are committed together, or not at all.

A second run of a key waits for the first one's transaction, or gets KeyInProgress. After a crash nothing has to be
cleaned up: the database rolls the claim back with its transaction.
"""

from __future__ import annotations

import math
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

from fencelock.core.runtime import Runtime
from fencelock.errors import FencelockError, KeyInProgress
from fencelock.lockfree.schema import explain_missing_table
from fencelock.model import new_id
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, ConnectionAdapter, error_codes, require_transaction

FIRST_PAUSE = 0.01
MAX_PAUSE = 0.5
NO_TIMEOUT = 31_536_000
"""Seconds: MariaDB has no number for "no timeout"."""

SQLITE_SLICE = 1.0
"""Seconds for which one statement waits in SQLite. Python handles no signal meanwhile, so a long wait is split for Ctrl-C."""

PG_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS bigint)"
SQLITE_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
NOW = {POSTGRESQL: PG_NOW, MYSQL: "UNIX_TIMESTAMP()", SQLITE: SQLITE_NOW}

_REPLACE_EXPIRED = """ON CONFLICT (name) DO UPDATE
SET claim = excluded.claim, fingerprint = excluded.fingerprint, result = NULL, expires_at = excluded.expires_at
WHERE fencelock_idempotency.expires_at <= {now}"""

# Detects a commit inside the block. PostgreSQL: the claim has the id of its transaction. Elsewhere: a savepoint, which
# ends with its transaction.
PG_CLAIM_ID = "CAST(:claim AS text) || ':' || txid_current()"
SAVEPOINT = "SAVEPOINT fencelock_{claim}"
RELEASE = "RELEASE SAVEPOINT fencelock_{claim}"
MYSQL_NO_SAVEPOINT = "1305"

# An advisory lock of the transaction comes before the lock of the row: trying it raises no error, which would abort the
# transaction, and only one transaction at a time waits for the row itself. A finished key needs no lock, so that its
# replays do not wait for each other. Advisory locks are local to their database; the table's oid separates its schemas.
PG_KEY_LOCK = "CAST(:lock AS bigint) # CAST(CAST(CAST('fencelock_idempotency' AS regclass) AS oid) AS bigint)"
PG_CLAIM = f"""WITH key_lock AS MATERIALIZED (SELECT {{lock}} AS locked WHERE NOT EXISTS (
    SELECT 1 FROM fencelock_idempotency WHERE name = CAST(:name AS text) AND result IS NOT NULL AND expires_at > {PG_NOW}))
INSERT INTO fencelock_idempotency (name, claim, fingerprint, expires_at)
SELECT CAST(:name AS text), {PG_CLAIM_ID}, CAST(:payload AS text), {PG_NOW} + CAST(:ttl AS bigint) FROM key_lock {{where}}
{_REPLACE_EXPIRED.format(now=PG_NOW)}"""
PG_WAIT = PG_CLAIM.format(lock=f"pg_advisory_xact_lock({PG_KEY_LOCK})", where="")
PG_TRY = PG_CLAIM.format(lock=f"pg_try_advisory_xact_lock({PG_KEY_LOCK})", where="WHERE locked")

SQLITE_CLAIM = f"""INSERT INTO fencelock_idempotency (name, claim, fingerprint, expires_at)
VALUES (:name, :claim, :payload, {SQLITE_NOW} + :ttl) {_REPLACE_EXPIRED.format(now=SQLITE_NOW)}"""

# GET_LOCK has one namespace for the server, so the name includes the database. The statement returns the name, as USE may
# change the database before the lock is released. At most 64 characters.
MYSQL_KEY_LOCK = """SELECT GET_LOCK(lock_name, :seconds), lock_name FROM (SELECT
CONCAT('fencelock.idempotency.', LEFT(SHA2(CONCAT(IFNULL(DATABASE(), ''), '/', :key), 256), 32)) AS lock_name) AS named"""

# IGNORE: the row count of ON DUPLICATE KEY would depend on a flag of the connection.
MYSQL_CLAIM = """INSERT IGNORE INTO fencelock_idempotency (name, claim, fingerprint, expires_at)
VALUES (:name, :claim, :payload, UNIX_TIMESTAMP() + :ttl)"""
MYSQL_REPLACE_EXPIRED = """UPDATE fencelock_idempotency
SET claim = :claim, fingerprint = :payload, result = NULL, expires_at = UNIX_TIMESTAMP() + :ttl
WHERE name = :name AND expires_at <= UNIX_TIMESTAMP()"""

# After its block the first run has released the key lock, but it keeps the row locked until its commit.
MYSQL_ROW_TIMEOUT = "/*M!100302 SET STATEMENT innodb_lock_wait_timeout = :row_timeout FOR */ "
MYSQL_LOCK_TIMEOUT = "1205"
SQLITE_LOCKED = "database is locked"

READ = "SELECT fingerprint, result FROM fencelock_idempotency WHERE name = :name"
CURRENT = {dialect: f" AND expires_at > {now}" for dialect, now in NOW.items()}
"""A reader without a lock may find an expired row that another transaction is replacing."""
DELETE_CLAIM = "DELETE FROM fencelock_idempotency WHERE name = :name AND claim = {mine}"
FINISH = (
    "UPDATE fencelock_idempotency SET result = :result, expires_at = {now} + :ttl WHERE name = :name AND claim = {mine}"
)
PRUNE = {
    POSTGRESQL: """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED)""",
    MYSQL: "DELETE FROM fencelock_idempotency WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit",
    SQLITE: """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE expires_at <= {now} ORDER BY expires_at LIMIT :limit)""",
}


class Done(NamedTuple):
    """The outcome of an earlier run: the fingerprint of its payload, and its result as JSON."""

    fingerprint: str
    result: str | None
    """None if it was too large to be stored."""


class SqlStore:
    """Stores one key, in the transaction of one connection."""

    def __init__(self, on: ConnectionAdapter, key: str, runtime: Runtime) -> None:
        self._on = on
        self._runtime = runtime
        self._key = key
        self._args: dict[str, Any] = {"name": key.encode() if on.dialect == MYSQL else key, "claim": new_id()}
        self._mine = PG_CLAIM_ID if on.dialect == POSTGRESQL else ":claim"
        self._claimed = False
        self._key_lock = ""

    async def claim(self, fingerprint: str, ttl: float, timeout: float | None) -> Done | None:
        """Claim the key; return the outcome of an earlier run, or None if this run must do the work. Raise KeyInProgress."""
        await require_transaction(self._on, f"the idempotency key {self._key!r}", self._key)
        self._args |= {"payload": fingerprint, "ttl": math.ceil(ttl)}
        claims = {POSTGRESQL: self._claim_postgresql, MYSQL: self._claim_mysql, SQLITE: self._claim_sqlite}
        try:
            done = await claims[self._on.dialect](timeout)
        except Exception as error:
            explain_missing_table(error, self._key)
            raise
        if done is not None:
            await self._release_key_lock()  # others need not wait for a replay
        elif self._on.dialect != POSTGRESQL:
            await self._on.execute(SAVEPOINT.format(**self._args))
        self._claimed = done is None
        return done

    async def finish(self, result: str, ttl: float) -> None:
        """Store the result for `ttl` seconds."""
        await self._release_savepoint()
        finish = FINISH.format(now=NOW[self._on.dialect], mine=self._mine)
        done = await self._on.execute(finish, {**self._args, "result": result, "ttl": math.ceil(ttl)})
        if done.rowcount != 1:
            raise self._ended()

    async def _release_savepoint(self) -> None:
        if self._on.dialect == POSTGRESQL:
            return
        try:
            await self._on.execute(RELEASE.format(**self._args))
        except Exception as error:
            if MYSQL_NO_SAVEPOINT in error_codes(error) or "no such savepoint" in str(error):
                raise self._ended() from error
            raise

    def _ended(self) -> FencelockError:
        return FencelockError(
            f"the claim of {self._key!r} is gone: its transaction was ended inside the block. What a commit there wrote "
            "stays, without a result, so a repetition is refused: repair it by hand, and commit after the block",
            self._key,
        )

    async def leave(self, error: BaseException | None) -> None:
        """End the block. The row stays locked until the caller's commit."""
        if self._claimed and isinstance(error, Exception):
            # For a caller that commits after an error. Usually it rolls back, or the connection accepts nothing any more.
            with suppress(Exception):
                await self._release_savepoint()
                await self._on.execute(DELETE_CLAIM.format(mine=self._mine), self._args)
        try:
            await self._release_key_lock()
        except Exception:
            if error is None:
                raise

    async def _release_key_lock(self) -> None:
        key_lock, self._key_lock = self._key_lock, ""
        if key_lock:
            await self._on.execute("DO RELEASE_LOCK(:lock)", {"lock": key_lock})

    async def _claim_postgresql(self, timeout: float | None) -> Done | None:
        number = sha256(f"fencelock.idempotency:{self._key}".encode()).digest()[:8]
        args = {**self._args, "lock": int.from_bytes(number, signed=True)}
        runtime = self._runtime
        deadline, pause = runtime.now() + (timeout or 0.0), FIRST_PAUSE
        while True:  # one pass with PG_WAIT, unless the row is pruned before it can be read
            if (await self._on.execute(PG_WAIT if timeout is None else PG_TRY, args)).rowcount:
                return None
            if (done := await self._read(CURRENT[POSTGRESQL])) is not None:
                return done
            if timeout is None:
                continue
            left = deadline - runtime.now()
            if left <= 0:
                raise in_progress(self._key)
            await runtime.sleep(min(left, pause * (0.5 + runtime.random() / 2)))
            pause = min(pause * 2, MAX_PAUSE)

    async def _claim_mysql(self, timeout: float | None) -> Done | None:
        seconds = NO_TIMEOUT if timeout is None else timeout
        runtime = self._runtime
        deadline = runtime.now() + seconds
        key = sha256(self._key.encode()).hexdigest()
        ((got, key_lock),) = (await self._on.execute(MYSQL_KEY_LOCK, {"key": key, "seconds": seconds})).rows
        if got != 1:
            return await self._finished_or_in_progress(None)
        self._key_lock = key_lock
        # Without a timeout the server's own one applies: nothing else ends a deadlock of a row with a key lock.
        prefix = "" if timeout is None else MYSQL_ROW_TIMEOUT
        try:
            while True:  # one pass, unless the row is pruned before it can be read
                args = {**self._args, "row_timeout": math.ceil(max(0.0, deadline - runtime.now()))}
                if (await self._on.execute(prefix + MYSQL_CLAIM, args)).rowcount:
                    return None
                # A locking read sees rows that are newer than the transaction's snapshot. MYSQL_CLAIM took this shared lock
                # already, so other replays do not wait for it.
                if (done := await self._read(CURRENT[MYSQL] + " LOCK IN SHARE MODE")) is not None:
                    return done
                if (await self._on.execute(prefix + MYSQL_REPLACE_EXPIRED, args)).rowcount:
                    return None
        except Exception as error:
            if timeout is None or MYSQL_LOCK_TIMEOUT not in error_codes(error):
                raise
            return await self._finished_or_in_progress(error)

    async def _claim_sqlite(self, timeout: float | None) -> Done | None:
        outside = await self._is_outside_transaction()
        if outside:
            # A replay then needs no write. Inside a transaction SQLite would refuse a write that follows a read.
            try:
                done = await self._read_unless_locked()
            finally:
                await self._on.execute("ROLLBACK")
            if done is not None:
                return done
        ((own,),) = (await self._on.execute("PRAGMA busy_timeout")).rows
        try:
            claimed = await self._insert_sqlite(timeout, own / 1000)
        except KeyInProgress:
            if outside or (done := await self._read_unless_locked()) is None:
                raise
            return done
        finally:
            if timeout != 0:
                await self._on.execute(f"PRAGMA busy_timeout = {own}")
        return None if claimed else await self._read()

    async def _is_outside_transaction(self) -> bool:
        """Begin a transaction; return False if the caller has begun one."""
        try:
            await self._on.execute("BEGIN")
        except Exception:
            return False
        return True

    async def _insert_sqlite(self, timeout: float | None, own_timeout: float) -> bool:
        """Insert the claim once no other transaction writes; return False if the key has a row already."""
        runtime = self._runtime
        deadline = math.inf if timeout is None else runtime.now() + timeout
        while True:
            started = runtime.now()
            busy_timeout = own_timeout
            if timeout != 0:
                busy_timeout = max(0.001, min(SQLITE_SLICE, deadline - started))
                await self._on.execute(f"PRAGMA busy_timeout = {math.ceil(busy_timeout * 1000)}")
            try:
                return bool((await self._on.execute(SQLITE_CLAIM, self._args)).rowcount)
            except Exception as error:
                if SQLITE_LOCKED not in str(error):
                    raise
                now = runtime.now()
                # SQLite refuses without waiting if this transaction has read: waiting could never end, or would block the
                # other one's commit.
                if now - started < busy_timeout / 2:
                    raise FencelockError(
                        f"SQLite cannot claim {self._key!r} in this transaction, which has read before another one began to "
                        "write: roll it back and run it again, and begin it with the block, or with BEGIN IMMEDIATE",
                        self._key,
                    ) from error
                if timeout == 0 or now >= deadline:
                    raise in_progress(self._key) from error

    async def _read_unless_locked(self) -> Done | None:
        """Return the outcome of a finished run; None also if another transaction commits at this moment."""
        try:
            return await self._read(CURRENT[SQLITE])
        except Exception as error:
            if SQLITE_LOCKED in str(error):
                return None
            raise

    async def _finished_or_in_progress(self, cause: Exception | None) -> Done:
        """Return the outcome of a finished run, or raise KeyInProgress."""
        done = await self._read(CURRENT[self._on.dialect])
        if done is None:
            raise in_progress(self._key) from cause
        return done

    async def _read(self, condition: str = "") -> Done | None:
        rows = (await self._on.execute(READ + condition, self._args)).rows
        if rows and rows[0][1] is None:
            raise FencelockError(
                f"{self._key!r} was begun and has no result: its transaction was committed inside its block, so what it "
                "wrote stays, and may be incomplete; or this is inside that block. Repair it by hand, and delete its row in "
                " fencelock_idempotency to run it again",
                self._key,
            )
        return Done(*rows[0]) if rows else None


def in_progress(key: str) -> KeyInProgress:
    """Return the error for a caller that does not wait for another run."""
    return KeyInProgress(f"another run of {key!r} is in progress; try again in a while", key)


async def is_stored(on: ConnectionAdapter, key: str) -> bool:
    """Return whether a result is stored."""
    name = key.encode() if on.dialect == MYSQL else key
    return bool((await on.execute(READ + " AND result IS NOT NULL", {"name": name})).rows)


async def prune_expired(on: ConnectionAdapter, limit: int) -> int:
    """Remove at most `limit` expired results; return their number."""
    try:
        return (await on.execute(PRUNE[on.dialect].format(now=NOW[on.dialect]), {"limit": limit})).rowcount
    except Exception as error:
        explain_missing_table(error)
        raise
