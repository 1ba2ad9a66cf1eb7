"""Semaphores: permits in order, permits that expire, and contenders that disagree about the limit."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fencelock import GuaranteeUnavailable, InvalidArgument, InvalidType, LockTimeout, LossReason, Mode
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, wait_until_unclaimed, waiting
from tests.support.waiting import SOON, eventually


async def test_engine_without_permits_refuses_when_the_object_is_created(case: EngineCase, locks: LocksView) -> None:
    """`semaphore` raises GuaranteeUnavailable, with one sentence, on an engine that has no permits."""
    if case.limit:
        assert locks.semaphore("x", 2).name == "x"
        return
    with pytest.raises(GuaranteeUnavailable, match=r"^'x': [\w+]+ has no semaphores; [^.]*$") as caught:
        locks.semaphore("x", 2)
    assert caught.value.name == "x"


@pytest.mark.client_side
@pytest.mark.limit
async def test_limit_is_checked_when_the_object_is_created(locks: LocksView) -> None:
    """A limit is a whole number of permits, at least one."""
    for limit in (0, -1, 10**12):
        with pytest.raises(InvalidArgument, match="limit"):
            locks.semaphore("x", limit)
    for wrong in (True, 2.0, "3", None):
        with pytest.raises(InvalidType, match="limit"):
            locks.semaphore("x", wrong)


@pytest.mark.limit
async def test_at_most_limit_hold_it_and_each_release_admits_the_next(locks: LocksView) -> None:
    """Of eight contenders three hold a permit, and each release admits the next one in order."""
    semaphore = locks.semaphore("x", 3, timeout=SOON)
    holding = [await semaphore.acquire() for _ in range(3)]
    assert {lease.mode for lease in holding} == {Mode.PERMIT}
    assert await semaphore.try_acquire() is None
    served: list[int] = []

    async def work(number: int) -> None:
        holding.append(await semaphore.acquire())
        served.append(number)

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(work(number)))
        await waiting(locks, "x", number + 1)
    for number in range(5):
        assert await holding.pop(len(holding) // 2).release() is True
        await tasks[number]
        snapshot = await locks.inspect("x")
        assert [holder.limit for holder in snapshot.holders] == [3] * 3
        assert len(snapshot.waiters) == 4 - number
    assert served == list(range(5))
    assert len({lease.token for lease in holding}) == 3
    for lease in holding:
        await lease.release()


@pytest.mark.limit
async def test_semaphore_stays_full_under_load(factory: MakeClient) -> None:
    """A semaphore of 3 under load is held by three at once until the end, and never by four."""
    locks, inside, highest = factory.connect(), 0, 0
    together = asyncio.Barrier(3)

    async def work() -> None:
        nonlocal inside, highest
        async with locks.semaphore("x", 3, timeout=SOON) as lease:
            inside += 1
            highest = max(highest, inside)
            assert inside <= 3
            await asyncio.wait_for(together.wait(), SOON)  # a semaphore that became a mutex never gets here
            lease.check()
            inside -= 1

    await asyncio.gather(*(work() for _ in range(12)))
    assert highest == 3


@pytest.mark.limit
async def test_one_task_may_hold_several_permits(locks: LocksView) -> None:
    """One thread or task may hold several permits; at the limit it waits like any other."""
    semaphore = locks.semaphore("x", 2)
    async with semaphore as one, semaphore as two:
        assert one.id != two.id
        assert await semaphore.try_acquire() is None
        with pytest.raises(LockTimeout, match=r"and 1 other$"):
            await semaphore.acquire(timeout=0.05)
        one.check()
        two.check()
    await wait_until_unclaimed(locks, "x")


@pytest.mark.limit
async def test_renewed_permit_stays_and_expired_permit_returns(locks: LocksView) -> None:
    """A renewed permit outlives its ttl; the permit of a holder that does not renew goes to the next waiter."""
    kept = await locks.semaphore("x", 2, ttl=0.9).acquire()
    dead = await locks.semaphore("x", 2, ttl=0.4, renew=False).acquire()
    async with background(locks.semaphore("x", 2).acquire(SOON)) as (task,):
        successor = await task
        assert dead.lost.is_set()
        assert dead.reason is LossReason.EXPIRED
        await renewed(kept)
        assert await kept.release() is True
        assert await successor.release() is True


@pytest.mark.limit
async def test_contenders_with_different_limits_respect_their_own(
    factory: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Each contender respects its own limit; one that waits logs the difference once, and `inspect` shows both limits."""
    old, new = factory.connect(owner="old"), factory.connect(owner="new")
    holding = [await old.semaphore("x", 2).acquire() for _ in range(2)]
    assert await old.semaphore("x", 2).try_acquire() is None
    holding.append(await new.semaphore("x", 4).acquire())
    assert (await new.inspect("x")).limits == (2, 4)

    def logged() -> list[str]:
        return [entry.getMessage() for entry in caplog.records if "limits" in entry.getMessage()]

    with caplog.at_level(logging.WARNING, logger="fencelock"):
        async with background(old.semaphore("x", 2).acquire(SOON)) as (waiter,):
            await eventually(logged, "the mismatch is logged")
            for number in range(3):
                with pytest.raises(LockTimeout):
                    await old.semaphore("x", 2).acquire(timeout=0.05)
                assert not waiter.done(), number
                assert len(logged()) == 1
            assert "2, 4" in logged()[0]
            await holding.pop(0).release()  # two are left, one of them with the other limit
            await asyncio.sleep(0.1)
            assert not waiter.done()
            await holding.pop(0).release()
            holding.append(await waiter)
    for lease in holding:
        assert await lease.release() is True
    assert len(logged()) == 1


@pytest.mark.client_side
@pytest.mark.limit
async def test_later_difference_of_limits_is_logged(factory: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """A client that has waited among equal limits logs a difference that a deploy brings later."""
    old, new = factory.connect(), factory.connect()
    lease = await old.semaphore("x", 1).acquire()
    with caplog.at_level(logging.WARNING, logger="fencelock"):
        with pytest.raises(LockTimeout):
            await old.semaphore("x", 1).acquire(timeout=0.3)
        assert "limits" not in caplog.text
        other = await new.semaphore("x", 2).acquire()

        async def logged() -> bool:
            return "limits" in caplog.text

        async def waits_and_logs() -> bool:
            with pytest.raises(LockTimeout):
                await old.semaphore("x", 1).acquire(timeout=0.1)
            return await logged()

        await eventually(waits_and_logs, "the mismatch is logged")
        await lease.release()
        await other.release()
