"""asyncio only: cancellation at every await, timeouts that race with the grant, event loops."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

import fencelock
from fencelock import DifferentLoop, LeaseLost, LockTimeout, LossReason, aio
from fencelock.core.leftovers import CLEANUP_SECONDS
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LeaseView, LocksView, LockView, client_of
from tests.contract.steps import background, cancel_at_every_step, is_free, renewed, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON

pytestmark = pytest.mark.runtime_name("aio")


async def test_acquire_cancelled_at_any_step_leaves_no_claim(factory: MakeClient, locks: LocksView) -> None:
    """An acquire of a free lock that is cancelled at any step leaves no claim, and the next acquire succeeds at once."""

    async def after() -> None:
        assert await is_free(locks, "x")

    async def work() -> Any:
        return await locks.lock("x").acquire()

    assert await cancel_at_every_step(work, after) >= 1
    async with factory.connect() as fresh:  # the first step opens the database, in a thread

        async def first() -> Any:
            return await fresh.lock("x").acquire()

        assert await cancel_at_every_step(first, after) >= 1


async def test_waiter_cancelled_at_any_step_leaves_the_queue(factory: MakeClient, locks: LocksView) -> None:
    """An acquire that is cancelled at any step of its wait removes its queue entry."""
    other = factory.connect()
    holder = await other.lock("x").acquire()
    for steps in range(30):
        task = asyncio.ensure_future(locks.lock("x").acquire())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = await other.inspect("x")
        assert seen.waiters == ()
        assert seen.token == holder.token
    await holder.release()
    assert await is_free(other, "x")


async def test_waiter_cancelled_at_any_step_of_the_grant_keeps_or_passes_the_lock(
    factory: MakeClient, locks: LocksView
) -> None:
    """A waiter that is cancelled at any step of its grant either returns the lease or the next waiter gets the lock."""
    other = factory.connect()
    for steps in range(30):
        holder = await other.lock("x").acquire()
        task = asyncio.ensure_future(locks.lock("x").acquire())
        await waiting(other, "x")
        await holder.release()
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await (await task).release()
        except asyncio.CancelledError:
            pass
        assert await is_free(other, "x")


async def test_release_cancelled_at_any_step_still_releases(locks: LocksView) -> None:
    """A release that is cancelled at any step still frees the lock."""
    for steps in range(20):
        lease = await locks.lock("x").acquire()
        task = asyncio.ensure_future(lease.release())
        for _ in range(steps):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not steps:
            await lease.release()  # the task never began, so no release was requested
        assert await is_free(locks, "x")
        if finished:
            return


@pytest.mark.client_side
async def test_release_cancelled_during_a_stall_still_releases(locks: LocksView) -> None:
    """A release that is cancelled while it is sent, or between two tries, still frees the lock."""
    faulty = Faulty.around(locks)
    for fault in ("slow", "lose", "drop"):
        lease = await locks.lock("x").acquire()
        if fault == "slow":
            faulty.slow("release", 1, 0.1)
        else:
            getattr(faulty, fault)("release", 2)  # the first try after that comes without a pause
        task = asyncio.ensure_future(lease.release())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await is_free(locks, "x")


async def test_second_cancellation_does_not_stop_the_clean_up(factory: MakeClient, locks: LocksView) -> None:
    """A second cancellation does not stop the clean-up after the first one."""
    other = factory.connect()
    faulty = Faulty.around(locks)
    async with other.lock("x"):
        task = asyncio.ensure_future(locks.lock("x").acquire())
        await waiting(other, "x")
        faulty.slow("abandon", 1, 0.1)
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other.inspect("x")).waiters == ()


@pytest.mark.client_side
async def test_cancelled_acquire_returns_although_the_engine_hangs(locks: LocksView) -> None:
    """A cancelled acquire raises CancelledError after a bounded time, although the engine never replies to its clean-up."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 600)
    faulty.slow("abandon", 1, 600)
    task = asyncio.ensure_future(locks.lock("x").acquire())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, CLEANUP_SECONDS + SOON)


async def test_task_group_cancels_waiters(factory: MakeClient, locks: LocksView) -> None:
    """When a task group cancels ten waiters, all ten claims leave the queue."""
    other = factory.connect()
    async with other.lock("x"):
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(locks.lock("x").acquire())
                await waiting(other, "x", 10)
                raise ZeroDivisionError
        assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
        assert (await other.inspect("x")).waiters == ()
    assert await is_free(other, "x")


async def test_asyncio_timeout_that_races_with_the_grant(factory: MakeClient, locks: LocksView) -> None:
    """With `asyncio.timeout` around acquire, either the caller gets the lease or the lock is free."""
    other = factory.connect()
    rng = random.Random(1)
    granted, missed, span = 0, 0, 0.004
    for _ in range(80):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(rng.uniform(0, 0.004))
            await holder.release()

        async with background(release()) as (releasing,):
            lease = None
            try:
                async with asyncio.timeout(rng.uniform(0, 2 * span)):
                    lease = await locks.lock("x").acquire()
            except TimeoutError:
                missed += 1
            await releasing
        span *= 1.15 if lease is None else 0.87  # about as many acquires succeed as time out, on any engine and machine
        if lease is not None:
            granted += 1
            lease.check()
            assert not await is_free(other, "x")
            await lease.release()
        assert await is_free(other, "x")
    assert granted
    assert missed


async def test_asyncio_wait_for_that_races_with_the_grant(factory: MakeClient, locks: LocksView) -> None:
    """With `asyncio.wait_for` around acquire, either the caller gets the lease or the lock is free."""
    other = factory.connect()
    rng = random.Random(2)
    for _ in range(60):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(rng.uniform(0, 0.003))
            await holder.release()

        async with background(release()) as (releasing,):
            try:
                lease = await asyncio.wait_for(locks.lock("x").acquire(), rng.uniform(0, 0.004))
                await lease.release()
            except TimeoutError:
                pass
            await releasing
        assert await take(other, "x") > holder.token


async def test_acquire_timeout_that_races_with_the_grant(factory: MakeClient, locks: LocksView) -> None:
    """When acquire's timeout ends as the lock is granted, the caller gets a lease, or LockTimeout and the lock is free."""
    other = factory.connect()
    rng = random.Random(3)
    for _ in range(80):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(rng.uniform(0, 0.004))
            await holder.release()

        async with background(release()) as (releasing,):
            try:
                lease = await locks.lock("x").acquire(timeout=rng.uniform(0, 0.004))
                await lease.release()
            except LockTimeout:
                pass
            await releasing
        assert await is_free(other, "x")


@pytest.mark.client_side
async def test_body_is_cancelled_on_loss(locks: LocksView) -> None:
    """A loss cancels the body at its await; the block raises LeaseLost, and the task is not cancelled afterwards."""
    task = asyncio.current_task()
    assert task is not None
    begun = time.monotonic()
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=0.3, renew=False):
            await asyncio.sleep(60)
    assert time.monotonic() - begun < SOON
    assert caught.value.reason == LossReason.EXPIRED
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # not cancelled any more
    assert await take(locks, "x") > 0


async def test_body_is_cancelled_on_forced_release(locks: LocksView) -> None:
    """A forced release cancels the body at the next renewal at the latest."""
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=1):
            await locks.force_release("x", reason="test")
            await asyncio.sleep(60)
    assert caught.value.reason == LossReason.GONE


@pytest.mark.client_side
async def test_cancellation_from_outside_raises_cancelled_error(locks: LocksView) -> None:
    """A body that other code cancels raises CancelledError, and its lock is released."""

    async def work() -> None:
        async with locks.lock("x"):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    task.cancel("from outside")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_cancellation_from_outside_wins_over_the_loss(locks: LocksView) -> None:
    """If a body is cancelled from outside and loses its lease, it raises CancelledError with a note about the loss."""
    seen: list[BaseException] = []

    async def work() -> None:
        try:
            async with locks.lock("x", ttl=0.3, renew=False):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    task.cancel("from outside")
                    await asyncio.sleep(60)
        except BaseException as error:
            seen.append(error)
            raise

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "is lost" in seen[0].__notes__[0]
    assert task.cancelling() == 1


@pytest.mark.client_side
async def test_body_that_swallows_the_cancellation_gets_lease_lost(locks: LocksView) -> None:
    """A body that swallows the cancellation of a loss and ends normally still gets LeaseLost."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    assert task.cancelling() == 0


@pytest.mark.client_side
async def test_body_that_turns_the_cancellation_into_its_own_error(locks: LocksView) -> None:
    """An error that the body raises instead of the cancellation comes out, with a note about the loss."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ZeroDivisionError) as caught:
        async with locks.lock("x", ttl=0.3, renew=False):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ZeroDivisionError from None
    assert "is lost" in caught.value.__notes__[0]
    assert task.cancelling() == 0


@pytest.mark.client_side
async def test_nested_locks_lost_together_raise_one_lease_lost(locks: LocksView) -> None:
    """Two nested locks that are lost at the same time raise one LeaseLost, and the task is not cancelled afterwards."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False), locks.lock("y", ttl=0.3, renew=False):
            await asyncio.sleep(60)
    assert task.cancelling() == 0
    assert await take(locks, "x") > 0


@pytest.mark.client_side
async def test_loss_of_the_inner_lock_leaves_the_outer_block_running(locks: LocksView) -> None:
    """When only the inner lock is lost, the outer block can catch LeaseLost and continue."""
    async with locks.lock("x", ttl=30) as outer:
        with pytest.raises(LeaseLost):
            async with locks.lock("y", ttl=0.25, renew=False):
                await asyncio.sleep(60)
        await asyncio.sleep(0)
        outer.check()


@pytest.mark.client_side
async def test_loss_cancels_the_tasks_inside_a_block_of_the_lease(locks: LocksView) -> None:
    """A loss cancels the tasks that are inside a block of the lease, and no task that has left its block."""
    await left_before_the_loss(locks, await locks.lock("x", ttl=1).acquire())


@pytest.mark.client_side
async def test_loss_cancels_tasks_in_a_block_of_the_lock_and_in_one_of_its_lease(locks: LocksView) -> None:
    """A loss cancels one task in the block of the lock and another one in a block of its lease."""
    await left_before_the_loss(locks, locks.lock("x", ttl=1))


async def left_before_the_loss(locks: LocksView, first: LockView | LeaseView) -> None:
    """Have a task enter, another one enter the same lease, the first one leave, and the lease be lost."""
    entered: asyncio.Future[LeaseView] = asyncio.get_running_loop().create_future()
    both_in, left, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def leaves() -> None:
        async with first as lease:
            entered.set_result(lease)
            await both_in.wait()
        left.set()
        await lost.wait()
        for _ in range(5):  # a cancellation would come out here
            await asyncio.sleep(0.01)

    async def stays() -> None:
        async with await entered:
            both_in.set()
            await left.wait()
            await locks.force_release("x", reason="test")
            await asyncio.sleep(SOON)

    async with background(leaves(), stays()) as (gone, inside):
        with pytest.raises(LeaseLost) as caught:
            await inside
        assert caught.value.reason is LossReason.GONE
        assert inside.cancelling() == 0
        lost.set()
        await gone
        assert gone.cancelling() == 0


@pytest.mark.client_side
async def test_task_that_left_its_inner_block_is_still_cancelled_on_loss(locks: LocksView) -> None:
    """A loss cancels a task that has left the inner of its two blocks of a lease, and a task that entered in between."""
    task = asyncio.current_task()
    assert task is not None
    lease = await locks.lock("x", ttl=1).acquire()
    inside = asyncio.Event()

    async def visit() -> None:
        async with lease:
            inside.set()
            await asyncio.sleep(SOON)

    async with background(visit()) as (visitor,):
        with pytest.raises(LeaseLost):
            async with lease:
                async with lease:
                    await inside.wait()
                await locks.force_release("x", reason="test")
                await asyncio.sleep(SOON)
        assert task.cancelling() == 0
        with pytest.raises(LeaseLost):
            await visitor


@pytest.mark.client_side
async def test_loss_in_nested_blocks_of_one_lease_raises_lease_lost_once(locks: LocksView) -> None:
    """A loss inside two nested blocks of one lease ends both with one LeaseLost, and the task is not cancelled afterwards."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False) as lease, lease:
            await asyncio.sleep(SOON)
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # not cancelled any more


@pytest.mark.client_side
async def test_block_may_be_left_by_another_task(locks: LocksView) -> None:
    """A block that one task entered may be left by another one, as pytest fixtures do."""
    lease = await locks.lock("x", ttl=1).acquire()

    async def enter() -> None:
        await lease.__aenter__()

    async def leave() -> None:
        await lease.__aexit__(None, None, None)

    async with lease:
        await asyncio.create_task(enter())
        await asyncio.create_task(leave())
        lease.check()
        assert not await is_free(locks, "x")
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_timeout_inside_the_block_raises_timeout_error(locks: LocksView) -> None:
    """An `asyncio.timeout` inside the body raises TimeoutError there, and the lease continues."""
    async with locks.lock("x") as lease:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await asyncio.sleep(60)
        lease.check()


@pytest.mark.client_side
async def test_timeout_around_the_block_releases_the_lock(locks: LocksView) -> None:
    """An `asyncio.timeout` around the block ends the body with TimeoutError and releases the lock."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with locks.lock("x"):
                await asyncio.sleep(60)
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_lease_lost_passes_through_timeouts(locks: LocksView) -> None:
    """LeaseLost passes unchanged through an `asyncio.timeout` inside the block and one around it."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with asyncio.timeout(60):
            async with locks.lock("x", ttl=0.25, renew=False):
                async with asyncio.timeout(60):
                    await asyncio.sleep(60)
    assert task.cancelling() == 0


@pytest.mark.client_side
async def test_holder_sees_the_loss_after_its_loop_was_blocked(
    factory: MakeClient, locks: LocksView, ttl_scale: TtlScale
) -> None:
    """A holder whose event loop was blocked past the deadline sees the loss by its own clock before it does anything else."""
    other = factory.connect()
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3) as lease:
            ttl_scale.stall(0.5)
            assert lease.lost.is_set()
            assert lease.remaining == 0
            await asyncio.sleep(60)
    assert lease.reason is LossReason.EXPIRED
    assert await take(other, "x") > lease.token


async def test_waiter_gets_a_good_lease_after_its_loop_was_blocked(
    factory: MakeClient, locks: LocksView, ttl_scale: TtlScale
) -> None:
    """A waiter whose event loop was blocked for longer than its ttl still gets a lease that it can trust."""
    with fencelock.connect(factory.url) as others:
        holder = others.lock("x", ttl=5).acquire()
        async with background(locks.lock("x", ttl=0.6).acquire()) as (task,):
            await waiting(locks, "x")
            releasing = threading.Timer(ttl_scale(0.1), holder.release)  # in the middle of it
            releasing.start()
            ttl_scale.stall(0.8)
            releasing.join()
            lease = await asyncio.wait_for(task, SOON)
            assert lease.remaining > lease.ttl / 3
            await lease.release()


@pytest.mark.client_side
async def test_client_in_use_refuses_a_second_loop(factory: MakeClient, locks: LocksView) -> None:
    """A client that one event loop uses raises DifferentLoop in another one; a new client works there."""
    async with locks.lock("x"):
        outcome: list[Any] = []

        def elsewhere() -> None:
            async def use() -> None:
                try:
                    await locks.lock("y").acquire()
                except DifferentLoop as error:
                    outcome.append(error)
                async with aio.connect(factory.url) as fresh:
                    outcome.append(await fresh.lock("x").try_acquire())

            asyncio.run(use())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert isinstance(outcome[0], DifferentLoop)
        assert outcome[1] is None


def test_client_works_in_the_next_event_loop(locks: LocksView) -> None:
    """After its event loop has ended, a client acquires, waits, renews and closes in the next one."""

    async def first() -> None:
        lease = await locks.lock("x", ttl=5).acquire()
        with pytest.raises(LockTimeout):
            await locks.lock("x").acquire(timeout=0.05)
        await lease.release()

    async def last() -> None:
        await first()
        async with locks.lock("x", ttl=0.8) as lease:
            await renewed(lease)
        await locks.close()

    asyncio.run(first())
    asyncio.run(first())
    asyncio.run(last())


@pytest.mark.parametrize("held", [True, False])
def test_leases_are_renewed_after_a_loop_was_closed_with_pending_tasks(locks: LocksView, held: bool) -> None:
    """After an event loop was closed with tasks still pending, the client renews its leases in the next loop."""
    kept: list[Any] = []

    async def first() -> None:
        lease = await locks.lock("x", ttl=5).acquire()
        if held:
            kept.append(lease)
        else:
            await lease.release()
        await asyncio.sleep(0.01)

    async def second() -> None:
        async with locks.lock("y", ttl=0.8) as lease:
            await renewed(lease)
        await locks.close()

    for work in (first, second):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(work())
        loop.close()


def test_claims_of_a_closed_loop_end_with_their_ttl(locks: LocksView) -> None:
    """Leases and waiters of a closed event loop block other clients for one ttl at most."""
    kept: list[Any] = []

    async def first() -> None:
        kept.append(await locks.lock("x", ttl=0.5).acquire())
        kept.append(asyncio.create_task(locks.lock("x", ttl=0.5).acquire()))
        await asyncio.sleep(0.05)

    async def second() -> None:
        async with locks.lock("x", timeout=SOON) as lease:
            assert lease.token > kept[0].token
        assert kept[0].lost.is_set()
        await locks.close()

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.client_side
async def test_loss_seen_by_a_thread_cancels_the_task(locks: LocksView) -> None:
    """A thread may read a task's lease; if it is the first to see the loss, the task is cancelled."""
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False) as lease:

            def look() -> bool:
                end = time.monotonic() + SOON
                while not lease.lost.is_set() and time.monotonic() < end:
                    time.sleep(0.001)
                return lease.lost.is_set()

            assert await asyncio.to_thread(look)
            await asyncio.sleep(60)


@pytest.mark.client_side
async def test_on_lost_is_called_on_the_event_loop(factory: MakeClient) -> None:
    """`on_lost` is called on the event loop, even if a thread that read the lease was the first to see the loss."""
    losses: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    locks = factory.connect(on_lost=lambda *_: losses.set_result(threading.get_ident()))
    lease = await locks.lock("x", ttl=0.25, renew=False).acquire()

    def look() -> None:
        while not lease.lost.is_set():
            pass

    await asyncio.to_thread(look)
    assert await asyncio.wait_for(losses, SOON) == threading.get_ident()


@pytest.mark.client_side
async def test_on_lost_is_called_before_the_client_closes(factory: MakeClient, ttl_scale: TtlScale) -> None:
    """`on_lost` is called even if body and client end in the iteration of the loop in which the renewer sees the loss."""
    losses: list[LossReason] = []
    with pytest.raises(LeaseLost):
        async with factory.connect(on_lost=lambda _, reason: losses.append(reason)) as locks:
            async with locks.lock("x", ttl=0.25, renew=False):
                asyncio.get_running_loop().call_soon(ttl_scale.stall, 0.5)
                await asyncio.sleep(ttl_scale(0.3))  # when the loop continues, both the sleep and the lease are over
    assert losses == [LossReason.EXPIRED]


async def test_100_waiters_are_served_in_order(locks: LocksView) -> None:
    """100 tasks that wait for one name get it one after the other, in the order of arrival."""
    served: list[int] = []

    async def work(number: int) -> None:
        async with locks.lock("x", ttl=60) as lease:
            served.append(number)
            lease.check()

    async with locks.lock("x", ttl=60):
        tasks = []
        for number in range(100):
            tasks.append(asyncio.create_task(work(number)))
            await asyncio.sleep(0)
        await waiting(locks, "x", 100)
        order = [int(task.get_name().rpartition("-")[2]) for task in tasks]
        assert order == sorted(order)
    await asyncio.gather(*tasks)
    assert sorted(served) == list(range(100))
    if client_of(locks).engine.traits.engine == "memory":
        assert served == list(range(100))
    await wait_until_unclaimed(locks, "x")


async def test_150_names_are_held_and_renewed(locks: LocksView) -> None:
    """150 tasks hold 150 names at the same time, and the client renews all of them."""

    async def work(number: int) -> None:
        async with locks.lock(f"name {number}", ttl=8) as lease:
            await renewed(lease)

    await asyncio.gather(*(work(number) for number in range(150)))
    assert [name async for name in locks.names()] == []
