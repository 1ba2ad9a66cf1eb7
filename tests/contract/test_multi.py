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
from tests.contract.factory import ClientFactory
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
"""By UTF-8 bytes; by UTF-16 units, as in Java and JavaScript, the last two would change places."""


async def test_names_are_sorted_by_their_bytes_and_duplicates_removed(locks: LocksView) -> None:
    """All contenders acquire in one order, whatever order they give."""
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
    """1 to 32 names, which are checked, and `read` and `write` are not strings."""
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


async def test_32_names(locks: LocksView) -> None:
    """A group of the largest size is acquired, kept and released."""
    names = [f"n{number}" for number in range(32)]
    async with locks.multi(*names, timeout=SOON) as group:
        group.check()
        assert sorted([name async for name in locks.names()]) == sorted(names)
    assert [name async for name in locks.names()] == []


async def test_group_excludes_others(factory: ClientFactory, locks: LocksView) -> None:
    """While the group is held, nobody gets any of its names, alone or in another group; a free group is had at once."""
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
async def test_read_and_write(factory: ClientFactory, locks: LocksView) -> None:
    """Groups share the names that they only read; a name to read and to write is written."""
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


async def test_timeout_names_the_missing_lock_and_leaves_nothing(factory: ClientFactory, locks: LocksView) -> None:
    """LockTimeout carries the name that was not free and its holder; one deadline counts for all names."""
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


async def test_try_acquire_leaves_nothing(factory: ClientFactory, locks: LocksView) -> None:
    """If one name is not free, the others are given back and nobody is left in a queue."""
    other = factory.connect()
    async with other.lock("b"):
        assert await locks.multi("a", "b", "c").try_acquire() is None
        for name in ("a", "c"):
            assert await is_free(other, name)
        assert (await other.inspect("b")).waiters == ()


@pytest.mark.client_side
async def test_body_does_not_run_after_a_timeout(factory: ClientFactory, locks: LocksView) -> None:
    """The body of a block whose acquire timed out never runs."""
    async with factory.connect().lock("b"):
        with pytest.raises(LockTimeout):
            async with locks.multi("a", "b", timeout=0.05):
                pytest.fail("the body ran without the locks")


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_error_leaves_nothing(factory: ClientFactory, locks: LocksView, failing: int) -> None:
    """An engine that fails at any of the names has the others back when the error comes out."""
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
async def test_timeout_during_an_outage_does_not_wait_for_releases(factory: ClientFactory, locks: LocksView) -> None:
    """A caller whose group failed gets its answer soon, also if no release is answered; the renewer goes on with them."""
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
async def test_lease_lost_while_the_group_is_acquired(factory: ClientFactory) -> None:
    """A lease that ends while the next name is awaited is acquired again, and nobody hears of that loss."""
    told: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: told.append((group, reason)))
    holder = await factory.connect().lock("b").acquire()
    async with background(locks.multi("a", "b", ttl=0.9, renew=False).acquire(SOON)) as (task,):
        await waiting(locks, "b")
        await wait_until_unclaimed(locks, "a")  # its ttl is over
        await holder.release()
        group = await task
        group.check()
        assert await group.release() is True
    assert told == []


@pytest.mark.runtime_name("aio")
async def test_cancelled_at_every_step_of_a_free_group(factory: ClientFactory, locks: LocksView) -> None:
    """Wherever the acquire of a group is cancelled, nothing is left behind and the next one succeeds at once."""
    other = factory.connect()

    async def after() -> None:
        group = await other.multi("a", "b").try_acquire()
        assert group is not None
        await group.release()

    async def work() -> Any:
        return await locks.multi("a", "b").acquire()

    assert await cancel_at_every_step(work, after) >= 1


@pytest.mark.runtime_name("aio")
async def test_cancelled_at_every_step_of_a_failing_group(factory: ClientFactory, locks: LocksView) -> None:
    """Wherever it is cancelled while it gives back what it had, for a name that was not free, nothing is left behind."""
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
async def test_cancelled_while_waiting_for_a_name(factory: ClientFactory, locks: LocksView) -> None:
    """A group that is cancelled half-way, while it waits, gives up its place and what it holds, before the caller goes on."""
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
async def test_loss_of_one_is_the_loss_of_the_group(factory: ClientFactory, lost: str) -> None:
    """`lost` and `check` tell of it, on_lost is called once with the group, and the block raises LeaseLost."""
    told: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: told.append((group, reason)))
    with pytest.raises(LeaseLost) as caught:
        async with locks.multi("a", "b", "c", ttl=0.9) as group:
            await factory.connect().force_release(lost, reason="test")
            assert await group.lost.wait(SOON)
    assert caught.value.name == lost
    assert caught.value.reason is LossReason.GONE is group.reason
    assert group.remaining == 0
    with pytest.raises(LeaseLost):
        group.check()
    await assert_notified_once(told)
    (reported, reason), raw = told[0], getattr(group, "raw", group)
    assert reported is raw
    assert reason is LossReason.GONE
    for name in ("a", "b", "c"):
        await wait_until_unclaimed(locks, name)


@pytest.mark.client_side
async def test_loss_of_all_is_reported_once(factory: ClientFactory, caplog: pytest.LogCaptureFixture) -> None:
    """Three leases that expire together are one loss: one call of on_lost, one line in the log."""
    told: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: told.append(reason))
    group = await locks.multi("a", "b", "c", ttl=0.3, renew=False).acquire()
    assert await group.lost.wait(SOON)
    for lease in group.leases.values():
        assert await lease.lost.wait(SOON)
    await assert_notified_once(told)
    assert told == [LossReason.EXPIRED]
    assert len([entry for entry in caplog.records if "is lost" in entry.getMessage()]) == 1
    assert await group.release() is False


async def test_loss_that_a_release_finds(factory: ClientFactory) -> None:
    """A name that was taken away before any renewal could tell is noticed on leaving; the others are released."""
    told: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: told.append(reason))
    with pytest.raises(LeaseLost) as caught:
        async with locks.multi("a", "b"):
            await locks.force_release("a", reason="test")
    assert caught.value.name == "a"
    await assert_notified_once(told)
    assert told == [LossReason.GONE]
    await wait_until_unclaimed(locks, "b")


@pytest.mark.client_side
async def test_error_in_the_body(locks: LocksView) -> None:
    """An error in the body comes out as it is, and all names are released."""
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
async def test_release_attempts_every_lock(factory: ClientFactory, locks: LocksView) -> None:
    """If one release fails, the others are released all the same; the renewer goes on with the one that failed."""
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
async def test_lease_of_a_group_released_alone(locks: LocksView) -> None:
    """One lease of a group may be released early: its name is free, `check` says so, and the rest is released at the end."""
    async with locks.multi("a", "b") as group:
        assert await group["a"].release() is True
        await wait_until_unclaimed(locks, "a")
        assert not group.lost.is_set()
        with pytest.raises(LeaseLost, match="released"):
            group.check()
        assert not await is_free(locks, "b")
    await wait_until_unclaimed(locks, "b")


@pytest.mark.client_side
async def test_close_ends_a_group(factory: ClientFactory) -> None:
    """Closing the client ends the group as it ends a lease: who waits for the loss is woken, and on_lost is not called."""
    told: list[Any] = []
    locks = factory.connect(on_lost=lambda group, reason: told.append(reason))
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
    assert told == []


# ---------------------------------------------------------------------------- deadlocks


@pytest.mark.client_side
async def test_all_names_are_checked_before_anything_is_acquired(locks: LocksView) -> None:
    """A group with a name that this thread or task holds raises WouldDeadlock and has sent nothing for the others."""
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


async def test_opposite_orders_do_not_deadlock(factory: ClientFactory, ttl_scale: TtlScale) -> None:
    """Contenders that name the same locks in opposite orders all get through."""
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
async def test_shared_multi_lock_object(factory: ClientFactory) -> None:
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
