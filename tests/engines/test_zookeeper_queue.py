"""Waiting without a herd, and what a client costs the server: watches, requests, sessions, nodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any, NoReturn

import pytest
from kazoo.protocol.serialization import (
    Create2,
    Delete,
    Exists,
    GetChildren,
    GetData,
    SetData,
    Sync,
)

import fencelock
from fencelock.core.clock import NO_DEADLINE
from fencelock.core.engine import Engine
from fencelock.engines.zookeeper.connection import Requests, ZooKeeperConnection
from fencelock.engines.zookeeper.protocol import CloseSession, CreateContainer, Multi
from fencelock.engines.zookeeper.queue import Queue, QueuedClaim
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.engines.zookeeper.watches import Watches
from fencelock.model import Claim, Grant, Mode, Renewal, Waiting
from fencelock.runtime.blocking import run_sync
from tests.contract.runtimes import core_of
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot, engine_of, session_of
from tests.servers.proxy import Proxy
from tests.servers.zookeeper import ZooKeeper
from tests.support.waiting import SOON, eventually

REQUESTS = (CloseSession, Create2, Delete, Exists, GetChildren, GetData, SetData, Sync, Multi, CreateContainer)
NAMES = {request.type: request.__name__ for request in REQUESTS}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each request was sent, and `fired`: how many watches have fired."""
    counter: Counter[str] = Counter()
    send, fire = ZooKeeperConnection.send, Watches.fire

    def count(self: ZooKeeperConnection, requests: Requests) -> None:
        counter.update(NAMES[request.type] for request, _ in requests)
        send(self, requests)

    def count_fired(self: Watches, path: str, gone: bool) -> None:
        counter["fired"] += 1
        fire(self, path, gone)

    monkeypatch.setattr(ZooKeeperConnection, "send", count)
    monkeypatch.setattr(Watches, "fire", count_fired)
    return counter


async def attempt(engine: Engine, claim: Claim) -> Grant | Waiting:
    """Attempt a claim, with its place in the queue."""
    return await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)


async def granted(engine: Engine, waiting: Grant | Waiting) -> Grant:
    """Wait as the acquire loop does, until the claim is granted."""
    assert isinstance(waiting, Waiting)
    while (grant := await engine.wait(waiting, 20)) is None:
        outcome = await attempt(engine, waiting.claim)
        if isinstance(outcome, Grant):
            return outcome
        waiting = outcome
    return grant


async def test_one_waiter_wakes_for_each_release(zookeeper1: ZooKeeper, clients: Clients, sent: Counter[str]) -> None:
    """With 200 waiters on one name a release fires one watch, and one client reads the queue."""
    factory = clients.on(chroot(zookeeper1))
    engine = factory.engine()

    def run(work: Coroutine[Any, Any, Grant]) -> Awaitable[Grant]:
        return work if clients.runtime_name == "aio" else factory.call(run_sync, work)  # a thread for each

    claims = [Claim("x", 60, f"c{number}") for number in range(200)]
    outcomes = [await attempt(engine, claim) for claim in claims]
    assert isinstance(outcomes[0], Grant)
    holder: Grant = outcomes[0]
    async with background(*(run(granted(engine, waiting)) for waiting in outcomes[1:])) as tasks:
        await asyncio.sleep(1)
        sent.clear()
        tokens = [holder.token]
        for task in tasks[:20]:
            before = sent["fired"]
            assert await engine.release(holder) is True
            holder = await asyncio.wait_for(task, SOON)
            assert sent["fired"] == before + 1
            tokens.append(holder.token)
        assert tokens == sorted(tokens)
        assert sent["GetChildren"] == 20
        assert sent["GetData"] <= 1  # the watch of a heartbeat on the held node
        assert not any(task.done() for task in tasks[20:])


async def test_uncontended_pair(zookeeper1: ZooKeeper, clients: Clients, sent: Counter[str]) -> None:
    """A free lock takes one transaction and one read, sent together, and one delete to release it."""
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "x")
    sent.clear()
    for _ in range(10):
        await take(locks, "x")
    assert sent["Multi"] == sent["GetChildren"] == sent["Delete"] == 10
    assert set(sent) <= {"Multi", "GetChildren", "Delete", "Sync", "GetData", "fired"}
    assert sent["GetData"] < 10  # a heartbeat watches the node of a lease that it finds held


async def test_waiters_that_leave_leave_no_listeners(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Waiters that give up on a long-held lock leave nothing in this process, and no second watch on the server."""
    locks = clients.connect(chroot(zookeeper1), ttl=60)
    lease = await locks.lock("x").acquire()
    for _ in range(30):
        assert await locks.lock("x").try_acquire() is None
        with pytest.raises(TimeoutError):
            await locks.lock("x").acquire(timeout=0.01)
    assert len(session_of(locks).watches._listeners) <= 1
    assert len(engine_of(locks)._queue.claims) == 1
    assert await lease.release() is True


@pytest.mark.timeout(300)
async def test_many_leases_are_one_renewal(zookeeper1: ZooKeeper, clients: Clients, sent: Counter[str]) -> None:
    """However many leases a session has, one sync renews them all."""
    engine = clients.on(chroot(zookeeper1)).engine()
    grants: list[Grant] = []
    number, batch = (10_000, 100) if clients.runtime_name == "aio" else (1_000, 1)
    while len(grants) < number:
        claims = [Claim(f"n{(len(grants) + more) % 100}", 300, mode=Mode.SHARED) for more in range(batch)]
        outcomes = await asyncio.gather(*(attempt(engine, claim) for claim in claims))
        grants += [outcome for outcome in outcomes if isinstance(outcome, Grant)]
    await engine.renew(grants)  # the first sets the watches
    sent.clear()
    assert set(await engine.renew(grants)) == {Renewal.RENEWED}
    assert sent["Sync"] <= 3  # one of ours, and the session's own heartbeats meanwhile
    assert sum(sent.values()) == sent["Sync"]


@pytest.mark.parametrize("permits", [8, 3])
async def test_permits_never_degrade_to_a_mutex(zookeeper1: ZooKeeper, clients: Clients, permits: int) -> None:
    """With limit 3 and 8 claims, three hold the name at each moment, whichever holder leaves."""
    engine = clients.on(chroot(zookeeper1)).engine()
    claims = [Claim("x", 30, mode=Mode.PERMIT, limit=3) for _ in range(8)]
    outcomes = [await attempt(engine, claim) for claim in claims]
    holders = [outcome for outcome in outcomes if isinstance(outcome, Grant)]
    assert holders == outcomes[:3]
    async with background(*(clients.run(granted(engine, waiting)) for waiting in outcomes[3:])) as tasks:
        for number, task in enumerate(tasks):
            # The oldest, the newest or the one in the middle leaves: the next waiter holds at once.
            assert await engine.release(holders.pop((number * permits) % 3)) is True
            holders.append(await asyncio.wait_for(task, SOON))
            assert len((await engine.inspect("x")).holders) == 3
            assert sum(task.done() for task in tasks) == number + 1


async def test_limits_may_differ(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Each contender of a semaphore respects its own limit, and no claim overtakes a blocked one."""
    engine = clients.on(chroot(zookeeper1)).engine()
    outcomes = [await attempt(engine, Claim("x", 30, mode=Mode.PERMIT, limit=limit)) for limit in (1, 3, 2, 5)]
    assert [isinstance(outcome, Grant) for outcome in outcomes] == [True, True, False, False]
    assert (await engine.inspect("x")).limits == (1, 2, 3, 5)


async def test_downgrade_admits_readers_and_keeps_the_token(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A downgrade replaces the node in place: readers behind it hold too, a writer behind them waits for all of them."""
    factory = clients.on(chroot(zookeeper1))
    engine, other = factory.engine(), factory.engine()
    writer = await attempt(engine, Claim("x", 30, "writer", value="here"))
    assert isinstance(writer, Grant)
    reader, last = await attempt(other, Claim("x", 30, mode=Mode.SHARED)), await attempt(other, Claim("x", 30))
    shared = await engine.downgrade(writer)
    assert (shared.token, shared.claim.mode) == (writer.token, Mode.SHARED)
    assert (await engine.downgrade(shared)).token == writer.token
    second = await granted(other, reader)
    snapshot = await engine.inspect("x")
    assert [(holder.token, holder.mode) for holder in snapshot.holders] == [
        (writer.token, Mode.SHARED), (second.token, Mode.SHARED),
    ]  # fmt: skip
    assert (snapshot.holders[0].owner, snapshot.holders[0].value) == ("writer", "here")
    assert await engine.renew([shared]) == [Renewal.RENEWED]
    assert await other.release(second) is True
    assert isinstance(last, Waiting)
    assert await other.wait(last, 0.5) is None
    assert await engine.release(shared) is True
    assert (await granted(other, last)).token > second.token


async def test_downgrade_whose_reply_was_lost(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A repeated downgrade finds the node that the first one created; nothing of the claim is left after an abandon."""
    engine = clients.on(chroot(zookeeper1)).engine()
    claim = Claim("x", 30)
    writer = await attempt(engine, claim)
    assert isinstance(writer, Grant)
    queued = writer.engine_state
    node, exclusive = queued.node, queued.claim
    await engine.downgrade(writer)
    queued.node, queued.claim = node, exclusive  # as if the reply had been lost
    assert (await engine.downgrade(writer)).claim.mode is Mode.SHARED
    assert [holder.token for holder in (await engine.inspect("x")).holders] == [writer.token]
    await engine.abandon(claim)
    assert (await engine.inspect("x")).holders == ()


async def test_renewal_while_the_reply_to_a_downgrade_is_missing(
    zookeeper1: ZooKeeper, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal between a downgrade whose reply was lost and its repetition does not lose the lease."""
    engine = clients.on(chroot(zookeeper1)).engine()
    gone: list[str] = []
    engine.on_gone = gone.append  # type: ignore[attr-defined]
    first, second = await attempt(engine, Claim("x", 30)), await attempt(engine, Claim("x", 30))
    assert isinstance(first, Grant)
    await engine.release(first)
    writer = await granted(engine, second)  # its first renewal writes into its node, which the downgrade has replaced
    request = ZooKeeperSession.request

    async def lose_reply(self: ZooKeeperSession, *requests: Any, timeout: float) -> NoReturn:
        await request(self, *requests, timeout=timeout)
        raise fencelock.OutcomeUnknown("the reply was lost")

    with monkeypatch.context() as patch, pytest.raises(fencelock.OutcomeUnknown):
        patch.setattr(ZooKeeperSession, "request", lose_reply)
        await engine.downgrade(writer)
    assert await engine.renew([writer]) == [Renewal.RENEWED]
    shared = await engine.downgrade(writer)
    assert await engine.renew([shared]) == [Renewal.RENEWED]
    assert gone == []
    (holder,) = (await engine.inspect("x")).holders
    assert (holder.token, holder.mode) == (writer.token, Mode.SHARED)
    assert await engine.release(shared) is True


async def test_renewal_in_flight_while_a_downgrade_replaces_the_node(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A renewal that was sent to the exclusive node, and arrives after the downgrade, does not lose the lease."""
    engine = clients.on(chroot(zookeeper1)).engine()
    gone: list[str] = []
    engine.on_gone = gone.append  # type: ignore[attr-defined]
    first, second = await attempt(engine, Claim("x", 30)), await attempt(engine, Claim("x", 30))
    assert isinstance(first, Grant)
    await engine.release(first)
    writer = await granted(engine, second)
    shared, renewals = await asyncio.gather(engine.downgrade(writer), engine.renew([writer]))
    assert renewals == [Renewal.RENEWED]
    assert await engine.renew([shared]) == [Renewal.RENEWED]
    assert gone == []
    assert await engine.release(shared) is True


async def test_downgrade_is_not_reported_as_a_loss(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """The watch on the exclusive node does not take its replacement for a loss; the shared node is watched instead."""
    engine = clients.on(chroot(zookeeper1)).engine()
    gone: list[str] = []
    engine.on_gone = gone.append  # type: ignore[attr-defined]
    writer = await attempt(engine, Claim("x", 30))
    assert isinstance(writer, Grant)
    assert await engine.renew([writer]) == [Renewal.RENEWED]  # from here on it is watched
    shared = await engine.downgrade(writer)
    assert await engine.renew([shared]) == [Renewal.RENEWED]
    assert gone == []
    assert await engine.force_release("x") == 1

    async def reported() -> bool:
        return gone == [writer.claim.id]

    await eventually(reported, "the loss of the shared node is reported")
    with pytest.raises(fencelock.NotHeld):
        await engine.downgrade(writer)


async def test_held_for_counts_from_the_hand_over(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A claim that had to wait counts from when it queued until its first renewal, and from its grant after that."""
    engine = clients.on(chroot(zookeeper1)).engine()
    first, second = await attempt(engine, Claim("x", 30)), await attempt(engine, Claim("x", 30))
    assert isinstance(first, Grant)
    await asyncio.sleep(1)
    await engine.release(first)
    grant = await granted(engine, second)

    async def held_for() -> float:
        (holder,) = (await engine.inspect("x")).holders
        assert holder.token == grant.token
        assert holder.held_for is not None
        return holder.held_for

    assert await held_for() >= 1
    assert await engine.renew([grant]) == [Renewal.RENEWED]
    assert 0 <= await held_for() < 1
    assert grant.engine_state.data.queued_at < grant.engine_state.data.granted_at


async def test_names_that_are_not_in_use_are_not_listed(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A name's node stays for a while after its last claim; it counts as in use only while there is one."""
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "gone")
    async with locks.lock("used"):
        assert [name async for name in locks.names()] == ["used"]
        assert (await locks.inspect("gone")).holders == ()


async def test_nothing_is_left_of_a_name(own_zookeeper: Callable[..., ZooKeeper], clients: Clients) -> None:
    """ZooKeeper itself removes the node of a name that nobody uses any more; a name in use stays."""
    server = own_zookeeper(environment={"JAVA_TOOL_OPTIONS": "-Dznode.container.checkIntervalMs=200"})
    locks = clients.connect(chroot(server))
    await take(locks, "gone")
    paths = engine_of(locks)._namespace.paths
    async with locks.lock("used") as lease:
        with bare(server) as kazoo:

            async def gone() -> bool:
                return list(kazoo.get_children(paths.locks)) == ["used"]

            await eventually(gone, "only the name in use has a node")
        lease.check()
    assert await take(locks, "gone") > lease.token


async def test_name_whose_node_is_removed_under_us(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A container that ZooKeeper has removed is made again, and tokens rise although its numbers begin again."""
    locks = clients.connect(chroot(zookeeper1))
    before = await take(locks, "x")
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine_of(locks)._namespace.paths.of("x"))
    assert await take(locks, "x") > before


async def test_lease_that_is_not_renewed_goes_although_its_session_lives(
    zookeeper1: ZooKeeper, clients: Clients
) -> None:
    """A lease without renewal ends by itself, while others of the same session are renewed."""
    url = chroot(zookeeper1)
    locks, other = clients.connect(url), clients.connect(url)
    kept = await locks.lock("kept", ttl=9).acquire()
    lease = await locks.lock("x", ttl=9, renew=False).acquire()
    assert await lease.lost.wait(SOON)
    assert await take(other, "x") > lease.token
    kept.check()
    await kept.release()


async def test_sessions_are_shared(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Claims of like ttls share a session; a few are enough for all."""
    locks = clients.connect(chroot(zookeeper1))
    leases = [await locks.lock(f"x{number}", ttl=20 + number).acquire() for number in range(20)]
    assert sorted(engine_of(locks)._sessions._open) == [20, 30]
    for lease in leases:
        await lease.release()


async def test_waiter_behind_a_dead_session(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A waiter in the middle whose client is closed makes room, and the one behind it still waits for the holder."""
    url = chroot(zookeeper1)
    locks, middle, last = clients.connect(url), clients.connect(url), clients.connect(url)
    lease = await locks.lock("x").acquire()
    async with background(middle.lock("x").acquire(), last.lock("x").acquire()) as (gone, waits):
        await waiting(locks, "x", 2)
        await middle.close()

        async def alone() -> bool:
            return len((await locks.inspect("x")).waiters) == 1

        await eventually(alone, "the one in the middle is gone")
        assert not waits.done()
        await lease.release()
        await (await asyncio.wait_for(waits, SOON)).release()
        with pytest.raises(RuntimeError, match="closed"):
            await gone


async def test_waiter_that_leaves_does_not_admit_the_next(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A waiter behind one that gave up, or that once held the name and was enqueued again, waits for the holder."""
    factory = clients.on(chroot(zookeeper1))
    first, second, third = factory.engine(), factory.engine(), factory.engine()
    claim, late = Claim("x", 30), Claim("x", 30)
    lost = await attempt(first, claim)
    assert isinstance(lost, Grant)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(lost.engine_state.path)
    holder = await attempt(second, Claim("x", 30))
    assert isinstance(holder, Grant)
    assert isinstance(await attempt(first, claim), Waiting)
    waiter = await attempt(third, late)
    assert isinstance(waiter, Waiting)
    await first.abandon(claim)
    assert await third.wait(waiter, 1) is None
    assert isinstance(await attempt(third, late), Waiting)
    assert await second.release(holder) is True
    grant = await granted(third, waiter)
    assert grant.token > holder.token
    assert await third.release(grant) is True
    assert await third.release(grant) is False


async def test_writer_behind_two_readers_waits_for_both(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A writer's release admits all readers behind it; the writer behind them waits for the last of them."""
    engine = clients.on(chroot(zookeeper1)).engine()
    writer = await attempt(engine, Claim("x", 30))
    readers = [await attempt(engine, Claim("x", 30, mode=Mode.SHARED)) for _ in range(2)]
    last = await attempt(engine, Claim("x", 30))
    assert isinstance(writer, Grant)
    assert isinstance(last, Waiting)
    await engine.release(writer)
    first, second = [await granted(engine, reader) for reader in readers]
    await engine.release(second)
    assert await engine.wait(last, 1) is None
    await engine.release(first)
    assert isinstance(await granted(engine, last), Grant)


async def test_write_into_a_claims_node_admits_nobody(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Data that is written into a holder's node by hand neither costs it the lock nor admits the next waiter."""
    url = chroot(zookeeper1)
    locks, others = clients.connect(url), clients.connect(url)
    lease = await locks.lock("x", ttl=15).acquire()
    async with background(others.lock("x", ttl=15).acquire()) as (task,):
        await waiting(others, "x")
        with bare(zookeeper1) as kazoo:
            kazoo.set(core_of(lease)._grant.engine_state.path, b"")
        await renewed(lease)
        assert not task.done()
        assert await lease.release() is True
        after = await asyncio.wait_for(task, SOON)
    assert after.token > lease.token
    assert await after.release() is True


async def test_waiter_that_lost_its_node_is_enqueued_again(
    zookeeper1: ZooKeeper, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """A waiter that learns at once that it is next and that its own node is gone does not hold the name."""
    way = proxy(zookeeper1)
    path = chroot(zookeeper1).rpartition("/")[2]
    engine = clients.on(f"{way.url}/{path}").engine()
    other = clients.on(f"{zookeeper1.url}/{path}").engine()
    assert isinstance(await attempt(other, Claim("x", 30)), Grant)
    claim = Claim("x", 30)
    waiter = await attempt(engine, claim)
    assert isinstance(waiter, Waiting)
    assert isinstance(await attempt(other, Claim("x", 30)), Waiting)
    await engine.inspect("x")  # by now it watches the first
    way.cut("to_client")
    assert await other.force_release("x") == 1
    assert await other.force_release("x") == 1
    async with background(clients.run(engine.wait(waiter, 3))) as (task,):
        await asyncio.sleep(0.6)
        way.heal()
        assert await task is None
    again = await clients.run(attempt(engine, claim))
    assert isinstance(again, Waiting), "it is at the end of the queue"
    assert await clients.run(engine.wait(again, 0.5)) is None, "another claim holds the name"
    assert len((await other.inspect("x")).holders) == 1


def test_close_during_a_read_of_a_waiter(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that close() wakes, and that waits again because its claim still exists, learns when the claim is gone."""
    url = chroot(zookeeper1)
    is_alive, remove = Queue.is_alive, Queue.remove
    checks = Semaphore(0)

    def checking(self: Queue, queued: QueuedClaim) -> bool:
        checks.release()
        return is_alive(self, queued)

    async def removing(self: Queue, *args: Any) -> bool:
        assert checks.acquire(timeout=SOON)
        time.sleep(0.1)  # noqa: ASYNC251  # the waiter has looked, and may wait again
        return await remove(self, *args)

    with fencelock.connect(url) as others, others.lock("x", ttl=60):
        locks = fencelock.connect(url)
        with ThreadPoolExecutor(1) as threads:
            waiter = threads.submit(locks.lock("x", ttl=60).acquire)
            while not others.inspect("x").waiters:
                time.sleep(0.01)
            with monkeypatch.context() as patched:
                patched.setattr(Queue, "is_alive", checking)
                patched.setattr(Queue, "remove", removing)
                locks.close()
                assert isinstance(waiter.exception(SOON), fencelock.FencelockError)
