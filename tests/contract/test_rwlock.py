"""Reader-writer locks: one queue for readers and writers, downgrades, and threads or tasks that would wait for themselves."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fencelock import GuaranteeUnavailable, LeaseLost, LockTimeout, LossReason, Mode, NotHeld, WouldDeadlock
from fencelock.model import Grant
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LeaseView, LocksView, core_of
from tests.contract.steps import background, renewed, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.support.waiting import SOON, eventually


async def holders(locks: LocksView, name: str, *modes: str) -> None:
    """Wait until the name is held in exactly these modes."""

    async def held() -> bool:
        return [holder.mode.value for holder in (await locks.inspect(name)).holders] == list(modes)

    await eventually(held, f"{name!r} is held as {modes}")


async def test_engine_without_readers_refuses_when_the_object_is_created(case: EngineCase, locks: LocksView) -> None:
    """`rwlock` and `multi(read=…)` raise GuaranteeUnavailable, with one sentence, on an engine that has no readers."""
    if case.shared:
        assert locks.rwlock("x").read().name == "x"
        return
    for make in (lambda: locks.rwlock("x"), lambda: locks.multi(write=["y"], read=["x"])):
        with pytest.raises(GuaranteeUnavailable, match=r"^'x': [\w+]+ has no reader-writer locks; [^.]*$") as caught:
            make()
        assert caught.value.name == "x"


async def test_downgrade_is_refused_where_there_are_no_readers(case: EngineCase, locks: LocksView) -> None:
    """On an engine without readers a downgrade raises, and the lease stays exclusive and is renewed and released."""
    if case.shared:
        return
    async with locks.lock("x", ttl=0.9) as lease:
        with pytest.raises(GuaranteeUnavailable, match="'x'"):
            await lease.downgrade()
        assert lease.mode is Mode.EXCLUSIVE
        await renewed(lease)
    await wait_until_unclaimed(locks, "x")


@pytest.mark.shared
async def test_readers_hold_it_together_and_a_writer_alone(locks: LocksView) -> None:
    """Readers share the name; while a reader holds it, neither a writer nor a plain lock of the same name gets it."""
    rw = locks.rwlock("x", timeout=SOON)
    readers = [await rw.read().acquire() for _ in range(3)]
    assert {lease.mode for lease in readers} == {Mode.SHARED}
    assert len({lease.token for lease in readers}) == 3
    assert await rw.write().try_acquire() is None
    assert await locks.lock("x").try_acquire() is None
    for lease in readers:
        await lease.release()
    async with rw.write() as lease:
        assert lease.mode is Mode.EXCLUSIVE

        async def others() -> tuple[Any, Any]:
            return await rw.read().try_acquire(), await locks.lock("x").try_acquire()

        async with background(others()) as (task,):
            assert await task == (None, None)


@pytest.mark.shared
@pytest.mark.fair
async def test_writer_waits_only_for_the_readers_ahead_of_it(locks: LocksView) -> None:
    """Readers that arrive after a waiting writer are admitted after it, all at once."""
    rw = locks.rwlock("x", timeout=SOON)
    ahead = [await rw.read().acquire() for _ in range(2)]
    async with background(rw.write().acquire()) as (writer,):
        await waiting(locks, "x", 1)
        async with background(rw.read().acquire(), rw.read().acquire()) as late:
            await waiting(locks, "x", 3)
            assert await rw.read().try_acquire() is None
            await ahead[0].release()
            await holders(locks, "x", "shared")
            assert not writer.done()
            await ahead[1].release()
            writing = await writer
            assert not any(task.done() for task in late)
            await writing.release()
            reading = await asyncio.gather(*late)
            await holders(locks, "x", "shared", "shared")
            for lease in reading:
                assert lease.token > writing.token
                await lease.release()


@pytest.mark.shared
@pytest.mark.fair
async def test_writers_do_not_starve_in_a_stream_of_readers(factory: MakeClient) -> None:
    """While readers overlap without a gap, five writers in a row get the lock, and no later reader overtakes them."""
    locks, watcher = factory.connect(), factory.connect()
    rw, done = locks.rwlock("x", timeout=SOON), asyncio.Event()

    async def read() -> None:
        while not done.is_set():
            async with rw.read():
                await asyncio.sleep(0.01)

    async with background(*(read() for _ in range(6))) as readers:
        await eventually(lambda: _some(watcher, 1), "readers hold it")
        for _ in range(5):
            async with rw.write() as lease:
                assert [holder.token for holder in (await watcher.inspect("x")).holders] == [lease.token]
        done.set()
        await asyncio.gather(*readers)
    await wait_until_unclaimed(watcher, "x")


async def _some(locks: LocksView, number: int) -> bool:
    return len((await locks.inspect("x")).holders) >= number


@pytest.mark.shared
async def test_each_reader_has_its_own_expiry(locks: LocksView) -> None:
    """A reader that is not renewed is gone after its own ttl, and a writer then waits only for the reader that is renewed."""
    rw = locks.rwlock("x", timeout=SOON)
    kept = await locks.rwlock("x", ttl=0.9).read().acquire()
    short = await locks.rwlock("x", ttl=0.4, renew=False).read().acquire()
    await holders(locks, "x", "shared", "shared")
    async with background(rw.write().acquire()) as (writer,):
        await holders(locks, "x", "shared")
        assert short.lost.is_set()
        assert short.reason is LossReason.EXPIRED
        await renewed(kept)
        assert not writer.done()
        assert await kept.release() is True
        await (await writer).release()


# ---------------------------------------------------------------------------- downgrade


@pytest.mark.shared
@pytest.mark.fair
async def test_downgrade_admits_queued_readers(locks: LocksView) -> None:
    """A downgraded lease keeps its token; readers directly behind it are admitted, a writer is not."""
    rw = locks.rwlock("x", timeout=SOON)
    lease = await rw.write().acquire()
    token, id = lease.token, lease.id
    async with background(rw.read().acquire(), rw.read().acquire()) as readers:
        await waiting(locks, "x", 2)
        async with background(rw.write().acquire()) as (writer,):
            await waiting(locks, "x", 3)
            await lease.downgrade()
            assert (lease.mode, lease.token, lease.id) == (Mode.SHARED, token, id)
            lease.check()
            reading = await asyncio.gather(*readers)
            await holders(locks, "x", "shared", "shared", "shared")
            assert not writer.done()
            for other in (*reading, lease):
                assert await other.release() is True
            await (await writer).release()


@pytest.mark.shared
async def test_downgrade_counts_as_a_renewal(locks: LocksView, ttl_scale: TtlScale) -> None:
    """After a downgrade the lease has its whole ttl, and the client renews it as a read lease."""
    async with locks.rwlock("x", ttl=1.2).write() as lease:
        await ttl_scale.sleep(0.3)
        before = core_of(lease).deadline
        await lease.downgrade()
        assert core_of(lease).deadline > before
        await renewed(lease, 2)
        await holders(locks, "x", "shared")
    await wait_until_unclaimed(locks, "x")


@pytest.mark.shared
@pytest.mark.client_side
async def test_downgrade_on_a_session_that_was_not_renewed_moves_no_deadline(locks: LocksView) -> None:
    """If an engine answers a downgrade with an older `since`, the deadline of the lease does not move."""
    faulty = Faulty.around(locks)
    async with locks.rwlock("x", ttl=30).write() as lease:
        before = core_of(lease).deadline
        downgrade = faulty.inner.downgrade

        async def downgrade_on_an_old_session(grant: Grant) -> Grant:
            return (await downgrade(grant))._replace(since=grant.since - 5)

        faulty.inner.downgrade = downgrade_on_an_old_session  # type: ignore[method-assign]
        await lease.downgrade()
        assert core_of(lease).deadline == before


@pytest.mark.shared
async def test_only_a_write_lease_can_be_downgraded(locks: LocksView) -> None:
    """A read lease, a downgraded lease and a released lease cannot be downgraded."""
    rw = locks.rwlock("x")
    reading = await rw.read().acquire()
    with pytest.raises(NotHeld, match="shared"):
        await reading.downgrade()
    reading.check()
    await reading.release()
    with pytest.raises(LeaseLost):
        await reading.downgrade()
    writing = await rw.write().acquire()
    await writing.downgrade()
    with pytest.raises(NotHeld, match="shared"):
        await writing.downgrade()
    await writing.release()


@pytest.mark.shared
async def test_downgrade_after_a_forced_release_raises(locks: LocksView) -> None:
    """A holder whose lock was released by force gets an error from the downgrade, and does not come back as a reader."""
    lease = await locks.rwlock("x").write().acquire()
    await locks.force_release("x", reason="test")
    with pytest.raises(LeaseLost) as caught:
        await lease.downgrade()
    assert caught.value.reason is LossReason.GONE is lease.reason
    await wait_until_unclaimed(locks, "x")


@pytest.mark.shared
async def test_downgrade_without_a_reply_is_repeated(locks: LocksView) -> None:
    """A downgrade without a reply makes a read lease at once, and the renewer repeats it until the readers are admitted."""
    await _downgrade_until_confirmed(locks, "lose", renew=True)


@pytest.mark.client_side
@pytest.mark.parametrize("renew", [True, False])
@pytest.mark.parametrize("fault", ["lose", "drop", "refuse"])
async def test_downgrade_is_repeated_after_every_fault(locks: LocksView, fault: str, renew: bool) -> None:
    """The renewer repeats a downgrade that was lost, dropped or refused, also of a lease with renew=False."""
    await _downgrade_until_confirmed(locks, fault, renew)


async def _downgrade_until_confirmed(locks: LocksView, fault: str, renew: bool) -> None:
    """Downgrade a lease while the engine fails twice; a waiting reader must be admitted."""
    faulty = Faulty.around(locks)
    lease = await locks.rwlock("x", ttl=1.8, renew=renew).write().acquire()
    async with background(locks.rwlock("x").read().acquire(SOON)) as (reader,):
        await waiting(locks, "x")
        getattr(faulty, fault)("downgrade", 2)
        await lease.downgrade()
        assert lease.mode is Mode.SHARED
        locks.assert_held("x", "shared")
        with pytest.raises(NotHeld):
            locks.assert_held("x")
        await reader

        async def confirmed() -> bool:
            return faulty.calls["downgrade"] == 3

        await eventually(confirmed, "the downgrade is repeated until it is answered")
        lease.check()
        assert faulty.calls["downgrade"] == 3
        await (await reader).release()
        assert await lease.release() is True


@pytest.mark.shared
@pytest.mark.parametrize("fault", ["lose", "drop"])
async def test_release_after_a_downgrade_without_a_reply(locks: LocksView, fault: str) -> None:
    """A release after a downgrade without a reply frees the name at once, whether or not the engine did the downgrade."""
    faulty = Faulty.around(locks)
    lease = await locks.rwlock("x").write().acquire()
    getattr(faulty, fault)("downgrade")
    await lease.downgrade()
    assert await lease.release() is True
    writing = await locks.rwlock("x").write().try_acquire()
    assert writing is not None
    await writing.release()


@pytest.mark.shared
@pytest.mark.runtime_name("aio")
async def test_downgrade_cancelled_at_any_step_is_done_or_undone(locks: LocksView) -> None:
    """A downgrade that is cancelled at any step leaves the lease unchanged, or soon a read lease on the engine, too."""
    for steps in range(1_000):
        lease = await locks.rwlock("x", ttl=1.8).write().acquire()
        task = asyncio.ensure_future(lease.downgrade())
        for _ in range(steps):
            await asyncio.sleep(0)
            if task.done():
                break
        finished = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await holders(locks, "x", lease.mode.value)
        lease.check()
        assert await lease.release() is True
        if finished:
            assert lease.mode is Mode.SHARED
            return


# ---------------------------------------------------------------------------- waiting for oneself

KINDS = ("lock", "read", "write", "multi", "multi read", "permit")


def acquirer(locks: LocksView, kind: str, **options: Any) -> Any:
    """Return a lock on "x" of that kind."""
    match kind:
        case "lock":
            return locks.lock("x", **options)
        case "read":
            return locks.rwlock("x", **options).read()
        case "write":
            return locks.rwlock("x", **options).write()
        case "multi":
            return locks.multi("a", "x", "z", **options)
        case "multi read":
            return locks.multi("a", "z", read=["x"], **options)
        case _:
            return locks.semaphore("x", 3, **options)


@pytest.mark.client_side
@pytest.mark.parametrize("outer", KINDS)
async def test_acquire_inside_an_own_block_raises_would_deadlock(locks: LocksView, outer: str) -> None:
    """Inside its own block a thread or task gets WouldDeadlock, and None from try_acquire, in every combination of modes."""
    async with acquirer(locks, outer):
        before = await locks.inspect("x")
        for inner in KINDS:
            if outer == inner == "permit":
                continue
            with pytest.raises(WouldDeadlock) as caught:
                await acquirer(locks, inner, timeout=60).acquire()
            assert caught.value.name == "x" or caught.value.name in getattr(acquirer(locks, outer), "names", ())
            assert await acquirer(locks, inner).try_acquire() is None
            with pytest.raises(WouldDeadlock):
                async with acquirer(locks, inner):
                    pytest.fail("the body ran")
        after = await locks.inspect("x")
        assert [holder.token for holder in after.holders] == [holder.token for holder in before.holders]
        assert after.waiters == ()
        for name in {"a", "z"} - set(getattr(acquirer(locks, outer), "names", ())):
            await wait_until_unclaimed(locks, name)
    async with acquirer(locks, "lock"):
        pass  # the block is over


@pytest.mark.client_side
@pytest.mark.limit
async def test_would_deadlock_while_one_of_two_permits_is_left(locks: LocksView) -> None:
    """A task that has left the first of its two permits still holds the second, and gets WouldDeadlock for the lock."""
    first, second = locks.semaphore("x", 3), locks.semaphore("x", 3)
    await first.__aenter__()
    async with second:
        await first.__aexit__(None, None, None)
        with pytest.raises(WouldDeadlock):
            await locks.lock("x", timeout=60).acquire()
    async with locks.lock("x", timeout=5):
        pass


@pytest.mark.client_side
async def test_would_deadlock_needs_an_own_open_block(locks: LocksView) -> None:
    """WouldDeadlock ignores the blocks of another task, leases that were released in their block, and leases without one."""

    async def other() -> Any:
        with pytest.raises(LockTimeout):
            await locks.lock("x").acquire(timeout=0.05)

    async with locks.lock("x") as lease:
        await asyncio.create_task(other())
        await lease.release()
        async with locks.lock("x") as second:
            assert second.token > lease.token
            with pytest.raises(WouldDeadlock):
                await locks.lock("x").acquire(timeout=0.05)
    lease = await locks.lock("x").acquire()
    with pytest.raises(LockTimeout):
        await locks.lock("x").acquire(timeout=0.05)
    async with lease:
        with pytest.raises(WouldDeadlock):
            await locks.lock("x").acquire(timeout=0.05)
    await wait_until_unclaimed(locks, "x")


@pytest.mark.client_side
@pytest.mark.shared
async def test_reentrancy_is_per_mode(locks: LocksView) -> None:
    """A nested read returns the read lease; a nested write raises WouldDeadlock, and its try_acquire returns None."""
    rw = locks.rwlock("x", reentrant=True, timeout=SOON)
    async with rw.read() as outer:
        async with rw.read() as inner:
            assert inner.id == outer.id
        outer.check()
        assert await rw.write().try_acquire() is None
        with pytest.raises(WouldDeadlock, match=r"cannot be upgraded: release it, acquire write\(\), and read again"):
            await rw.write().acquire()
    async with rw.write() as outer:
        async with rw.write() as inner:
            assert inner.id == outer.id
            with pytest.raises(NotHeld, match="outer"):
                await inner.downgrade()
        assert outer.mode is Mode.EXCLUSIVE
        assert await rw.read().try_acquire() is None
        with pytest.raises(WouldDeadlock):
            await rw.read().acquire()
    await wait_until_unclaimed(locks, "x")


@pytest.mark.shared
async def test_nested_write_never_gets_the_downgraded_lease(locks: LocksView) -> None:
    """After a downgrade a nested write raises WouldDeadlock, and a nested read returns the lease."""
    rw = locks.rwlock("x", reentrant=True, timeout=SOON)
    async with rw.write() as lease:
        await lease.downgrade()
        assert await rw.write().try_acquire() is None
        with pytest.raises(WouldDeadlock):
            await rw.write().acquire()
        async with rw.read() as nested:
            assert nested.id == lease.id
        lease.check()
        await holders(locks, "x", "shared")
    await wait_until_unclaimed(locks, "x")


# ---------------------------------------------------------------------------- all of it at once


@pytest.mark.shared
async def test_writers_are_alone_among_random_readers_and_writers(factory: MakeClient) -> None:
    """Among 12 threads or tasks that read, write and downgrade at random, a writer is always alone."""
    locks = factory.connect()
    rw = locks.rwlock("x", timeout=60)
    inside: list[str] = []

    async def held(lease: LeaseView, mode: str) -> None:
        inside.append(mode)
        assert inside.count("write") == 0 or inside == ["write"], inside
        await asyncio.sleep(0.001)
        lease.check()

    async def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(8):
            if rng.random() < 0.5:
                async with rw.read() as lease:
                    await held(lease, "read")
                    inside.remove("read")
            else:
                async with rw.write() as lease:
                    await held(lease, "write")
                    inside.remove("write")
                    if rng.random() < 0.5:
                        await lease.downgrade()
                        await held(lease, "read")
                        inside.remove("read")

    await asyncio.gather(*(work(number) for number in range(12)))
    await wait_until_unclaimed(locks, "x")
