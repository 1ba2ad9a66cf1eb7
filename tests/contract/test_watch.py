"""Watching a name, asking whether this client holds it, and holders that stall."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fencelock import ClientClosed, InvalidArgument, InvalidType, LeaseLost, LossReason, NotHeld, Snapshot
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed
from tests.support.waiting import SOON, eventually


async def collect(items: AsyncIterator[Any], seen: list[Any]) -> None:
    """Append all items to the list."""
    async for item in items:
        seen.append(item)  # noqa: PERF401  one by one, while another task looks


async def has(seen: list[Any], number: int) -> None:
    """Wait until so many items were seen."""

    async def enough() -> bool:
        return len(seen) >= number

    await eventually(enough, f"{number} states are seen")
    assert len(seen) == number, seen


@pytest.mark.client_side
async def test_watch_yields_the_current_state_and_every_change(factory: MakeClient, locks: LocksView) -> None:
    """`watch` yields the current state at once, and a new holder, waiter or release within a second; `stop` ends it."""
    other, stop, seen = factory.connect(owner="worker"), factory.stop_event(), list[Snapshot]()
    async with background(collect(locks.watch("x", stop), seen)) as (task,):
        await has(seen, 1)
        assert seen[0] == Snapshot("x")
        lease = await other.lock("x", ttl=0.9).acquire()
        await asyncio.sleep(1.0)
        assert [holder.token for holder in seen[-1].holders] == [lease.token]
        await renewed(lease, 2)  # times are not changes
        assert len(seen) == 2
        async with background(other.lock("x").acquire(SOON)) as (waiter,):
            await has(seen, 3)
            assert [entry.owner for entry in seen[-1].waiters] == ["worker"]
            await lease.release()
            successor = await waiter
        await has(seen, 4)
        assert [holder.token for holder in seen[-1].holders] == [successor.token]
        await successor.release()
        await has(seen, 5)
        assert seen[-1] == Snapshot("x")
        stop.set()
        await asyncio.wait_for(task, SOON)


@pytest.mark.client_side
async def test_watch_with_stop_set_yields_nothing(factory: MakeClient, locks: LocksView) -> None:
    """A watch whose `stop` is already set yields nothing."""
    stop = factory.stop_event()
    stop.set()
    seen: list[Snapshot] = []
    await asyncio.wait_for(collect(locks.watch("x", stop), seen), SOON)
    assert seen == []


@pytest.mark.client_side
async def test_close_ends_watches(factory: MakeClient) -> None:
    """Closing the client ends its watches, and a watch on a closed client raises ClientClosed."""
    locks, seen = factory.connect(), list[Snapshot]()
    async with background(collect(locks.watch("x"), seen)) as (task,):
        await has(seen, 1)
        await locks.close()
        await asyncio.wait_for(task, SOON)
    with pytest.raises(ClientClosed):
        await collect(locks.watch("x"), seen)
    assert len(seen) == 1


@pytest.mark.client_side
async def test_watch_continues_after_an_outage(
    factory: MakeClient, locks: LocksView, caplog: pytest.LogCaptureFixture
) -> None:
    """A watch logs an unreachable engine once, and continues with the newest state, which is logged, too."""
    other, stop, seen = factory.connect(), factory.stop_event(), list[Snapshot]()
    faulty = Faulty.around(locks)
    with caplog.at_level(logging.INFO, logger="fencelock"):
        async with background(collect(locks.watch("x", stop), seen)) as (task,):
            await has(seen, 1)
            faulty.refuse("inspect", 3)
            lease = await other.lock("x").acquire()
            await has(seen, 2)
            assert [holder.token for holder in seen[-1].holders] == [lease.token]
            assert caplog.text.count("cannot be watched") == 1
            assert caplog.text.count("can be watched again") == 1
            stop.set()
            await asyncio.wait_for(task, SOON)
    await lease.release()


@pytest.mark.client_side
async def test_watches_of_one_name_share_one_poll(factory: MakeClient, locks: LocksView) -> None:
    """Eight watches of a name read the engine no more often than one, and all see each change."""
    other, stop = factory.connect(), factory.stop_event()
    faulty = Faulty.around(locks)
    seen: list[list[Snapshot]] = [[] for _ in range(8)]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with background(*(collect(locks.watch("x", stop), states) for states in seen)) as tasks:
        for states in seen:
            await has(states, 1)
        lease = await other.lock("x").acquire()
        for states in seen:
            await has(states, 2)
        await asyncio.sleep(1)
        polls = (loop.time() - begun) / 0.4
        assert faulty.calls["inspect"] <= polls + 3
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON)
    await lease.release()


@pytest.mark.client_side
async def test_watch_checks_its_arguments(locks: LocksView) -> None:
    """`watch` refuses an invalid name and a `stop` that is no event, at once."""
    with pytest.raises(ValueError, match="name"):
        locks.watch("")
    with pytest.raises(InvalidType, match="stop"):
        locks.watch("x", stop="now")


# ---------------------------------------------------------------------------- assert_held


@pytest.mark.client_side
async def test_assert_held_passes_only_while_this_client_holds_the_name(factory: MakeClient, locks: LocksView) -> None:
    """`assert_held` passes while this client holds the name, however it acquired it, and raises NotHeld before and after."""
    other = factory.connect()
    with pytest.raises(NotHeld, match="does not hold 'x', and") as caught:
        locks.assert_held("x")
    assert caught.value.name == "x"
    async with locks.lock("x") as lease:
        locks.assert_held("x")
        with pytest.raises(NotHeld):
            other.assert_held("x")
        with pytest.raises(NotHeld):
            locks.assert_held("y")
        await lease.release()
        with pytest.raises(NotHeld):
            locks.assert_held("x")
    async with locks.multi("x", "y"):
        locks.assert_held("x")
        locks.assert_held("y")
    lost = await locks.lock("x", ttl=0.3, renew=False).acquire()
    assert await lost.lost.wait(SOON)
    with pytest.raises(NotHeld):
        locks.assert_held("x")
    for wrong in ("write", None, 3):
        with pytest.raises(InvalidArgument, match="mode"):
            locks.assert_held("x", wrong)


@pytest.mark.client_side
@pytest.mark.shared
async def test_assert_held_depends_on_the_mode(locks: LocksView) -> None:
    """A reader holds the name shared but not exclusively; a writer holds it both ways until it is downgraded."""
    async with locks.rwlock("x").read():
        locks.assert_held("x", "shared")
        for mode in ("exclusive", "permit"):
            with pytest.raises(NotHeld, match=mode):
                locks.assert_held("x", mode)
    async with locks.rwlock("x").write() as lease:
        locks.assert_held("x", "shared")
        locks.assert_held("x", "exclusive")
        await lease.downgrade()
        locks.assert_held("x", "shared")
        with pytest.raises(NotHeld, match="exclusive"):
            locks.assert_held("x", "exclusive")


@pytest.mark.client_side
@pytest.mark.limit
async def test_assert_held_of_a_permit(locks: LocksView) -> None:
    """A permit counts as held in the mode of permits only."""
    async with locks.semaphore("x", 2):
        locks.assert_held("x", "permit")
        for mode in ("exclusive", "shared"):
            with pytest.raises(NotHeld, match=mode):
                locks.assert_held("x", mode)
    async with locks.lock("x"):
        with pytest.raises(NotHeld, match="permit"):
            locks.assert_held("x", "permit")


# ---------------------------------------------------------------------------- stall_after


@pytest.mark.client_side
async def test_holder_that_stalls_loses_its_lease(locks: LocksView) -> None:
    """A holder that reports no progress loses its lease within stall_after + ttl, with the reason "stalled"."""
    loop = asyncio.get_running_loop()
    with pytest.raises(LeaseLost, match="progress") as caught:
        async with locks.lock("x", ttl=0.8, stall_after=0.6) as lease:
            stall_after = 0.6 * lease.ttl / 0.8
            for _ in range(4):
                await asyncio.sleep(stall_after / 2)
                lease.progress()
            progressed = loop.time()
            await lease.lost.wait(SOON)
    assert caught.value.reason is LossReason.STALLED is lease.reason
    assert loop.time() - progressed >= 0.9 * stall_after
    assert loop.time() - progressed < stall_after + lease.ttl + 1
    async with locks.lock("x", timeout=SOON) as successor:
        assert successor.token > lease.token
    with pytest.raises(LeaseLost):
        lease.progress()


@pytest.mark.client_side
async def test_late_progress_resumes_renewals(locks: LocksView) -> None:
    """After `progress()` the client renews a lease again that it no longer renewed, if it is not lost yet."""
    async with locks.lock("x", ttl=1.8, stall_after=0.4) as lease:
        await asyncio.sleep(lease.ttl * 0.6)  # a renewal was due after a third of the ttl
        before = lease.remaining
        assert before < lease.ttl / 2
        lease.progress()
        await renewed(lease)
        assert lease.remaining > before


@pytest.mark.client_side
async def test_progress_without_stall_after_does_nothing(locks: LocksView) -> None:
    """Without `stall_after` `progress` does nothing, and the lease is renewed without it."""
    async with locks.lock("x", ttl=0.9) as lease:
        lease.progress()
        await renewed(lease, 2)
    lease.progress()


@pytest.mark.client_side
async def test_watch_ignores_other_names(locks: LocksView, factory: MakeClient) -> None:
    """A watch returns snapshots of its own name only."""
    stop, seen = factory.stop_event(), list[Snapshot]()
    async with background(collect(locks.watch("x", stop), seen)) as (task,):
        await has(seen, 1)
        async with locks.lock("y"):
            await asyncio.sleep(1)
        assert len(seen) == 1
        stop.set()
        await asyncio.wait_for(task, SOON)
