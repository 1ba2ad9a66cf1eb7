"""Records in the database. Writes are synced, so that records survive a power cut; expiry uses the wall clock."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from math import ceil

from fencelock.core.clock import wall_us
from fencelock.core.records import Record, StoredRecord, Written
from fencelock.engines.sqlite.transactions import Transactions

FIND = "SELECT value, token, version, ends / 1e6 FROM record WHERE space = ? AND key = ?"
WRITE = "INSERT OR REPLACE INTO record (space, key, value, token, version, ends) VALUES (?, ?, ?, ?, ?, ?)"


class SqliteRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, transactions: Transactions, mint: Callable[[sqlite3.Cursor], int], space: str) -> None:
        self._transactions = transactions
        self._mint = mint
        self._space = space

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, or None."""
        entry = await self._transactions.read(self._find, key)
        return None if entry is None else entry.seen(wall_us() / 1e6)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Compare and write, in one transaction."""
        return await self._transactions.write_synced(self._write, key, value, token, ttl, expect)

    def _find(self, db: sqlite3.Cursor, key: str) -> StoredRecord | None:
        row = db.execute(FIND, (self._space, key)).fetchone()
        return None if row is None else StoredRecord._make(row)

    def _write(
        self, db: sqlite3.Cursor, key: str, value: bytes | None, token: int, ttl: float, expect: int | None
    ) -> Written:
        now = wall_us()
        found = self._find(db, key)
        if expect if found is None else not found.allows(now / 1e6, token, expect):
            return Written(False, None if found is None else found.seen(now / 1e6))
        entry = StoredRecord(value, token, self._mint(db), ceil(now + ttl * 1e6) / 1e6)
        db.execute(WRITE, (self._space, key, value, token, entry.version, ceil(entry.ends * 1e6)))
        return Written(True, entry.seen(now / 1e6))
