"""Rate limits on PostgreSQL: one row each, charged by one function, by the server's clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fencelock.core.rates import RateRequest, Reservation
from fencelock.engines.postgres.connection import Statement
from fencelock.engines.postgres.pool import PostgresPool

RESERVE = Statement(
    "fl_reserve",
    "SELECT granted, wait, pg_catalog.array_to_string(times, ',') FROM fencelock.reserve($1, $2, $3, $4, $5)",
)
REFUND = Statement("fl_refund", "SELECT fencelock.refund($1, $2, $3, $4)")
READ = Statement(
    "fl_rates",
    "SELECT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint, coalesce(r.time, 0) "
    "FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY AS k (key, place) "
    "LEFT JOIN fencelock.rate AS r ON r.namespace = $1 AND r.key = k.key ORDER BY k.place",
)


class PostgresRates:
    """`fencelock.core.rates.Rates`."""

    def __init__(self, pool: PostgresPool, namespace: str) -> None:
        self._pool = pool
        self._namespace = namespace

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none, in one statement that runs once."""
        costs, tolerances = _array(r.cost for r in requests), _array(r.tolerance for r in requests)
        params = (self._namespace, _texts(r.key for r in requests), costs, tolerances, int(max_wait * 1e6))
        ((granted, wait, times),) = await self._pool.run(RESERVE, params, repeat=False)
        stored = tuple(map(int, times.split(b","))) if times else ()
        return Reservation(granted == b"t", int(wait or 0) / 1e6, stored)

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one, in one statement."""
        keys, costs = _texts(r.key for r in requests), _array(r.cost for r in requests)
        params = (self._namespace, keys, _array(reservation.times), costs)
        await self._pool.run(REFUND, params, repeat=False)

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read all limits in one statement."""
        rows = await self._pool.run(READ, (self._namespace, _texts(keys)))
        return int(rows[0][0] or 0), [int(time or 0) for _, time in rows]


def _array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def _texts(texts: Iterable[str]) -> str:
    """Return an array of texts as PostgreSQL reads it."""
    quoted = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return "{" + ",".join(f'"{text}"' for text in quoted) + "}"
