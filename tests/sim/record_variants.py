"""Broken variants of once, schedule, rate_limit and single_flight: each has one mistake that the checker must find.

To see one fail: `python -m fencelock.sim --primitive once --variant tests.sim.record_variants:once_without_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fencelock.core.clock import Deadline
from fencelock.core.rates import RateRequest, Reservation, decide
from fencelock.core.records import Record, Records
from fencelock.engines import memory_records
from fencelock.engines.memory_records import StoredValues
from fencelock.errors import RateLimited
from fencelock.primitives import runs, slots
from fencelock.primitives.cached_values import Cached, CachedValues, Kind
from fencelock.primitives.once import BaseOnce
from fencelock.primitives.rate_limit import BaseRateLimit
from fencelock.primitives.runs import Outcome, Run
from fencelock.primitives.single_flight import SingleFlight
from fencelock.primitives.slots import Plan, State
from fencelock.sim import record_program
from fencelock.sim.locks import SimClient, SimLease
from tests.sim.variants import Variant

ANY_TOKEN = 2**52
"""A token that the engine never refuses."""


@contextmanager
def once_without_memory() -> Iterator[None]:
    """A slot runs whenever its lock is free, as with SET NX and a ttl."""
    with patch.object(BaseOnce, "_may_run", lambda self, last: True):
        yield


@contextmanager
def abandoned_run_is_not_counted() -> Iterator[None]:
    """A run whose worker died uses up no attempt."""
    decode = BaseOnce._decode

    def forget(self: BaseOnce[SimLease], record: Record | None) -> Run | None:
        last = decode(self, record)
        return None if last is not None and last.outcome is Outcome.RUNNING else last

    with patch.object(BaseOnce, "_decode", forget):
        yield


@contextmanager
def run_begins_without_a_check() -> Iterator[None]:
    """A job begins although its lease ended while its record was written."""
    with patch.object(SimLease, "check", lambda self: None):
        yield


@contextmanager
def record_is_overwritten() -> Iterator[None]:
    """The record of a job is written whatever it says by then, so that a late write puts an old one back."""

    async def write(
        client: SimClient,
        records: Records,
        lease: SimLease,
        value: bytes,
        ttl: float,
        expect: int,
    ) -> Record | None:
        return (await records.write(lease.name, value, token=ANY_TOKEN, ttl=ttl)).record

    with patch.object(runs, "write_and_resolve", write):
        yield


@contextmanager
def slots_by_the_clock_alone() -> Iterator[None]:
    """A process runs each slot that is due by its clock, whatever mark others have written."""
    plan = slots.plan

    def ignore_mark(table: Any, state: State | None, *args: Any, **kwargs: Any) -> Plan:
        return plan(table, None if state is None else state._replace(mark=0, runs=()), *args, **kwargs)

    with patch.object(slots, "plan", ignore_mark):
        yield


@contextmanager
def skipped_slots_are_not_recorded() -> Iterator[None]:
    """The mark passes slots that nobody ran, and no record says so."""
    plan = slots.plan

    def silent(*args: Any, **kwargs: Any) -> Plan:
        return plan(*args, **kwargs)._replace(skipped=())

    with patch.object(slots, "plan", silent):
        yield


@contextmanager
def burst_counts_twice() -> Iterator[None]:
    """A limit lets twice its burst go at once."""

    def generous(now: int, stored: Sequence[int], requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        doubled = [request._replace(tolerance=2 * request.tolerance) for request in requests]
        return decide(now, stored, doubled, max_wait)

    with patch.object(memory_records, "decide", generous):
        yield


@contextmanager
def refused_calls_are_charged() -> Iterator[None]:
    """A call that is refused is charged, as with INCR and a comparison afterwards."""
    reserve = StoredValues.reserve

    def charge(self: StoredValues, requests: Sequence[RateRequest], max_wait: float) -> Reservation:
        reservation = reserve(self, requests, max_wait)
        return reservation if reservation.granted else reserve(self, requests, 1e6)._replace(granted=False, times=())

    with patch.object(StoredValues, "reserve", charge):
        yield


@contextmanager
def late_turn_is_used() -> Iterator[None]:
    """A caller that was stopped in its sleep uses its turn together with later ones."""

    async def acquire(self: BaseRateLimit, cost: int, timeout: float | None) -> None:
        reservation = await self._reserve(self._requests(cost), 1e9 if timeout is None else timeout)
        assert reservation is not None
        if not reservation.granted:
            raise RateLimited("refused", self.name, retry_after=reservation.wait)
        await self._client.runtime.sleep(reservation.wait)

    with patch.object(BaseRateLimit, "acquire", acquire):
        yield


@contextmanager
def value_is_stored_unconditionally() -> Iterator[None]:
    """A builder stores its value over whatever is there, with neither its token nor a check of its lease."""

    async def store(self: CachedValues, data: bytes, token: int, version: int) -> Cached | None:
        current = await self._records.read(self.name)
        version = 0 if current is None else current.version
        ttl = self._options.ttl + self._options.stale
        await self._records.write(self.name, data, token=ANY_TOKEN, ttl=ttl, expect=version)
        return None

    with patch.object(CachedValues, "store", store), patch.object(SimLease, "check", lambda self: None):
        yield


@contextmanager
def waiters_build_by_themselves() -> Iterator[None]:
    """A caller that finds a builder at work builds, too, instead of waiting."""
    obtain = SingleFlight._obtain

    async def impatient(self: SingleFlight[int], deadline: Deadline, *, rebuild: bool) -> int:
        holders = (await self._client.inspect(self._name)).holders
        return await (self._build() if holders else obtain(self, deadline, rebuild=rebuild))

    with patch.object(SingleFlight, "_obtain", impatient):
        yield


@contextmanager
def invalidation_is_a_deletion() -> Iterator[None]:
    """An invalidation deletes the record, so that a builder that began before stores the old value again."""

    async def delete(client: SimClient, key: str) -> None:
        records: Records = client.engine.records  # type: ignore[attr-defined]
        record = await records.read(f"cache:{key}")
        token = 0 if record is None else record.token
        if record is None or record.value[:1] != Kind.INVALIDATED.value:
            await records.write(f"cache:{key}", None, token=token, ttl=1.0)

    with patch.object(record_program, "invalidate", delete):
        yield


VARIANTS = (
    Variant(once_without_memory, "calm", "runs", 50, "once"),
    Variant(abandoned_run_is_not_counted, "stops", "runs", 200, "once"),
    Variant(run_begins_without_a_check, "stops", "runs", 300, "once"),
    Variant(record_is_overwritten, "late", "slots", 200, "schedule"),
    Variant(slots_by_the_clock_alone, "calm", "runs", 50, "schedule"),
    Variant(skipped_slots_are_not_recorded, "calm", "slots", 50, "schedule"),
    Variant(burst_counts_twice, "calm", "rate", 50, "rate_limit"),
    Variant(refused_calls_are_charged, "calm", "rate", 50, "rate_limit"),
    Variant(late_turn_is_used, "stops", "rate", 200, "rate_limit"),
    Variant(value_is_stored_unconditionally, "late", "cache", 300, "single_flight"),
    Variant(waiters_build_by_themselves, "calm", "cache", 50, "single_flight"),
    Variant(invalidation_is_a_deletion, "calm", "cache", 200, "single_flight"),
)
