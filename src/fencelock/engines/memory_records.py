"""Records and rate limits of the memory engine: the store's side, and the clients that implement the ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

from fencelock.core.rates import RateRequest, Reservation, decide
from fencelock.core.records import Record, StoredRecord, Written

T = TypeVar("T")
P = ParamSpec("P")


class Call(Protocol):
    """`MemoryEngine._call`: it calls a method of the store."""

    async def __call__(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


class StoredValues:
    """The records and rate limits of a store, under the store's mutex. Each method is one atomic step."""

    def __init__(self, now: Callable[[], float], mint: Callable[[], int]) -> None:
        self._now = now
        self._mint = mint

    def reset(self, mutex: Lock) -> None:
        """Forget everything; use this mutex from now on."""
        self._mutex = mutex
        self._records: dict[str, StoredRecord] = {}
        self._rates: dict[str, int] = {}

    def read(self, key: str) -> Record | None:
        """Return a record."""
        with self._mutex:
            stored = self._records.get(key)
            return None if stored is None else stored.seen(self._now())

    def write(self, key: str, value: bytes | None, token: int, ttl: float, expect: int | None) -> Written:
        """Write a record, unless the stored one has a higher token or another version."""
        with self._mutex:
            now = self._now()
            self._records = {key: stored for key, stored in self._records.items() if stored.ends > now}
            stored = self._records.get(key)
            if expect if stored is None else not stored.allows(now, token, expect):
                return Written(False, None if stored is None else stored.seen(now))
            stored = self._records[key] = StoredRecord(value, token, self._mint(), now + ttl)
            return Written(True, stored.seen(now))

    def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none."""
        with self._mutex:
            now = int(self._now() * 1e6)
            self._rates = {key: time for key, time in self._rates.items() if time > now}
            stored = [self._rates.get(request.key, 0) for request in requests]
            reservation = decide(now, stored, requests, max_wait)
            if reservation.granted:
                self._rates |= zip([request.key for request in requests], reservation.times, strict=True)
            return reservation

    def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        with self._mutex:
            for request, time in zip(requests, reservation.times, strict=True):
                if self._rates.get(request.key) == time:
                    self._rates[request.key] = time - request.cost

    def read_rates(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Return the clock and the time of each limit."""
        with self._mutex:
            return int(self._now() * 1e6), [self._rates.get(key, 0) for key in keys]


class MemoryRecords:
    """`fencelock.core.records.Records` in the store."""

    def __init__(self, call: Call, values: StoredValues) -> None:
        self._call = call
        self._values = values

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, or None."""
        return await self._call(self._values.read, key)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Compare and write in the store."""
        return await self._call(self._values.write, key, value, token, ttl, expect)


class MemoryRates:
    """`fencelock.core.rates.Rates` in the store."""

    def __init__(self, call: Call, values: StoredValues) -> None:
        self._call = call
        self._values = values

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or none."""
        return await self._call(self._values.reserve, requests, max_wait)

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        await self._call(self._values.refund, requests, reservation)

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read all limits."""
        return await self._call(self._values.read_rates, keys)
