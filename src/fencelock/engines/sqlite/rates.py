"""Rate limits in the database: one row each, by the machine's clock since boot. A power cut may forget the last calls."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from fencelock.core.rates import RateRequest, Reservation, decide
from fencelock.engines.sqlite.transactions import Transactions

FIND = "SELECT time FROM rate WHERE space = ? AND key = ?"
STORE = "INSERT OR REPLACE INTO rate (space, key, time) VALUES (?, ?, ?)"


class SqliteRates:
    """`fencelock.core.rates.Rates`."""

    def __init__(self, transactions: Transactions, now: Callable[[], float], space: str) -> None:
        self._transactions = transactions
        self._now = now
        self._space = space

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none, in one transaction."""
        return await self._transactions.write(self._reserve, requests, max_wait)

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one, in one transaction."""
        await self._transactions.write(self._refund, requests, reservation)

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read all limits."""
        times = await self._transactions.read(self._find_all, keys)
        return int(self._now() * 1e6), times

    def _reserve(self, db: sqlite3.Cursor, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        stored = self._find_all(db, [request.key for request in requests])
        reservation = decide(int(self._now() * 1e6), stored, requests, max_wait)
        if reservation.granted:
            pairs = zip(requests, reservation.times, strict=True)
            db.executemany(STORE, [(self._space, request.key, time) for request, time in pairs])
        return reservation

    def _refund(self, db: sqlite3.Cursor, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        for request, time in zip(requests, reservation.times, strict=True):
            if self._find_all(db, [request.key]) == [time]:
                db.execute(STORE, (self._space, request.key, time - request.cost))

    def _find_all(self, db: sqlite3.Cursor, keys: Sequence[str]) -> list[int]:
        found = [db.execute(FIND, (self._space, key)).fetchone() for key in keys]
        return [0 if row is None else row[0] for row in found]
