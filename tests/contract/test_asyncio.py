"""What is peculiar to tasks: cancellation at every await, timeouts that race with the grant, event loops."""

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
from tests.contract.factory import ClientFactory
from tests.contract.faults import Faulty
from tests.contract.runtimes import LeaseView, LocksView, LockView, client_of
from tests.contract.steps import background, cancel_at_every_step, is_free, renewed, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON

pytestmark = pytest.mark.runtime_name("aio")


async def test_cancelled_at_every_step_of_a_free_acquire(factory: ClientFactory, locks: LocksView) -> None:
    """Wherever an acquire is cancelled, nothing is left behind and the next one succeeds at once."""

    async def after() -> None:
        assert await is_free(locks, "x")

    async def work() -> Any:
        return await locks.lock("x").acquire()

    assert await cancel_at_every_step(work, after) >= 1
    async with factory.connect() as fresh:  # whose first step opens the database, in a thread

        async def first() -> Any:
            return await fresh.lock("x").acquire()

        assert await cancel_at_every_step(first, after) >= 1


async def test_cancelled_at_every_step_of_a_wait(factory: ClientFactory, locks: LocksView) -> None:
    """Wherever a waiting acquire is cancelled, its queue entry is removed."""
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


async def test_cancelled_at_every_step_of_a_hand_over(factory: ClientFactory, locks: LocksView) -> None:
    """Wherever a waiter is cancelled while it is handed the lock, either it has the lease or the next gets it."""
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


async def test_cancelled_at_every_step_of_a_release(locks: LocksView) -> None:
    """Wherever a release is cancelled, the lock is released all the same."""
    for steps in range(20):
        lease = await locks.lock("x").acquire()
        task = asyncio.ensure_future(lease.release())
        for _ in range(steps):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not steps:
            await lease.release()  # the task never began: nobody asked for a release yet
        assert await is_free(locks, "x")
        if finished:
            return


@pytest.mark.client_side
async def test_cancelled_release_on_an_engine_that_stalls(locks: LocksView) -> None:
    """A release that is cancelled while it is sent, or while it pauses for another try, still happens."""
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


async def test_cancelled_twice(factory: ClientFactory, locks: LocksView) -> None:
    """A second cancellation does not break off the clean-up of the first."""
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
async def test_cancelled_on_an_engine_that_hangs(locks: LocksView) -> None:
    """A cancellation comes out although nothing can be undone: an engine that does not answer is given up after a while."""
    faulty = Faulty.around(locks)
    faulty.slow("attempt", 1, 600)
    faulty.slow("abandon", 1, 600)
    task = asyncio.ensure_future(locks.lock("x").acquire())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, CLEANUP_SECONDS + SOON)


async def test_task_group_cancels_waiters(factory: ClientFactory, locks: LocksView) -> None:
    """When a task group cancels ten waiters, ten claims leave the queue."""
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


async def test_timeout_races_with_the_grant(factory: ClientFactory, locks: LocksView) -> None:
    """`asyncio.timeout` around acquire: either the caller has the lease or nobody does."""
    other = factory.connect()
    chance = random.Random(1)
    had, missed, span = 0, 0, 0.004
    for _ in range(80):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(chance.uniform(0, 0.004))
            await holder.release()

        async with background(release()) as (releasing,):
            lease = None
            try:
                async with asyncio.timeout(chance.uniform(0, 2 * span)):
                    lease = await locks.lock("x").acquire()
            except TimeoutError:
                missed += 1
            await releasing
        span *= 1.15 if lease is None else 0.87  # so that as many have it as not, on any engine and any machine
        if lease is not None:
            had += 1
            lease.check()
            assert not await is_free(other, "x")
            await lease.release()
        assert await is_free(other, "x")
    assert had
    assert missed


async def test_wait_for_races_with_the_grant(factory: ClientFactory, locks: LocksView) -> None:
    """`asyncio.wait_for` around acquire leaves nothing behind, either."""
    other = factory.connect()
    chance = random.Random(2)
    for _ in range(60):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(chance.uniform(0, 0.003))
            await holder.release()

        async with background(release()) as (releasing,):
            try:
                lease = await asyncio.wait_for(locks.lock("x").acquire(), chance.uniform(0, 0.004))
                await lease.release()
            except TimeoutError:
                pass
            await releasing
        assert await take(other, "x") > holder.token


async def test_own_timeout_races_with_the_grant(factory: ClientFactory, locks: LocksView) -> None:
    """The lock's own timeout racing with the grant: LockTimeout and nothing left, or a lease."""
    other = factory.connect()
    chance = random.Random(3)
    for _ in range(80):
        holder = await other.lock("x").acquire()

        async def release(holder: Any = holder) -> None:
            await asyncio.sleep(chance.uniform(0, 0.004))
            await holder.release()

        async with background(release()) as (releasing,):
            try:
                lease = await locks.lock("x").acquire(timeout=chance.uniform(0, 0.004))
                await lease.release()
            except LockTimeout:
                pass
            await releasing
        assert await is_free(other, "x")


@pytest.mark.client_side
async def test_body_is_cancelled_on_loss(locks: LocksView) -> None:
    """On loss the body is cancelled at its await, LeaseLost comes out, and the task is not left cancelled."""
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
    """A forced release cancels the body by the next renewal."""
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=1):
            await locks.force_release("x", reason="test")
            await asyncio.sleep(60)
    assert caught.value.reason == LossReason.GONE


@pytest.mark.client_side
async def test_cancel_from_outside_stays_cancelled(locks: LocksView) -> None:
    """A cancellation from outside comes out as CancelledError, and the lock is released."""

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
async def test_cancel_from_outside_and_loss(locks: LocksView) -> None:
    """When both happen, the cancellation from outside wins and carries a note of the loss."""
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
async def test_body_that_swallows_the_cancellation(locks: LocksView) -> None:
    """A body that swallows our cancellation and ends normally still gets LeaseLost."""
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
    """An error that the body raises instead wins and gets a note."""
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
async def test_nested_locks_lost_together(locks: LocksView) -> None:
    """Two nested locks that are lost at the same time end in one LeaseLost, and the task is not left cancelled."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False), locks.lock("y", ttl=0.3, renew=False):
            await asyncio.sleep(60)
    assert task.cancelling() == 0
    assert await take(locks, "x") > 0


@pytest.mark.client_side
async def test_inner_lock_lost(locks: LocksView) -> None:
    """When only the inner lock is lost, the outer block can catch it and go on."""
    async with locks.lock("x", ttl=30) as outer:
        with pytest.raises(LeaseLost):
            async with locks.lock("y", ttl=0.25, renew=False):
                await asyncio.sleep(60)
        await asyncio.sleep(0)
        outer.check()


@pytest.mark.client_side
async def test_lease_shared_by_tasks(locks: LocksView) -> None:
    """On loss, the tasks that are inside a block of the lease are cancelled, and no task that has left it."""
    await left_before_the_loss(locks, await locks.lock("x", ttl=1).acquire())


async def test_lease_of_a_block_shared_with_another_task(locks: LocksView) -> None:
    """The same, if the first block is the lock's own and the second is that of the lease it gave."""
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


async def test_lease_entered_again_and_left(locks: LocksView) -> None:
    """A task that left the inner one of its two blocks of a lease is still guarded, and so is one that came meanwhile."""
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
async def test_lease_lost_in_a_block_within_its_block(locks: LocksView) -> None:
    """A loss in the inner one of two blocks of a lease ends both with one LeaseLost, and the task is not left cancelled."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3, renew=False) as lease, lease:
            await asyncio.sleep(SOON)
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # not cancelled any more


@pytest.mark.client_side
async def test_block_left_by_another_task(locks: LocksView) -> None:
    """A block that one task entered and another leaves, as fixtures do, is left like any other."""
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
async def test_timeout_inside_the_block(locks: LocksView) -> None:
    """A timeout inside the body is the body's own affair."""
    async with locks.lock("x") as lease:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await asyncio.sleep(60)
        lease.check()


@pytest.mark.client_side
async def test_timeout_around_the_block(locks: LocksView) -> None:
    """A timeout around the block ends the body with TimeoutError and releases the lock."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with locks.lock("x"):
                await asyncio.sleep(60)
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_timeout_around_a_lost_block(locks: LocksView) -> None:
    """LeaseLost passes through timeouts that did not strike, on both sides of the block."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost):
        async with asyncio.timeout(60):
            async with locks.lock("x", ttl=0.25, renew=False):
                async with asyncio.timeout(60):
                    await asyncio.sleep(60)
    assert task.cancelling() == 0


async def test_loop_blocked_past_the_deadline(factory: ClientFactory, locks: LocksView, ttl_scale: TtlScale) -> None:
    """A holder whose loop was blocked past the deadline knows by its own clock, before it does anything else."""
    other = factory.connect()
    with pytest.raises(LeaseLost):
        async with locks.lock("x", ttl=0.3) as lease:
            ttl_scale.stall(0.5)
            assert lease.lost.is_set()
            assert lease.remaining == 0
            await asyncio.sleep(60)
    assert lease.reason is LossReason.EXPIRED
    assert await take(other, "x") > lease.token


async def test_loop_blocked_while_waiting(factory: ClientFactory, locks: LocksView, ttl_scale: TtlScale) -> None:
    """A waiter whose loop is blocked for longer than its ttl gets a good lease in the end."""
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


async def test_second_loop(factory: ClientFactory, locks: LocksView) -> None:
    """A client used from a second event loop says so; a new client works there."""
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


def test_client_in_a_second_event_loop(locks: LocksView) -> None:
    """A client outlives its event loop: in the next one it acquires, waits, renews and closes."""

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
def test_loop_closed_without_cancelling(locks: LocksView, held: bool) -> None:
    """After a loop that was closed with everything still pending there, leases of the next one are renewed."""
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


def test_loop_that_ends_under_its_leases(locks: LocksView) -> None:
    """Leases and waiters of a loop that was closed keep nobody out for longer than their ttl."""
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
async def test_lease_looked_at_by_a_thread(locks: LocksView) -> None:
    """A thread may look at a lease of a task's, and its loss reaches the task."""
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
async def test_loss_seen_by_a_thread_is_told_on_the_loop(factory: ClientFactory) -> None:
    """`on_lost` is called on the event loop, also if a thread that looked at the lease was the first to see its loss."""
    told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    locks = factory.connect(on_lost=lambda *_: told.set_result(threading.get_ident()))
    lease = await locks.lock("x", ttl=0.25, renew=False).acquire()

    def look() -> None:
        while not lease.lost.is_set():
            pass

    await asyncio.to_thread(look)
    assert await asyncio.wait_for(told, SOON) == threading.get_ident()


@pytest.mark.client_side
async def test_loss_is_told_before_the_client_is_closed(factory: ClientFactory, ttl_scale: TtlScale) -> None:
    """`on_lost` is called also if the renewer sees the loss in the iteration of the loop in which body and client end."""
    told: list[LossReason] = []
    with pytest.raises(LeaseLost):
        async with factory.connect(on_lost=lambda _, reason: told.append(reason)) as locks:
            async with locks.lock("x", ttl=0.25, renew=False):
                asyncio.get_running_loop().call_soon(ttl_scale.stall, 0.5)
                await asyncio.sleep(ttl_scale(0.3))  # over, when the loop goes on, like the lease
    assert told == [LossReason.EXPIRED]


async def test_many_waiters(locks: LocksView) -> None:
    """100 tasks that wait for one name are served one by one, in order."""
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


async def test_many_names(locks: LocksView) -> None:
    """150 tasks hold 150 names at once, all renewed."""

    async def work(number: int) -> None:
        async with locks.lock(f"name {number}", ttl=8) as lease:
            await renewed(lease)

    await asyncio.gather(*(work(number) for number in range(150)))
    assert [name async for name in locks.names()] == []
