"""Rates, an optional protocol of an engine: one number per rate limit, charged in one atomic step (GCRA).

The number is a time in µs on the engine's clock: when the last admitted call would be due if calls came evenly. A call adds
its cost in µs. It may go as soon as the number is at most `tolerance` ahead of the clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from fencelock.core.records import UNFENCED_TOKEN, Record, Records
from fencelock.core.runtime import Runtime


class RateRequest(NamedTuple):
    """What one call takes from one limit. Times are whole µs."""

    key: str
    cost: int
    """The time that this call adds."""
    tolerance: int
    """How far calls may run ahead of an even rate: the burst."""


class Reservation(NamedTuple):
    """The answer of an engine: go after `wait` seconds. If `granted` is False, nothing was charged."""

    granted: bool
    wait: float
    times: tuple[int, ...] = ()
    """The new number of each limit: a refund checks that it is still the last one."""


class Rates(Protocol):
    """Charge, refund and read rate limits. Errors are those of `Engine`."""

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Charge all limits or, if the call would have to wait for more than `max_wait` seconds, none of them.

        It runs once: if the reply is lost, raise OutcomeUnknown.
        """
        ...

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give a reservation back, to each limit that no other call has charged since."""
        ...

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Return the engine's clock and the number of each limit, in µs; 0 for a limit that was not used lately."""
        ...


def decide(now: int, stored: Sequence[int], requests: Sequence[RateRequest], max_wait: float) -> Reservation:
    """Return what to store for each limit, and how long the call has to wait. Lua and SQL restate this rule.

    >>> decide(1_000, [0], [RateRequest("k", 100, 100)], 0.0)
    Reservation(granted=True, wait=0.0, times=(1100,))
    >>> decide(1_000, [1_100], [RateRequest("k", 100, 100)], 0.0)
    Reservation(granted=False, wait=0.0001, times=())
    """
    times = tuple(max(number, now) + request.cost for number, request in zip(stored, requests, strict=True))
    wait = max(0, *(time - request.tolerance - now for time, request in zip(times, requests, strict=True)))
    if wait > max_wait * 1e6:
        return Reservation(False, wait / 1e6)
    return Reservation(True, wait / 1e6, times)


KEEP = 3600.0
"""Seconds for which a record outlives its last call: on ZooKeeper it expires by a client's clock, which may be wrong."""
LONGEST_PAUSE = 0.5
"""Seconds until a client that was slower than another one tries again, at most."""


class RecordRates:
    """`Rates` on the records of an engine without scripts: compare and set, again until no other client was faster.

    Several limits are written one after the other. If another client was faster at a later one, the earlier ones are given
    back: for a moment they are stricter than necessary, never more generous.
    """

    def __init__(
        self, runtime: Runtime, records: Records, clock: Callable[[], Awaitable[int]], keep: float = KEEP
    ) -> None:
        self._runtime = runtime
        self._records = records
        self._clock = clock
        """Returns the time in µs, on the engine's clock if it has one."""
        self._keep = keep

    async def reserve(self, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        """Read all limits, decide, and write those that no other client has changed meanwhile; else start over."""
        failures = 0
        while True:
            began = self._runtime.now()
            records = [await self._records.read(request.key) for request in requests]
            now = await self._clock()
            reservation = decide(now, [_number(record) for record in records], requests, max_wait)
            if not reservation.granted:
                return reservation
            stored = 0
            for request, record, time in zip(requests, records, reservation.times, strict=True):
                if not await self._store(request.key, record, time, now):
                    break
                stored += 1
            else:
                return reservation
            await self.refund(requests[:stored], reservation._replace(times=reservation.times[:stored]))
            # Without a pause, the requests of those that fail again slow down the one that succeeds.
            failures += 1
            pause = min(LONGEST_PAUSE, failures * (self._runtime.now() - began))
            await self._runtime.sleep(pause * self._runtime.random())

    async def refund(self, requests: Sequence[RateRequest], reservation: Reservation) -> None:
        """Give back each charge that is still the last one."""
        for request, time in zip(requests, reservation.times, strict=True):
            record = await self._records.read(request.key)
            if record is not None and _number(record) == time:
                await self._store(request.key, record, time - request.cost, await self._clock())

    async def read(self, keys: Sequence[str]) -> tuple[int, list[int]]:
        """Read the limits one after the other."""
        numbers = [_number(await self._records.read(key)) for key in keys]
        return await self._clock(), numbers

    async def _store(self, key: str, record: Record | None, time: int, now: int) -> bool:
        """Write the number of a limit; return False if another client has changed it meanwhile."""
        ttl = max(0.0, (time - now) / 1e6) + self._keep
        expect = 0 if record is None else record.version
        return (await self._records.write(key, str(time).encode(), token=UNFENCED_TOKEN, ttl=ttl, expect=expect)).done


def _number(record: Record | None) -> int:
    return 0 if record is None else int(record.value)
