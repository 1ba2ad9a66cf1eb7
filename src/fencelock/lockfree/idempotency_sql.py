"""Idempotency keys in the caller's own transaction: claim, business write and result are committed together, or not at all.

Who comes second waits for the first one's transaction, or is told. A crash needs no care: the claim dies with its
transaction. PostgreSQL and SQLite say by the count of rows whether the claim is ours. MySQL's count depends on a flag of the
connection, so there the claim is read back.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import NamedTuple

from fencelock.errors import EngineUnavailable, KeyInProgress
from fencelock.lockfree.colour import world_of
from fencelock.lockfree.statements import Statements, need_transaction
from fencelock.model import new_id

FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.5
FOR_EVER = 31_536_000
"""Seconds: MariaDB has no number that stands for no end."""

PG_NOW = "CAST(extract(epoch FROM clock_timestamp()) AS bigint)"
LITE_NOW = "((julianday('now') - 2440587.5) * 86400.0)"
NOW = {"postgresql": PG_NOW, "mysql": "UNIX_TIMESTAMP()", "sqlite": LITE_NOW}

_OVER = """ON CONFLICT (name) DO UPDATE
SET claim = excluded.claim, fingerprint = excluded.fingerprint, result = NULL, ends = excluded.ends
WHERE fencelock_idempotency.result IS NULL OR fencelock_idempotency.ends <= {now}"""

# The turn is a lock of the transaction that comes before the row: it can be tried without an error that would end the
# transaction, and waiters that find the first one gone do not deadlock.
PG_CLAIM = f"""WITH turn AS MATERIALIZED (SELECT {{turn}} AS mine)
INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
SELECT CAST(? AS text), CAST(? AS text), CAST(? AS text), {PG_NOW} + CAST(? AS bigint) FROM turn {{where}}
{_OVER.format(now=PG_NOW)}"""
PG_WAIT = PG_CLAIM.format(turn="pg_advisory_xact_lock(CAST(? AS bigint))", where="")
PG_TRY = PG_CLAIM.format(turn="pg_try_advisory_xact_lock(CAST(? AS bigint))", where="WHERE mine")

LITE_CLAIM = f"""INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (?, ?, ?, {LITE_NOW} + ?) {_OVER.format(now=LITE_NOW)}"""

# From left to right: what the first assignment decides, the others follow.
MY_CLAIM = """INSERT INTO fencelock_idempotency (name, claim, fingerprint, ends)
VALUES (?, ?, ?, UNIX_TIMESTAMP() + ?)
ON DUPLICATE KEY UPDATE claim = IF(result IS NULL OR ends <= UNIX_TIMESTAMP(), ?, claim),
fingerprint = IF(claim = ?, ?, fingerprint), result = IF(claim = ?, NULL, result),
ends = IF(claim = ?, UNIX_TIMESTAMP() + ?, ends)"""

READ = "SELECT claim, fingerprint, result FROM fencelock_idempotency WHERE name = ?"
PG_CURRENT = f" AND ends > {PG_NOW}"  # who tries may find one that has run out and is being run anew
FINISH = "UPDATE fencelock_idempotency SET result = ?, ends = {now} + ? WHERE name = ? AND claim = ?"
COLLECT = {
    "postgresql": """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT ? FOR UPDATE SKIP LOCKED)""",
    "mysql": "DELETE FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT ?",
    "sqlite": """DELETE FROM fencelock_idempotency WHERE name IN
(SELECT name FROM fencelock_idempotency WHERE ends <= {now} ORDER BY ends LIMIT ?)""",
}


class Done(NamedTuple):
    """What an earlier run left: the fingerprint of its payload, and its result as JSON."""

    fingerprint: str
    result: str


class SqlStore:
    """Keeps one key, in the transaction of one connection."""

    def __init__(self, on: Statements, key: str) -> None:
        self._on = on
        self.awaited = on.awaited
        self._key = key
        self._name: str | bytes = key.encode() if on.dialect == "mysql" else key
        self._claim = new_id()
        self._turn = ""

    async def claim(self, fingerprint: str, ttl: float, patience: float | None) -> Done | None:
        """Return what an earlier run left, or None: it is for us to run. Raise KeyInProgress."""
        need_transaction(self._on, "the idempotency key", self._key)
        claim = {"postgresql": self._claim_pg, "mysql": self._claim_my, "sqlite": self._claim_lite}[self._on.dialect]
        return await claim(fingerprint, math.ceil(ttl), patience)

    async def finish(self, result: str, ttl: float) -> None:
        """Keep the result, for so long."""
        finish = FINISH.format(now=NOW[self._on.dialect])
        done = await self._on.run(finish, result, math.ceil(ttl), self._name, self._claim)
        if done.changed != 1:
            raise EngineUnavailable(
                f"the claim on {self._key!r} is gone: the transaction that it was made in was ended inside the block",
                self._key,
            )

    async def leave(self, error: BaseException | None) -> None:
        """End the block; the row's own lock lasts until the caller's commit."""
        if self._turn:
            try:
                await self._on.run("DO RELEASE_LOCK(?)", self._turn)
            except Exception:
                if error is None:
                    raise

    async def _claim_pg(self, fingerprint: str, ttl: int, patience: float | None) -> Done | None:
        number = int.from_bytes(sha256(f"fencelock.idempotency:{self._key}".encode()).digest()[:8], signed=True)
        words = (number, self._name, self._claim, fingerprint, ttl)
        if patience is None:
            while True:  # once, unless what we waited for was collected before we could read it
                if (await self._on.run(PG_WAIT, *words)).changed:
                    return None
                if (done := await self._read(PG_CURRENT)) is not None:
                    return done
        world = world_of(awaited=self.awaited)
        until, pause = world.now() + patience, FIRST_PAUSE
        while True:
            if (await self._on.run(PG_TRY, *words)).changed:
                return None
            if (done := await self._read(PG_CURRENT)) is not None:
                return done
            left = until - world.now()
            if left <= 0:
                raise in_progress(self._key)
            await world.sleep(min(left, pause * (0.5 + world.random() / 2)))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _claim_my(self, fingerprint: str, ttl: int, patience: float | None) -> Done | None:
        turn = f"fencelock.idempotency.{sha256(self._key.encode()).hexdigest()[:32]}"
        seconds = FOR_EVER if patience is None else patience
        ((got,),) = (await self._on.run("SELECT GET_LOCK(?, ?)", turn, seconds)).rows
        if got != 1:
            raise in_progress(self._key)
        self._turn = turn
        mine = self._claim
        over = (mine, mine, fingerprint, mine, mine, ttl)
        await self._on.run(MY_CLAIM, self._name, mine, fingerprint, ttl, *over)
        return await self._read(" FOR UPDATE")  # past the snapshot that the transaction may have taken before

    async def _claim_lite(self, fingerprint: str, ttl: int, patience: float | None) -> Done | None:
        before: int | None = None
        if patience:
            ((before,),) = (await self._on.run("PRAGMA busy_timeout")).rows
            await self._on.run(f"PRAGMA busy_timeout = {int(patience * 1000)}")
        try:
            if (await self._on.run(LITE_CLAIM, self._name, self._claim, fingerprint, ttl)).changed:
                return None
        except Exception as error:
            if patience is None or "database is locked" not in str(error):
                raise
            raise in_progress(self._key) from error
        finally:
            if before is not None:
                await self._on.run(f"PRAGMA busy_timeout = {before}")
        return await self._read()

    async def _read(self, how: str = "") -> Done | None:
        rows = (await self._on.run(READ + how, self._name)).rows
        if not rows or rows[0][0] == self._claim or rows[0][2] is None:
            return None
        return Done(*rows[0][1:])


def in_progress(key: str) -> KeyInProgress:
    """Return the error for whoever does not want to wait."""
    return KeyInProgress(f"{key!r} is being worked on by somebody else at this moment; ask again in a while", key)


async def collect(on: Statements, limit: int) -> int:
    """Remove results whose time is over, so many at most; return how many."""
    return (await on.run(COLLECT[on.dialect].format(now=NOW[on.dialect]), limit)).changed
