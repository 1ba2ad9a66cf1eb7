"""Records: one row each in an InnoDB table, by the server's clock. A write names the version that it replaces."""

from __future__ import annotations

from fencelock.core.engine import never_repeated
from fencelock.core.records import Record, StoredRecord, Written
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.packets import Ok, ServerError
from fencelock.engines.mysql.pool import MySQLPool, rows_of


class MySQLRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, pool: MySQLPool) -> None:
        self._pool = pool

    async def read(self, key: str) -> Record | None:
        """Return the record, or None."""
        found, now = await self._find((await self._pool.names()).key(key))
        return None if found is None else found.seen(now)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Read, decide, and write unless another client has written in between; then start over. No lock is held."""
        name = (await self._pool.names()).key(key)
        version = await self._pool.mint_token()
        while True:
            found, now = await self._find(name)
            # An earlier write that the server reported as interrupted may have happened all the same.
            if found is not None and found.version == version:
                return Written(True, found.seen(now))
            if expect if found is None else not found.allows(now, token, expect):
                return Written(False, None if found is None else found.seen(now))
            row = sql.RecordRow(name, key, value, token, version, ttl)
            statement = row.insert() if found is None else row.update(found.version, alive=found.ends > now)
            with never_repeated("the write", "Read it", key):
                (reply,) = await self._pool.run(statement, check=False, repeat=False)
            if isinstance(reply, ServerError) and reply.code not in sql.INTERRUPTED:
                self._pool.check(reply)
            if isinstance(reply, Ok) and reply.affected:
                await self._pool.run(sql.PRUNE_RECORDS, check=False)
                return Written(True, StoredRecord(value, token, version, now + ttl).seen(now))

    async def clock(self) -> int:
        """Return the server's time in µs, for rate limits."""
        (reply,) = await self._pool.run(f"SELECT {sql.CLOCK}")
        return int(rows_of(reply)[0][0] or 0)

    async def _find(self, name: str) -> tuple[StoredRecord | None, float]:
        """Return the stored entry, expired or not, and the server's time."""
        (reply,) = await self._pool.run(sql.find_record(name))
        for now, value, token, version, ends in rows_of(reply):
            return StoredRecord(value, int(token or 0), int(version or 0), int(ends or 0) / 1e6), int(now or 0) / 1e6
        return None, 0.0
