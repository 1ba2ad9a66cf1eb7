"""Rate limits on Redis: one string each, charged by one script, by the server's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fencelock.core.rates import RateRequest, Reservation
from fencelock.engines.redis.pool import RedisPool
from fencelock.engines.redis.scripts import load

REPLY_TIMEOUT = 5.0

RESERVE, REFUND, READ = map(load, ("reserve", "refund", "rates"))


class RedisRates:
    """`fencelock.core.rates.Rates` on Redis."""

    def __init__(self, pool: RedisPool, bucket_key: Callable[[str], str]) -> None:
        self._pool = pool
        self._bucket_key = bucket_key

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none, in one script that runs once."""
        args = [int(max_wait * 1e6), *(word for request in requests for word in (request.cost, request.tolerance))]
        command = RESERVE.call(self._keys([request.key for request in requests]), tuple(args))
        granted, wait, *times = await self._pool.run(RESERVE, command, REPLY_TIMEOUT, once=True)
        return Reservation(bool(granted), wait / 1e6, tuple(times))

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        pairs = zip(requests, reservation.times, strict=True)
        args = tuple(word for request, time in pairs for word in (time, request.cost))
        command = REFUND.call(self._keys([request.key for request in requests]), args)
        await self._pool.run(REFUND, command, REPLY_TIMEOUT, once=True)

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read all limits in one script."""
        now, *times = await self._pool.run(READ, READ.call(self._keys(keys), ()), REPLY_TIMEOUT)
        return now, times

    def _keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{self._bucket_key(key)}:rate:{key}" for key in keys)
