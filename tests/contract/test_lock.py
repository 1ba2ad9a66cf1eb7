"""What a lock and its lease do when nothing goes wrong, and when the lease ends by itself."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import threading
import time
import weakref
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest

import fencelock
from fencelock import ClientClosed, LeaseLost, LockTimeout, LossReason, StaleToken
from fencelock.core.clock import wall_us
from fencelock.core.lease import BaseLease
from fencelock.core.validation import SAFE
from fencelock.fences.core import TokenPair
from fencelock.fences.memory import MemoryFence
from fencelock.model import CORRECT
from fencelock.runtime.blocking import run_sync
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView, client_of, core_of
from tests.contract.steps import assert_notified_once, background, is_free, renewed, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually


async def test_one_holder_at_a_time(locks: LocksView) -> None:
    """While one caller holds the name no other gets it; after the release the next one does, with a higher token."""
    first = await locks.lock("x").acquire()
    assert not await is_free(locks, "x")
    assert await first.release() is True
    second = await locks.lock("x").try_acquire()
    assert second is not None
    assert second.token > first.token
    await second.release()


async def test_two_clients_exclude_each_other(factory: MakeClient) -> None:
    """Two clients exclude each other, and so do two lock objects of one client."""
    one, other = factory.connect(), factory.connect()
    async with one.lock("x"):
        assert not await is_free(other, "x")
        assert not await is_free(one, "x")
        assert await is_free(other, "y")


async def test_first_attempt_on_a_held_lock_waits(factory: MakeClient) -> None:
    """A client whose first request finds the lock held waits for it."""
    async with factory.connect().lock("x"):
        with pytest.raises(LockTimeout):
            await factory.connect().lock("x").acquire(timeout=0.05)


async def test_second_release_returns_false(locks: LocksView) -> None:
    """The first release returns True and the second False, and the next holder keeps its lock."""
    lease = await locks.lock("x").acquire()
    assert await lease.release() is True
    successor = await locks.lock("x").acquire()
    assert await lease.release() is False
    assert not await is_free(locks, "x")
    assert await successor.release() is True


async def test_timeout_raises_lock_timeout(factory: MakeClient, locks: LocksView) -> None:
    """LockTimeout carries the name, is a TimeoutError, is not raised before the timeout, and leaves no waiter."""
    async with factory.connect().lock("x"):
        begun = time.monotonic()
        with pytest.raises(LockTimeout) as caught:
            await locks.lock("x", timeout=0.2).acquire()
        assert time.monotonic() - begun >= 0.2
        assert caught.value.name == "x"
        assert isinstance(caught.value, TimeoutError)
        assert (await locks.inspect("x")).waiters == ()


@pytest.mark.client_side
async def test_body_does_not_run_after_a_timeout(factory: MakeClient, locks: LocksView) -> None:
    """The body of a block whose acquire timed out does not run."""
    async with factory.connect().lock("x"):
        with pytest.raises(LockTimeout):
            async with locks.lock("x", timeout=0.05):
                pytest.fail("the body ran without the lock")


@pytest.mark.client_side
async def test_acquire_overrides_the_locks_timeout(factory: MakeClient, locks: LocksView) -> None:
    """The timeout of `acquire` replaces that of the lock; 0 tries once."""
    lock = locks.lock("x", timeout=60)
    async with factory.connect().lock("x"):
        for timeout in (0, 0.01):
            with pytest.raises(LockTimeout):
                await lock.acquire(timeout=timeout)


async def test_waiter_is_granted_on_release(locks: LocksView) -> None:
    """A waiter is granted the lock when its holder releases it."""
    async with locks.lock("x") as first, background(locks.lock("x").acquire()) as (task,):
        await waiting(locks, "x")
        await first.release()
        second = await task
        assert second.token > first.token
        assert await second.release()


async def test_wait_for_several_ttls_ends_in_a_fresh_lease(locks: LocksView, ttl_scale: TtlScale) -> None:
    """A wait of several ttls ends in a lease with most of its ttl left."""
    holder = await locks.lock("x").acquire()
    async with background(locks.lock("x", ttl=0.6).acquire()) as (task,):
        await ttl_scale.sleep(1.3)
        assert not task.done()
        await holder.release()
        lease = await task
        assert lease.remaining > lease.ttl / 3
        lease.check()
        await lease.release()


async def test_lease_is_renewed_past_its_ttl(locks: LocksView) -> None:
    """A holder keeps its lease for longer than its ttl, and no other client gets the lock in that time."""
    async with locks.lock("x", ttl=0.8) as lease:
        end = time.monotonic() + 1.4 * lease.ttl
        while time.monotonic() < end:
            lease.check()
            assert not await is_free(locks, "x")
            await asyncio.sleep(0.05)
        assert 0 < lease.remaining < lease.ttl


@pytest.mark.client_side
async def test_remaining_counts_down(locks: LocksView) -> None:
    """`remaining` decreases, is below the ttl, and is 0 after the release."""
    lease = await locks.lock("x", ttl=30).acquire()
    first = lease.remaining
    await asyncio.sleep(0.02)
    assert 0 < lease.remaining < first < 30
    await lease.release()
    assert lease.remaining == 0
    assert not lease.lost.is_set()
    with pytest.raises(LeaseLost):
        lease.check()


async def test_lease_without_renewal_expires(locks: LocksView) -> None:
    """A lease with `renew=False` expires, its holder sees that first, and then the next client gets the name."""
    lease = await locks.lock("x", ttl=0.3, renew=False).acquire()
    successor = await locks.lock("x").acquire(timeout=SOON)
    assert lease.lost.is_set()
    assert lease.reason is LossReason.EXPIRED
    assert successor.token > lease.token
    assert await lease.release() is False
    assert not await is_free(locks, "x")
    await successor.release()


async def test_renew_restarts_the_ttl(locks: LocksView, ttl_scale: TtlScale) -> None:
    """`renew()` restarts the ttl, also of a lease with `renew=False`."""
    lease = await locks.lock("x", ttl=1, renew=False).acquire()
    await ttl_scale.sleep(0.3)
    before = lease.remaining
    await lease.renew()
    assert lease.remaining > before
    await lease.release()
    with pytest.raises(LeaseLost):
        await lease.renew()


@pytest.mark.client_side
async def test_lost_wait_returns_whether_the_lease_was_lost(locks: LocksView) -> None:
    """`lost.wait` returns False after its timeout, True on a loss and False on a release."""
    lease = await locks.lock("x", ttl=0.5, renew=False).acquire()
    assert await lease.lost.wait(timeout=0.01) is False
    assert await lease.lost.wait(timeout=SOON) is True
    lease = await locks.lock("y").acquire()
    async with background(lease.lost.wait()) as (task,):
        await asyncio.sleep(0.05)
        await lease.release()
        assert await task is False


@pytest.mark.client_side
@pytest.mark.parametrize("timeout", [float("inf"), 1e30])
async def test_lost_wait_accepts_a_very_long_timeout(locks: LocksView, timeout: float) -> None:
    """`lost.wait` with a very long timeout waits for the loss."""
    lease = await locks.lock("x", ttl=0.25, renew=False).acquire()
    assert await lease.lost.wait(timeout=timeout) is True


@pytest.mark.client_side
async def test_lease_is_lost_at_max_hold(locks: LocksView) -> None:
    """A lease is lost at max_hold with that reason, and the name is free as soon as the block ends."""
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=60, max_hold=0.2) as lease:
            assert await lease.lost.wait(timeout=SOON)
    assert caught.value.reason == LossReason.MAX_HOLD == lease.reason
    assert caught.value.name == "x"
    assert await take(locks, "x") > lease.token


@pytest.mark.client_side
async def test_max_hold_counts_across_renewals(locks: LocksView) -> None:
    """A lease with max_hold is renewed past its ttl and lost at max_hold."""
    lease = await locks.lock("x", ttl=0.6, max_hold=1.1).acquire()
    await renewed(lease)
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.MAX_HOLD
    assert await lease.release() is False
    assert await take(locks, "x") > lease.token


async def test_force_release_ends_the_lease(locks: LocksView, caplog: pytest.LogCaptureFixture) -> None:
    """A forced release needs a reason, is logged, ends the lease by its next renewal, and the next token is higher."""
    lease = await locks.lock("x", ttl=1).acquire()
    with pytest.raises(ValueError, match="reason"):
        await locks.force_release("x", reason=" ")
    lease.check()
    with caplog.at_level(logging.WARNING, logger="fencelock"):
        assert await locks.force_release("x", reason="the operator's wish") == 1
    assert "the operator's wish" in caplog.text
    successor = await locks.lock("x").acquire(timeout=SOON)
    assert successor.token > lease.token + 1
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE
    assert await lease.release() is False
    assert not await is_free(locks, "x")
    await successor.release()
    assert await locks.force_release("x", reason="nobody is there") == 0


async def test_leaving_the_block_reports_a_forced_release(factory: MakeClient) -> None:
    """A holder whose lock was released by force before its next renewal gets LeaseLost as it leaves its block."""
    losses: list[tuple[object, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: losses.append((lease, reason)))
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x") as lease:
            await locks.force_release("x", reason="test")
    assert caught.value.reason is LossReason.GONE
    assert lease.reason is LossReason.GONE
    other = await locks.lock("x").acquire(timeout=SOON)
    await locks.force_release("x", reason="test")
    assert await other.release() is False
    with pytest.raises(LeaseLost):
        other.check()

    async def notified() -> bool:
        return len(losses) == 2

    await eventually(notified, "on_lost is called")
    assert {reason for _, reason in losses} == {LossReason.GONE}


async def test_force_release_grants_the_next_waiter(locks: LocksView) -> None:
    """A forced release grants the lock to the next waiter."""
    lease = await locks.lock("x").acquire()
    async with background(locks.lock("x").acquire(SOON)) as (task,):
        await waiting(locks, "x")
        await locks.force_release("x", reason="test")
        successor = await task
        assert successor.token > lease.token  # no more than that where a queue entry has its token from the beginning
        await successor.release()
    await lease.release()


@pytest.mark.client_side
async def test_on_lost_is_called_once(factory: MakeClient) -> None:
    """`on_lost` is called once for a lost lease and never for a released one."""
    losses: list[tuple[str, LossReason]] = []
    locks = factory.connect(on_lost=lambda lease, reason: losses.append((lease.name, reason)))
    async with locks.lock("released"):
        pass
    lease = await locks.lock("x", ttl=0.25, renew=False).acquire()
    assert await lease.lost.wait(timeout=SOON)
    for _ in range(3):
        assert lease.lost.is_set()
    await assert_notified_once(losses)
    assert losses == [("x", LossReason.EXPIRED)]


@pytest.mark.client_side
async def test_error_in_on_lost_is_logged(factory: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """An error in `on_lost` is logged; the other leases are renewed and their losses reported."""
    errors = {"one": RuntimeError("in on_lost"), "other": SystemExit(3)}
    losses: list[str] = []

    def on_lost(lease: Any, reason: LossReason) -> None:
        losses.append(lease.name)
        raise errors[lease.name]

    locks = factory.connect(on_lost=on_lost)
    kept = await locks.lock("kept", ttl=1.2).acquire()
    for name in errors:
        short = await locks.lock(name, ttl=0.25, renew=False).acquire()
        assert await short.lost.wait(SOON)
        assert short.reason is LossReason.EXPIRED

    async def logged() -> bool:
        return caplog.text.count("on_lost failed") == 2

    await eventually(logged, "both errors are logged")
    await renewed(kept)
    await kept.release()
    assert losses == list(errors)


@pytest.mark.client_side
@pytest.mark.runtime_name("blocking")
async def test_on_lost_that_takes_long(factory: MakeClient) -> None:
    """A slow `on_lost` does not delay the renewal of other leases (in asyncio it runs on the caller's loop)."""
    begun, enough = threading.Event(), threading.Event()

    def on_lost(lease: Any, reason: LossReason) -> None:
        begun.set()
        enough.wait(60)

    locks = factory.connect(on_lost=on_lost)
    kept = await locks.lock("kept", ttl=0.9).acquire()
    short = await locks.lock("short", ttl=0.25, renew=False).acquire()
    assert await asyncio.to_thread(begun.wait, SOON)
    try:
        await renewed(kept, 2)
    finally:
        enough.set()
    await kept.release()
    assert short.reason is LossReason.EXPIRED


@pytest.mark.client_side
@pytest.mark.runtime_name("blocking")
async def test_on_lost_that_blocks_does_not_delay_the_next(factory: MakeClient) -> None:
    """Each call of `on_lost` has its own thread: one that blocks does not delay the next one."""
    together, passed = threading.Barrier(4), list[str]()

    def on_lost(lease: Any, _: LossReason) -> None:
        together.wait(SOON)
        passed.append(lease.name)

    locks = factory.connect(on_lost=on_lost)
    leases = [await locks.lock(name, ttl=0.9).acquire() for name in "abcd"]
    for lease in leases:  # one batch of renewals finds all losses
        await locks.force_release(lease.name, reason="test")

    async def all_of_them() -> bool:
        return sorted(passed) == list("abcd")

    await eventually(all_of_them, "all calls have met")
    assert all(lease.reason is LossReason.GONE for lease in leases)


async def test_timeout_names_the_holder(factory: MakeClient, locks: LocksView) -> None:
    """LockTimeout names the holder of the lock."""
    async with factory.connect(owner="nightly-report").lock("x") as lease:
        with pytest.raises(LockTimeout, match=rf"held by nightly-report \(token {lease.token}"):
            await locks.lock("x", timeout=0.1).acquire()


@pytest.mark.client_side
async def test_timeout_says_that_this_process_is_the_holder(locks: LocksView) -> None:
    """LockTimeout says that this client itself is the holder."""
    lease = await locks.lock("x").acquire()
    with pytest.raises(LockTimeout, match=rf"\(this process, token {lease.token}"):
        await locks.lock("x", timeout=0.1).acquire()
    await lease.release()


@pytest.mark.client_side
async def test_leaving_the_block_after_a_loss_raises_lease_lost(locks: LocksView, ttl_scale: TtlScale) -> None:
    """Leaving a block whose lease was lost raises LeaseLost, even if the body ended normally."""
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=0.25, renew=False):
            ttl_scale.stall(0.3)  # no await: nothing can interrupt this body
    assert caught.value.reason == LossReason.EXPIRED


@pytest.mark.client_side
async def test_error_in_the_body_releases_the_lock(locks: LocksView) -> None:
    """An error in the body comes out unchanged, and the lock is released."""
    with pytest.raises(ZeroDivisionError) as caught:
        async with locks.lock("x"):
            raise ZeroDivisionError
    assert not getattr(caught.value, "__notes__", [])
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_error_in_the_body_wins_over_the_loss(locks: LocksView, ttl_scale: TtlScale) -> None:
    """The error of the body comes out instead of LeaseLost, with a note about the loss."""
    with pytest.raises(ZeroDivisionError) as caught:
        async with locks.lock("x", ttl=0.25, renew=False):
            ttl_scale.stall(0.3)
            raise ZeroDivisionError
    assert "is lost" in caught.value.__notes__[0]


@pytest.mark.client_side
async def test_lease_lost_of_the_bodys_check_comes_out_once(locks: LocksView, ttl_scale: TtlScale) -> None:
    """The LeaseLost that `check` raises in the body comes out once, without a note."""
    with pytest.raises(LeaseLost) as caught:
        async with locks.lock("x", ttl=0.25, renew=False) as lease:
            ttl_scale.stall(0.3)
            lease.check()
    assert not getattr(caught.value, "__notes__", [])


@pytest.mark.client_side
async def test_lease_as_a_context_manager(locks: LocksView) -> None:
    """A lease that `acquire` returned can be used in a `with` block."""
    async with await locks.lock("x").acquire() as lease:
        lease.check()
    assert await lease.release() is False
    assert await is_free(locks, "x")


async def test_release_inside_the_block_touches_no_successor(locks: LocksView) -> None:
    """A lease may be released inside its block; leaving the block then raises nothing, and the next holder keeps its lock."""
    async with locks.lock("x") as lease:
        await lease.release()
        successor = await locks.lock("x").acquire(timeout=SOON)
    assert await successor.release() is True


@pytest.mark.client_side
async def test_lock_object_entered_twice_releases_each_lease_once(locks: LocksView, ttl_scale: TtlScale) -> None:
    """A lock object that was entered again after a loss releases the right lease at the end of each block."""
    lock = locks.lock("x", ttl=0.25, renew=False)
    with pytest.raises(LeaseLost):
        async with lock as outer:
            ttl_scale.stall(0.3)
            async with lock as inner:
                assert inner.token > outer.token
            assert await inner.release() is False


async def test_another_task_may_release_the_lease(locks: LocksView) -> None:
    """A lease belongs to the object: another task or thread may release it."""
    lease = await locks.lock("x").acquire()

    async def elsewhere() -> bool:
        return await lease.release()

    assert await asyncio.create_task(elsewhere()) is True
    assert await is_free(locks, "x")


async def test_lease_outlives_the_task_that_acquired_it(locks: LocksView) -> None:
    """A lease outlives the task or thread that acquired it, and the client still renews it."""

    async def acquire() -> Any:
        return await locks.lock("x", ttl=0.8).acquire()

    lease = await asyncio.create_task(acquire())
    await renewed(lease, 2)
    await lease.release()


@pytest.mark.client_side
async def test_dropped_lease_warns_and_expires(locks: LocksView) -> None:
    """A lease without a reference causes a warning, is no longer renewed, and expires; then another client gets the name."""

    async def acquire_and_drop() -> int:
        lease = await locks.lock("x", ttl=1.5).acquire()
        return lease.token

    with pytest.warns(ResourceWarning, match="'x'.*dropped without release"):  # noqa: PT031
        token = await asyncio.create_task(acquire_and_drop())
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0.05)
    assert await take(locks, "x") > token


@pytest.mark.client_side
async def test_dropped_leases_do_not_stop_the_renewer(locks: LocksView, ttl_scale: TtlScale) -> None:
    """Dropped leases do not stop the renewal of other leases."""
    kept = await locks.lock("kept", ttl=1.5).acquire()
    with pytest.warns(ResourceWarning):  # noqa: PT031
        for number in range(20):
            await locks.lock(f"dropped {number}", ttl=0.25).acquire()
            await asyncio.sleep(0.02)
        gc.collect()
        await ttl_scale.sleep(0.3)  # they run out
    await renewed(kept)
    await kept.release()
    again = await locks.lock("kept", ttl=1).acquire()
    await renewed(again)
    await again.release()


@pytest.mark.client_side
async def test_reentrant_lock_is_free_after_the_last_release(locks: LocksView) -> None:
    """The holder may acquire a reentrant lock again; it is free only after the last release."""
    lock = locks.lock("x", reentrant=True)
    async with lock as outer:
        async with locks.lock("x", reentrant=True) as inner:
            assert inner.token == outer.token
        outer.check()
        again = await lock.try_acquire()
        assert again is not None
        assert await again.release() is True
        assert not await is_free(locks, "x")
    assert await is_free(locks, "x")


@pytest.mark.client_side
async def test_reentrant_lock_excludes_other_tasks(locks: LocksView) -> None:
    """Another task or thread does not get a held reentrant lock, even if it reuses the number of a thread that ended."""
    lock = locks.lock("x", reentrant=True)

    async def other() -> Any:
        return await lock.try_acquire()

    async with lock:
        assert await asyncio.create_task(other()) is None
    lease = await asyncio.create_task(lock.acquire())
    for _ in range(5):  # threads' numbers are used again as soon as they are free
        assert await asyncio.create_task(other()) is None
    await lease.release()


@pytest.mark.client_side
async def test_client_forgets_released_reentrant_leases(locks: LocksView) -> None:
    """The client keeps no data about a reentrant lease after its release."""

    async def use(number: int) -> None:
        async with locks.lock(f"x{number}", reentrant=True):
            pass

    for number in range(20):
        await asyncio.create_task(use(number))
    gc.collect()
    assert len(client_of(locks).reentrant) <= 1


@pytest.mark.client_side
async def test_client_forgets_dropped_reentrant_leases(locks: LocksView) -> None:
    """The client keeps neither a dropped reentrant lease nor the task that held it, and the lock can be acquired again."""

    tasks: list[weakref.ref[Any]] = []

    async def drop(number: int) -> None:
        tasks.append(weakref.ref(asyncio.current_task()))
        await locks.lock(f"x{number}", ttl=30, reentrant=True).acquire()

    with pytest.warns(ResourceWarning, match="dropped without release"):  # noqa: PT031
        for number in range(10):
            await asyncio.create_task(drop(number))
        await asyncio.sleep(0.05)
        gc.collect()
    assert not client_of(locks).reentrant
    assert not [task for task in tasks if task() is not None]


@pytest.mark.client_side
async def test_holder_that_dropped_a_reentrant_lease_waits_for_its_end(locks: LocksView) -> None:
    """A task that dropped its reentrant lease waits until it has expired, and nested acquires then return the new lease."""
    lock = locks.lock("x", ttl=0.5, reentrant=True)
    with pytest.warns(ResourceWarning, match="dropped without release"):  # noqa: PT031
        await lock.acquire()
        await asyncio.sleep(0.05)
        gc.collect()
    async with locks.lock("x", timeout=SOON, reentrant=True) as lease:
        gc.collect()
        again = await lock.acquire(timeout=0)
        assert again.token == lease.token
        await again.release()


@pytest.mark.client_side
@pytest.mark.runtime_name("blocking")
async def test_reentrant_acquire_that_races_with_a_release_returns_a_held_lease(
    locks: LocksView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nested acquire that runs while another thread releases the same lease returns a lease that holds the lock."""
    lock = locks.lock("x", reentrant=True)
    first = await lock.acquire()
    again = BaseLease._reenter

    def released_meanwhile(self: BaseLease) -> bool:
        monkeypatch.undo()
        run_sync(self._release())
        return again(self)

    monkeypatch.setattr(BaseLease, "_reenter", released_meanwhile)
    second = await lock.acquire(timeout=SOON)
    second.check()
    assert second.token > first.token
    assert await second.release()


@pytest.mark.client_side
async def test_lock_is_not_reentrant_by_default(locks: LocksView) -> None:
    """Without `reentrant` the holder itself does not get the lock again."""
    lock = locks.lock("x")
    async with lock:
        assert await lock.try_acquire() is None


async def test_purpose_correctness_is_refused_where_tokens_could_repeat(locks: LocksView) -> None:
    """`purpose="correctness"` is refused when the lock is made, exactly on engines whose tokens could repeat."""
    if locks.traits.guarantee in CORRECT:
        async with locks.lock("x", purpose="correctness"):
            pass
    else:
        with pytest.raises(fencelock.GuaranteeUnavailable) as caught:
            locks.lock("x", purpose="correctness")
        assert caught.value.name == "x"
        assert SAFE in str(caught.value)
    advised = f"{locks.traits.engine.partition('+')[0]}:" in SAFE.replace(",", "").split()
    assert advised is (locks.traits.guarantee in CORRECT)
    with pytest.raises(ValueError, match="purpose"):
        locks.lock("x", purpose="fun")


async def test_inspect_shows_for_how_long_the_lock_is_held(locks: LocksView) -> None:
    """`held_for` of a holder counts from the grant."""
    begun = time.monotonic()

    async def held_for() -> float | None:
        (holder,) = (await locks.inspect("x")).holders
        return holder.held_for

    async def longer_than(before: float) -> bool:
        return (await held_for() or 0.0) > before

    async with locks.lock("x"):
        first = await held_for()
        assert first is not None
        assert 0 <= first <= time.monotonic() - begun + 1.5  # PostgreSQL's tokens may lag behind the clock by a second
        await eventually(lambda: longer_than(first), "it is held for longer")


async def test_inspect_shows_holders_and_waiters(factory: MakeClient) -> None:
    """`inspect` shows holders and waiters in order, with owners, tokens and times."""
    locks = factory.connect(owner="the holder")
    assert await locks.inspect("x") == fencelock.Snapshot("x")
    lease = await locks.lock("x", ttl=30).acquire()
    others = [factory.connect(owner=f"waiter {number}") for number in range(3)]
    tasks = []
    for number, other in enumerate(others):
        tasks.append(asyncio.create_task(other.lock("x", ttl=20).acquire()))
        await waiting(locks, "x", number + 1)
    seen = await locks.inspect("x")
    assert [holder.owner for holder in seen.holders] == ["the holder"]
    assert seen.token == seen.holders[0].token == lease.token
    assert 0 < seen.holders[0].expires_in <= 30.01
    assert [waiter.owner for waiter in seen.waiters] == ["waiter 0", "waiter 1", "waiter 2"]
    await lease.release()
    for granted in asyncio.as_completed(tasks):  # in their order only where the engine is fair
        await (await granted).release()
    assert await locks.inspect("x") == fencelock.Snapshot("x")


@pytest.mark.client_side
async def test_default_owner_names_host_and_process(locks: LocksView) -> None:
    """The default owner names this host and process."""
    async with locks.lock("x") as lease:
        assert lease.owner == locks.owner == (await locks.inspect("x")).holders[0].owner
        assert lease.owner.endswith(f":{os.getpid()}")


async def test_close_releases_leases_and_refuses_later_calls(factory: MakeClient) -> None:
    """close() releases all leases and marks them lost; later calls raise ClientClosed, and a second close() does nothing."""
    locks, other = factory.connect(), factory.connect()
    lease = await locks.lock("x").acquire()
    await locks.close()
    await locks.close()
    assert lease.lost.is_set()
    assert lease.reason is LossReason.CLOSED
    assert await lease.release() is False
    assert await is_free(other, "x")
    for use in (locks.lock("y").acquire, locks.lock("y").try_acquire, lambda: locks.inspect("y")):
        with pytest.raises(ClientClosed):
            await use()


async def test_close_releases_a_lease_lost_at_max_hold(factory: MakeClient) -> None:
    """close() also releases a lease that was lost at max_hold and never released."""
    locks, other = factory.connect(), factory.connect()
    lease = await locks.lock("x", ttl=60, max_hold=0.2).acquire()
    assert await lease.lost.wait(timeout=SOON)
    assert not await is_free(other, "x")
    await locks.close()
    assert await is_free(other, "x")
    assert lease.reason is LossReason.MAX_HOLD
    async with other.lock("x"):
        assert await lease.release() is False
        assert not await is_free(other, "x")


@pytest.mark.client_side
async def test_close_does_not_release_twice_after_max_hold(factory: MakeClient) -> None:
    """A lease that was lost at max_hold and released is not released again by close(): another client may hold the lock."""
    locks, other = factory.connect(), factory.connect()
    lease = await locks.lock("x", ttl=60, max_hold=0.2).acquire()
    assert await lease.lost.wait(timeout=SOON)
    assert await lease.release() is False
    assert client_of(locks).renewer.grants() == []
    async with other.lock("x"):
        await locks.close()
        assert not await is_free(other, "x")


async def test_close_ends_waiters(factory: MakeClient) -> None:
    """A waiter gets ClientClosed when its client is closed, and its claim is removed."""
    locks, other = factory.connect(), factory.connect()
    holder = await other.lock("x").acquire()
    async with background(locks.lock("x").acquire()) as (task,):
        await waiting(other, "x")
        await locks.close()
        assert (await other.inspect("x")).waiters == ()
        with pytest.raises((ClientClosed, asyncio.CancelledError)):
            await asyncio.wait_for(task, SOON)
    await holder.release()
    assert await is_free(other, "x")


async def test_close_during_acquires_leaves_no_claim(factory: MakeClient) -> None:
    """close() leaves no claim of acquires that are granted but not yet returned, or about to enqueue again."""
    observer = factory.connect()
    for _ in range(8):
        locks = factory.connect(ttl=60)

        async def take_turns(locks: LocksView = locks) -> None:
            while True:
                async with locks.lock("x"):
                    await asyncio.sleep(0)

        async with background(*[take_turns() for _ in range(6)]) as tasks:
            await asyncio.sleep(0.02 * random.random())
            await locks.close()
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SOON)
        assert {type(end) for end in ends} <= {ClientClosed, LeaseLost}
        await wait_until_unclaimed(observer, "x")


@pytest.mark.client_side
async def test_leaving_the_block_of_a_client_closes_it(factory: MakeClient) -> None:
    """Leaving the `with` block of a client closes the client."""
    other = factory.connect()
    async with factory.connect() as locks:
        lease = await locks.lock("x").acquire()
    assert lease.reason is LossReason.CLOSED
    await wait_until_unclaimed(other, "x")
    with pytest.raises(ClientClosed):
        await locks.inspect("x")


@pytest.mark.client_side
async def test_decorated_function_holds_the_lock_of_its_arguments(factory: MakeClient, locks: LocksView) -> None:
    """Each call of a decorated function holds the lock that its arguments name."""

    async def plain(day: str, copies: int = 1) -> tuple[str, int]:
        return day, copies

    report = locks.locked("report:{day}", timeout=5)(plain)
    assert await report("monday") == ("monday", 1)
    assert await report(day="tuesday", copies=2) == ("tuesday", 2)
    async with factory.connect().lock("report:friday"):
        late = locks.locked("report:{day}", timeout=0.01)(plain)
        with pytest.raises(LockTimeout):
            await late("friday")
    with pytest.raises(fencelock.InvalidName, match="no argument 'week'"):
        locks.locked("report:{week}")(plain)


async def test_long_lease_is_renewed_beside_many_short_ones(locks: LocksView) -> None:
    """Many short leases in other threads or tasks do not stop the renewal of a long one."""
    stays = await locks.lock("stays", ttl=1.5).acquire()
    enough = False

    async def churn(number: int) -> None:
        while not enough:
            with suppress(LeaseLost):  # a busy machine may keep one from running for its whole ttl
                async with locks.lock(f"churn {number}", ttl=0.25):
                    pass
            await asyncio.sleep(0.03)  # two hundred a second are many enough

    churning = asyncio.gather(*(churn(number) for number in range(8)))
    await renewed(stays, 2)
    enough = True
    await churning
    await renewed(stays)
    await stays.release()


@pytest.mark.client_side
@pytest.mark.parametrize("ttl", [0.8, 6])
async def test_renewer_ends_and_starts_again(locks: LocksView, ttl: float) -> None:
    """After short leases the next lease is renewed, and the renewer ends when no lease follows."""
    for _ in range(20):
        async with locks.lock("x", ttl=ttl):
            pass
    async with locks.lock("x", ttl=0.8) as lease:
        await renewed(lease)
    renewer = client_of(locks).renewer

    async def ended() -> bool:
        return renewer._wake is None

    await eventually(ended, "the renewer has ended")


@pytest.mark.client_side
async def test_acquire_fails_if_the_renewer_cannot_start(locks: LocksView, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the renewer's thread cannot be started, acquire raises and removes its claim."""
    runtime = client_of(locks).runtime

    def spawn(work: Any, name: str) -> None:
        work.close()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "spawn", spawn)
        with pytest.raises(RuntimeError, match="new thread"):
            await locks.lock("x", ttl=0.8).acquire()
    lease = await locks.lock("x", ttl=0.8).try_acquire()
    assert lease is not None
    await renewed(lease)
    await lease.release()


@pytest.mark.client_side
async def test_renewal_that_cannot_start_is_retried(locks: LocksView, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal whose thread cannot be started is tried again, and the lease is kept."""
    runtime = client_of(locks).runtime
    lease = await locks.lock("x", ttl=0.9).acquire()
    real, failures = runtime.spawn, list[str]()

    def spawn(work: Any, name: str) -> None:
        if len(failures) < 2:
            failures.append(name)
            work.close()
            raise RuntimeError("can't start new thread")
        real(work, name)

    monkeypatch.setattr(runtime, "spawn", spawn)
    await renewed(lease)
    await lease.release()
    assert len(failures) == 2


@pytest.mark.client_side
async def test_repr_of_a_lease_shows_name_token_and_state(locks: LocksView) -> None:
    """The repr of a lease shows its name, token and state."""
    lease = await locks.lock("x").acquire()
    assert repr(core_of(lease)).startswith(f"<Lease 'x' token={lease.token} ")
    await lease.release()
    assert "released" in repr(core_of(lease))


async def test_token_is_exact_in_json(locks: LocksView) -> None:
    """Tokens are positive and below 2^53, so that JSON keeps them exactly."""
    async with locks.lock("x") as lease:
        assert 0 < lease.token < 2**53


async def test_released_name_is_not_listed(locks: LocksView) -> None:
    """`names` lists nothing after the last release."""
    for number in range(5):
        async with locks.lock(f"n{number}"):
            pass
    assert [name async for name in locks.names()] == []


@pytest.mark.runtime_name("blocking")
async def test_fence_accepts_tokens_after_a_move_between_engines(factory: MakeClient) -> None:
    """The first token of a namespace is a reading of the clock, so a fence accepts it after a move from another engine."""
    fence = MemoryFence()
    before = TokenPair(wall_us(), "0" * 32)  # what any engine would have granted a moment ago
    fence.enter(before, "account")
    lease = await factory.connect(namespace=f"moved-{uuid4().hex}").lock("account").acquire()
    fence.enter(TokenPair(lease.token, lease.id), "account")
    after = TokenPair(wall_us() + 1_000_000, "1" * 32)  # what any engine would grant a moment later
    fence.enter(after, "account")
    with pytest.raises(StaleToken):
        fence.enter(before, "account")
    await lease.release()
