"""Rate limits: never more than n + burst in any period, first come, first served, and refused calls cost nothing."""

from __future__ import annotations

import asyncio
import inspect
import random
from typing import Any

import pytest

from fencelock import EngineUnavailable, InvalidArgument, InvalidType, RateLimited
from fencelock.core.rates import RateRequest, Rates, decide
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView
from tests.support.waiting import eventually

pytestmark = pytest.mark.records

FAR = 3_600_000_000
"""An hour in µs: limits of the tests do not recover while a test runs."""


async def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of either API without blocking the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def rates_of(factory: MakeClient, namespace: str = "fencelock") -> Rates:
    rates: Rates = factory.engine(namespace).rates  # type: ignore[attr-defined]
    return rates


async def test_burst_goes_at_once_and_the_next_call_is_refused(locks: LocksView) -> None:
    """As many calls as the burst go at once; the next one is refused, not charged, and learns when it may go."""
    limit = locks.raw.rate_limit("api", 10, per=100.0, burst=3)
    assert [await call(limit.try_acquire) for _ in range(5)] == [True, True, True, False, False]
    with pytest.raises(RateLimited, match="'api'") as caught:
        await call(limit.acquire, timeout=1)
    assert 8 < caught.value.retry_after <= 10
    assert caught.value.name == "api"
    state = await call(limit.state)
    assert (state.limit, state.remaining) == (10, 0)
    assert 8 < state.retry_after <= 10
    assert 28 < state.reset_after <= 30


async def test_limits_of_clients_are_one(factory: MakeClient) -> None:
    """Clients share a limit by its name; other names and namespaces have their own."""
    one, two, elsewhere = factory.connect(), factory.connect(), factory.connect(namespace="elsewhere")
    assert await call(one.raw.rate_limit("api", 1, per=3600).try_acquire) is True
    assert await call(two.raw.rate_limit("api", 1, per=3600).try_acquire) is False
    assert await call(two.raw.rate_limit("other", 1, per=3600).try_acquire) is True
    assert await call(elsewhere.raw.rate_limit("api", 1, per=3600).try_acquire) is True


async def test_acquire_waits_for_its_turn(locks: LocksView) -> None:
    """Callers that wait go one after the other, evenly spaced, and each has reserved its time."""
    limit = locks.raw.rate_limit("api", 50, per=1.0)
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def work() -> None:
        await call(limit.acquire)
        times.append(loop.time())

    started = loop.time()
    await asyncio.gather(*(work() for _ in range(8)))
    # From before the first reservation: the first caller may learn late that it may go.
    assert max(times) - started >= 0.12, "eight calls take seven intervals of 20 ms"


async def test_cost_is_one_step_however_large(factory: MakeClient) -> None:
    """A call may cost a million, and the answer is the same as for a million calls."""
    rates = rates_of(factory)
    big = RateRequest("x", 1_000_000 * 100, FAR)
    first = await rates.reserve([big], 0.0)
    assert first.granted
    now, (time,) = await rates.read(["x"])
    assert 0 < time - now <= 1_000_000 * 100
    assert not (await rates.reserve([RateRequest("x", FAR, FAR)], 0.0)).granted


async def test_several_limits_are_charged_together_or_not_at_all(locks: LocksView) -> None:
    """If one of several limits refuses, the others are as before."""
    wide = locks.raw.rate_limit("wide", 100, per=3600, burst=2)
    narrow = locks.raw.rate_limit("narrow", 1, per=3600)
    both = locks.raw.rate_limits(wide, narrow)
    assert await call(both.try_acquire) is True
    assert await call(both.try_acquire) is False
    assert (await call(wide.state)).remaining == 1
    assert await call(wide.try_acquire) is True
    assert await call(wide.try_acquire) is False


async def test_refund_only_of_the_last_reservation(factory: MakeClient) -> None:
    """A reservation is given back if no other call was charged after it."""
    rates = rates_of(factory)
    request = RateRequest("x", 1_000_000, FAR)
    first = await rates.reserve([request], 0.0)
    second = await rates.reserve([request], 0.0)
    await rates.refund([request], first)
    assert (await rates.read(["x"]))[1] == [second.times[0]], "another call came after it"
    await rates.refund([request], second)
    assert (await rates.read(["x"]))[1] == [second.times[0] - 1_000_000]
    await rates.refund([request], second)
    assert (await rates.read(["x"]))[1] == [second.times[0] - 1_000_000], "a refund counts once"


@pytest.mark.runtime_name("aio")
async def test_cancelled_caller_gives_its_time_back(factory: MakeClient) -> None:
    """A task that is cancelled while it waits for its turn leaves the limit as it found it."""
    locks = factory.connect()
    limit = locks.raw.rate_limit("api", 1, per=60)
    await limit.acquire()
    before = (await limit.state()).reset_after
    waiting = asyncio.create_task(limit.acquire())

    async def charged() -> bool:
        return bool((await limit.state()).reset_after > before + 30)

    await eventually(charged, "the second call has reserved its time")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await limit.state()).reset_after <= before


@pytest.mark.parametrize("seed", range(3))
async def test_engine_against_the_rule(factory: MakeClient, seed: int) -> None:
    """On random histories of two limits the engine charges and refuses what `decide` says, up to its clock."""
    rng = random.Random(seed)
    rates = [rates_of(factory), rates_of(factory)]
    known = {"a": 0, "b": 0}
    for _ in range(40):
        keys = rng.sample(["a", "b"], rng.choice([1, 2]))
        requests = [RateRequest(key, rng.randrange(1, 600) * 1_000_000, 1_800_000_000) for key in keys]
        max_wait = rng.choice([0.0, 600.0])
        engine = rng.choice(rates)
        reservation = await engine.reserve(requests, max_wait)
        now, times = await engine.read(keys)
        expected = decide(now, [known[key] for key in keys], requests, max_wait)
        if abs(expected.wait - max_wait) > 5:  # closer than this, the clock decides
            assert reservation.granted == expected.granted
        assert reservation.wait == pytest.approx(expected.wait, abs=5)
        if reservation.granted:
            assert list(reservation.times) == times
            known |= zip(keys, times, strict=True)
        else:
            assert times == [known[key] for key in keys]


async def test_concurrent_callers_never_exceed_the_burst(factory: MakeClient) -> None:
    """32 callers of four clients at once: exactly the burst goes."""
    limits = [factory.connect().raw.rate_limit("api", 10, per=3600, burst=10) for _ in range(4)]
    granted = await asyncio.gather(*(call(limits[number % 4].try_acquire) for number in range(32)))
    assert granted.count(True) == 10


@pytest.mark.client_side
async def test_engine_down(factory: MakeClient) -> None:
    """Without the engine a call raises EngineUnavailable, or is admitted if the limit has on_error="allow"."""
    locks = factory.connect()
    faulty = Faulty.around(locks)
    strict, lenient = (
        locks.raw.rate_limit("api", 10),
        locks.raw.rate_limit("api", 10, on_error="allow"),
    )
    faulty.refuse("reserve", 4)
    with pytest.raises(EngineUnavailable, match="'api'"):
        await call(strict.try_acquire)
    with pytest.raises(EngineUnavailable):
        await call(strict.acquire)
    assert await call(lenient.try_acquire) is True
    await call(lenient.acquire)


@pytest.mark.client_side
async def test_decorator(locks: LocksView) -> None:
    """Each call of a decorated function takes its turn."""
    limit = locks.raw.rate_limit("api", 1, per=3600)
    if inspect.iscoroutinefunction(locks.raw.close):

        @limit  # type: ignore[untyped-decorator]
        async def fetch(number: int) -> int:
            return number
    else:

        @limit  # type: ignore[untyped-decorator]
        def fetch(number: int) -> int:
            return number

    assert await call(fetch, 7) == 7
    assert await call(limit.try_acquire) is False


@pytest.mark.client_side
async def test_bad_arguments(locks: LocksView) -> None:
    """What cannot be a limit is refused when it is made, with the name and the argument."""
    make = locks.raw.rate_limit
    values: list[dict[str, Any]] = [{"n": 0}, {"n": -1}, {"n": 10, "burst": 0}, {"n": 10, "per": 0}]
    for bad in values:
        with pytest.raises(InvalidArgument, match="'api'"):
            make("api", **bad)
    types: list[dict[str, Any]] = [{"n": 1.5}, {"n": True}, {"n": 10, "burst": "3"}]
    for bad in types:
        with pytest.raises(InvalidType):
            make("api", **bad)
    with pytest.raises(InvalidArgument, match="on_error"):
        make("api", 10, on_error="ignore")
    limit = make("api", 10, burst=2)
    with pytest.raises(InvalidArgument, match="burst"):
        await call(limit.try_acquire, cost=3)
    with pytest.raises(InvalidArgument, match="cost"):
        await call(limit.acquire, cost=0)
