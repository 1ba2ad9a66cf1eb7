"""Multi-locks: several names, all or nothing, lost and released together."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from fencelock import (
    ClientClosed,
    EngineUnavailable,
    InvalidArgument,
    InvalidName,
    InvalidType,
    LeaseLost,
    LockTimeout,
    LossReason,
    Mode,
    ReleaseFailed,
    WouldDeadlock,
)
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView
from tests.contract.steps import (
    assert_notified_once,
    background,
    cancel_at_every_step,
    is_free,
    renewed,
    wait_until_unclaimed,
    waiting,
)
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually

ORDER = ["Z", "a", "a b", "z", "é", "日本", "\uffef", "🔒"]
"""By UTF-8 bytes; by UTF-16 units, as in Java and JavaScript, the last two would be in the other order."""


@pytest.mark.client_side
async def test_names_are_sorted_by_their_bytes_and_duplicates_removed(locks: LocksView) -> None:
    """A multi-lock sorts its names by their bytes and removes duplicates, so all contenders acquire in one order."""
    assert locks.multi(*reversed(ORDER), *ORDER).names == tuple(ORDER)
    async with locks.multi(*reversed(ORDER), "a", write=["a"]) as group:
        assert list(group.leases) == ORDER
        tokens = [group[name].token for name in ORDER]
        assert all(token > 0 for token in tokens)
        assert {lease.mode for lease in group.leases.values()} == {Mode.EXCLUSIVE}
        with pytest.raises(KeyError):
            group["b"]
    for name in ORDER:
        assert await is_free(locks, name)


@pytest.mark.client_side
async def test_arguments_are_checked_when_the_object_is_created(locks: LocksView) -> None:
    """`multi` accepts 1 to 32 valid names, and refuses a string for `read` or `write`."""
    assert len(locks.multi(*(f"n{number}" for number in range(32)), "n0").names) == 32
    for wrong in ([], [f"n{number}" for number in range(33)]):
        with pytest.raises(InvalidArgument, match=f"32 names, not {len(wrong)}"):
            locks.multi(*wrong)
    with pytest.raises(InvalidName):
        locks.multi("a", "")
    with pytest.raises(InvalidType, match="several"):
        locks.multi("a", write="abc")
    with pytest.raises(ValueError, match="timeout"):
        locks.multi("a", "b", timeout=-1)


async def test_group_of_32_names(locks: LocksView) -> None:
    """A group of 32 names, the largest size, is acquired, kept and released."""
    names = [f"n{number}" for number in range(32)]
    async with locks.multi(*names, timeout=SOON) as group:
        group.check()
        assert sorted([name async for name in locks.names()]) == sorted(names)
    assert [name async for name in locks.names()] == []


async def test_group_excludes_others(factory: MakeClient, locks: LocksView) -> None:
    """While a group is held no other client gets any of its names; a group of free names is acquired at once."""
    other = factory.connect()
    async with locks.multi("a", "b", "c") as group:
        for name in ("a", "b", "c"):
            assert not await is_free(other, name)
        assert await other.multi("c", "d").try_acquire() is None
        await wait_until_unclaimed(other, "d")
        async with other.multi("d", "e"):
            pass
        assert group.remaining <= min(lease.remaining for lease in group.leases.values()) + 0.1
        assert not group.lost.is_set()
        assert await group.release() is True
        assert await group.release() is False
        assert group.remaining == 0
        assert not group.lost.is_set()
    taken = await other.multi("a", "b", "c").try_acquire()
    assert taken is not None
    await taken.release()


@pytest.mark.shared
async def test_groups_share_the_names_that_they_read(factory: MakeClient, locks: LocksView) -> None:
    """Groups share names that both only read; a name that is both read and written is written."""
    other = factory.connect()
    async with locks.multi(write=["a"], read=["b", "a"]) as group:
        assert {name: lease.mode for name, lease in group.leases.items()} == {"a": Mode.EXCLUSIVE, "b": Mode.SHARED}
        async with other.multi("c", read=["b"], timeout=SOON) as second:
            second.check()
            assert len((await locks.inspect("b")).holders) == 2
        assert await other.multi("c", "b").try_acquire() is None
        assert await other.multi("c", read=["a"]).try_acquire() is None
        await wait_until_unclaimed(locks, "c")


async def test_group_is_renewed(locks: LocksView) -> None:
    """All leases of a group are kept for longer than their ttl."""
    async with locks.multi("a", "b", ttl=0.9) as group:
        for lease in group.leases.values():
            await renewed(lease)
        group.check()


# ---------------------------------------------------------------------------- all or nothing


async def test_timeout_names_the_missing_lock_and_leaves_nothing(factory: MakeClient, locks: LocksView) -> None:
    """LockTimeout names the lock that was not free and its holder; one timeout counts for all names."""
    other = factory.connect(owner="nightly")
    early, late = await other.lock("a").acquire(), await other.lock("b").acquire()

    async def release_early() -> None:
        await waiting(other, "a")
        await asyncio.sleep(0.3)
        await early.release()

    async with background(release_early()):
        begun = time.monotonic()
        with pytest.raises(LockTimeout, match=r"'b'.*nightly") as caught:
            await locks.multi("c", "b", "a", timeout=0.6).acquire()
        assert 0.6 <= time.monotonic() - begun < 0.6 + 0.3 + 0.5
    assert caught.value.name == "b"
    assert (await other.inspect("b")).waiters == ()
    for name in ("a", "c"):
        assert await is_free(other, name)
    with pytest.raises(LockTimeout):
        await locks.multi("a", "b").acquire(timeout=0)
    assert await is_free(other, "a")
    await late.release()
    async with locks.multi("a", "b", "c", timeout=0):
        pass


async def test_failed_try_acquire_leaves_nothing(factory: MakeClient, locks: LocksView) -> None:
    """If one name is not free, try_acquire releases the others and leaves no waiter."""
    other = factory.connect()
    async with other.lock("b"):
        assert await locks.multi("a", "b", "c").try_acquire() is None
        for name in ("a", "c"):
            assert await is_free(other, name)
        assert (await other.inspect("b")).waiters == ()


@pytest.mark.client_side
async def test_body_does_not_run_after_a_timeout(factory: MakeClient, locks: LocksView) -> None:
    """The body of a block whose acquire timed out does not run."""
    async with factory.connect().lock("b"):
        with pytest.raises(LockTimeout):
            async with locks.multi("a", "b", timeout=0.05):
                pytest.fail("the body ran without the locks")


@pytest.mark.client_side
@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_error_at_any_name_releases_the_others(factory: MakeClient, locks: LocksView, failing: int) -> None:
    """If the engine fails at any of the names, the others are released before the error comes out."""
    faulty, other = Faulty.around(locks), factory.connect()
    faulty.allow("attempt", failing)
    faulty.refuse("attempt")
    with pytest.raises(EngineUnavailable) as caught:
        await locks.multi("a", "b", "c").acquire()
    assert caught.value.name == "abc"[failing]
    group = await other.multi("a", "b", "c").try_acquire()
    assert group is not None
    await group.release()


@pytest.mark.client_side
async def test_timeout_during_an_outage_does_not_wait_for_releases(factory: MakeClient, locks: LocksView) -> None:
    """A group that fails in an outage raises soon, although no release is answered; the renewer repeats the releases."""
    faulty, other = Faulty.around(locks), factory.connect()
    async with other.lock("z"):
        names = [f"n{number}" for number in range(12)]
        faulty.drop("release", 1000)
        faulty.drop("abandon", 1000)
        begun = time.monotonic()
        with pytest.raises((LockTimeout, EngineUnavailable)):
            await locks.multi(*names, "z", timeout=0.3).acquire()
        assert time.monotonic() - begun < 5
        faulty.heal()
        for name in names:
            await wait_until_unclaimed(other, name)


@pytest.mark.client_side
async def test_lease_lost_during_the_acquire_is_acquired_again(factory: MakeClient) -> None:
    """A lease that expires while the group waits for its next name is acquired again, and on_lost is not called."""
    losses: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: losses.append((group, reason)))
    holder = await factory.connect().lock("b").acquire()
    async with background(locks.multi("a", "b", ttl=0.9, renew=False).acquire(SOON)) as (task,):
        await waiting(locks, "b")
        await wait_until_unclaimed(locks, "a")  # its ttl is over
        await holder.release()
        group = await task
        group.check()
        assert await group.release() is True
    assert losses == []


@pytest.mark.runtime_name("aio")
async def test_group_acquire_cancelled_at_any_step_leaves_no_claim(factory: MakeClient, locks: LocksView) -> None:
    """A group acquire that is cancelled at any step leaves no claim, and the next acquire succeeds at once."""
    other = factory.connect()

    async def after() -> None:
        group = await other.multi("a", "b").try_acquire()
        assert group is not None
        await group.release()

    async def work() -> Any:
        return await locks.multi("a", "b").acquire()

    assert await cancel_at_every_step(work, after) >= 1


@pytest.mark.runtime_name("aio")
async def test_group_clean_up_cancelled_at_any_step_leaves_no_claim(factory: MakeClient, locks: LocksView) -> None:
    """A group acquire that is cancelled at any step while it gives its names back leaves no claim."""
    other = factory.connect()
    async with other.lock("c"):

        async def after() -> None:
            for name in ("a", "b"):
                assert await is_free(other, name)

        async def work() -> Any:
            return await locks.multi("a", "b", "c").try_acquire()

        assert await cancel_at_every_step(work, after) >= 1
        assert (await other.inspect("c")).waiters == ()


@pytest.mark.runtime_name("aio")
async def test_group_cancelled_during_its_wait_releases_everything(factory: MakeClient, locks: LocksView) -> None:
    """A group that is cancelled during its wait leaves the queue and releases what it holds before the caller continues."""
    other = factory.connect()
    async with other.lock("b"):
        for twice in (False, True):
            task = asyncio.ensure_future(locks.multi("a", "b", "c").acquire())
            await waiting(other, "b")
            task.cancel()
            if twice:
                await asyncio.sleep(0)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_unclaimed(other, "a", timeout=1)
            assert (await other.inspect("b")).waiters == ()


# ---------------------------------------------------------------------------- loss and release


@pytest.mark.client_side
@pytest.mark.parametrize("lost", ["a", "b", "c"])
async def test_loss_of_one_is_the_loss_of_the_group(factory: MakeClient, lost: str) -> None:
    """When one lease is lost, the group is lost: on_lost is called once with the group, and the block raises LeaseLost."""
    losses: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: losses.append((group, reason)))
    with pytest.raises(LeaseLost) as caught:
        async with locks.multi("a", "b", "c", ttl=0.9) as group:
            await factory.connect().force_release(lost, reason="test")
            assert await group.lost.wait(SOON)
    assert caught.value.name == lost
    assert caught.value.reason is LossReason.GONE is group.reason
    assert group.remaining == 0
    with pytest.raises(LeaseLost):
        group.check()
    await assert_notified_once(losses)
    (reported, reason), raw = losses[0], getattr(group, "raw", group)
    assert reported is raw
    assert reason is LossReason.GONE
    for name in ("a", "b", "c"):
        await wait_until_unclaimed(locks, name)


@pytest.mark.client_side
async def test_loss_of_all_is_reported_once(factory: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """Three leases of a group that expire together are one loss: one call of on_lost and one log record."""
    losses: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: losses.append(reason))
    group = await locks.multi("a", "b", "c", ttl=0.3, renew=False).acquire()
    assert await group.lost.wait(SOON)
    for lease in group.leases.values():
        assert await lease.lost.wait(SOON)
    await assert_notified_once(losses)
    assert losses == [LossReason.EXPIRED]
    assert len([entry for entry in caplog.records if "is lost" in entry.getMessage()]) == 1
    assert await group.release() is False


async def test_leaving_the_group_reports_a_forced_release(factory: MakeClient) -> None:
    """Leaving a group reports a name that was released by force, and releases the others."""
    losses: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: losses.append(reason))
    with pytest.raises(LeaseLost) as caught:
        async with locks.multi("a", "b"):
            await locks.force_release("a", reason="test")
    assert caught.value.name == "a"
    await assert_notified_once(losses)
    assert losses == [LossReason.GONE]
    await wait_until_unclaimed(locks, "b")


@pytest.mark.client_side
async def test_error_in_the_body_releases_the_group(locks: LocksView) -> None:
    """An error in the body comes out unchanged, and all names are released."""
    with pytest.raises(ZeroDivisionError):
        async with locks.multi("a", "b"):
            raise ZeroDivisionError
    for name in ("a", "b"):
        assert await is_free(locks, name)


@pytest.mark.client_side
@pytest.mark.runtime_name("aio")
async def test_body_is_cancelled_on_loss(locks: LocksView) -> None:
    """The body of an `async with` on a group is cancelled when one of its leases is lost."""
    with pytest.raises(LeaseLost):
        async with locks.multi("a", "b", ttl=0.9):
            await locks.force_release("b", reason="test")
            await asyncio.sleep(SOON)
            pytest.fail("the body went on")


@pytest.mark.client_side
async def test_release_attempts_every_lock(factory: MakeClient, locks: LocksView) -> None:
    """If one release fails, the others are released, and the renewer repeats the failed one."""
    faulty, other = Faulty.around(locks), factory.connect()
    group = await locks.multi("a", "b", "c").acquire()
    faulty.refuse("release")
    with pytest.raises(ReleaseFailed) as caught:
        await group.release()
    assert caught.value.name == "c"
    assert faulty.calls["release"] == 3
    for name in ("a", "b", "c"):
        await wait_until_unclaimed(other, name)
    async with locks.multi("a", "b", "c", timeout=SOON):
        faulty.refuse("release", 3)  # leaving a block never raises because of a failed release
    for name in ("a", "b", "c"):
        await wait_until_unclaimed(other, name)


@pytest.mark.client_side
async def test_one_lease_of_a_group_may_be_released_early(locks: LocksView) -> None:
    """One lease of a group may be released early: its name is free, `check` raises, and the block releases the rest."""
    async with locks.multi("a", "b") as group:
        assert await group["a"].release() is True
        await wait_until_unclaimed(locks, "a")
        assert not group.lost.is_set()
        with pytest.raises(LeaseLost, match="released"):
            group.check()
        assert not await is_free(locks, "b")
    await wait_until_unclaimed(locks, "b")


@pytest.mark.client_side
async def test_close_ends_a_group_without_on_lost(factory: MakeClient) -> None:
    """Closing the client ends the group and wakes those who wait for its loss; on_lost is not called."""
    losses: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: losses.append(reason))
    group = await locks.multi("a", "b").acquire()
    async with background(group.lost.wait(SOON)) as (task,):
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await locks.close()
        assert await task is True
        assert time.monotonic() - begun < SOON / 2
    assert group.reason is LossReason.CLOSED
    other = factory.connect()
    for name in ("a", "b"):
        await wait_until_unclaimed(other, name)
    with pytest.raises(ClientClosed):
        await locks.multi("a", "b").acquire()
    assert losses == []


# ---------------------------------------------------------------------------- deadlocks


@pytest.mark.client_side
async def test_all_names_are_checked_before_anything_is_acquired(locks: LocksView) -> None:
    """A group with a name that this thread or task holds raises WouldDeadlock before it sends anything."""
    faulty = Faulty.around(locks)
    async with locks.lock("z"):
        attempts = faulty.calls["attempt"]
        with pytest.raises(WouldDeadlock) as caught:
            await locks.multi("a", "b", "z").acquire()
        assert caught.value.name == "z"
        assert await locks.multi("a", "b", "z").try_acquire() is None
        assert faulty.calls["attempt"] == attempts
    async with locks.multi("a", "z"):
        with pytest.raises(WouldDeadlock):
            await locks.lock("z", timeout=60).acquire()


async def test_opposite_orders_do_not_deadlock(factory: MakeClient, ttl_scale: TtlScale) -> None:
    """Contenders that give the same names in opposite orders all acquire their groups."""
    clients = [factory.connect(), factory.connect()]
    inside: list[str] = []

    async def work(number: int) -> None:
        for turn in range(6):
            names = ["a", "b", "c"] if (number + turn) % 2 else ["c", "b", "a"]
            chosen = names[turn % 2 :]
            async with clients[number % 2].multi(*chosen, timeout=60) as group:
                inside.extend(chosen)
                assert len(set(inside)) == len(inside)
                group.check()
                await asyncio.sleep(0)
                for name in chosen:
                    inside.remove(name)

    async with asyncio.timeout(60):
        await asyncio.gather(*(work(number) for number in range(6)))
    for name in ("a", "b", "c"):
        await wait_until_unclaimed(clients[0], name)


@pytest.mark.client_side
async def test_shared_multi_lock_object(factory: MakeClient) -> None:
    """One multi-lock used as a block by many threads or tasks at once gives each its own group."""
    multi = factory.connect().multi("a", "b", timeout=60)
    tokens: list[int] = []

    async def work() -> None:
        for _ in range(4):
            async with multi as group:
                tokens.append(group["a"].token)
                await asyncio.sleep(0)
                assert group["a"].token == tokens[-1]

    await asyncio.gather(*(work() for _ in range(4)))
    assert tokens == sorted(set(tokens))

    async def entered() -> bool:
        return len(tokens) == 16

    await eventually(entered, "all have entered")
