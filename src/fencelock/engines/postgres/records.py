"""Records on PostgreSQL: one row each."""

from __future__ import annotations

from fencelock.core.engine import never_repeated
from fencelock.core.records import Record, Written
from fencelock.engines.postgres.connection import Row, Statement
from fencelock.engines.postgres.pool import PostgresPool

# In hexadecimal: the role's bytea_output must not matter.
_FOUND = "pg_catalog.encode(content, 'hex'), its_token, its_version, left_over"
READ = Statement("fl_read", f"SELECT {_FOUND} FROM fencelock.read_record($1, $2)")
WRITE = Statement("fl_write", f"SELECT done, {_FOUND} FROM fencelock.write_record($1, $2, $3, $4, $5, $6)")


class PostgresRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, pool: PostgresPool, namespace: str) -> None:
        self._pool = pool
        self._namespace = namespace

    async def read(self, key: str) -> Record | None:
        """Return the record, or None if there is none."""
        rows = await self._pool.run(READ, (self._namespace, key))
        return _record(rows[0]) if rows else None

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Write the record if the token and the expected version allow it, in one statement that runs once."""
        params = (self._namespace, key, None if value is None else f"\\x{value.hex()}", token, ttl, expect)
        with never_repeated("the write", "Read it", key):
            ((done, *found),) = await self._pool.run(WRITE, params, repeat=False)
        return Written(done == b"t", _record(tuple(found)))


def _record(found: Row) -> Record | None:
    value, token, version, left = found
    if value is None or token is None or version is None:
        return None
    return Record(bytes.fromhex(value.decode()), int(token), int(version), float(left or 0))
