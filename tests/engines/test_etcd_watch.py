"""Waiting on a real etcd: one waiter wakes for each release, in order, for mutexes, readers and permits alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import EngineUnavailable
from fencelock.core.clock import NO_DEADLINE
from fencelock.core.engine import Engine
from fencelock.model import Claim, Grant, LossReason, Mode, Waiting
from tests.contract.factory import MakeClient
from tests.contract.runtimes import client_of
from tests.contract.steps import background, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import counted, own_prefix
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually

WAITERS = 200


def sent(server: Etcd) -> float:
    """Return how many events the server has sent to watchers."""
    return counted(server, "etcd_debugging_mvcc_events_total")


def looked(server: Etcd) -> float:
    """Return how many ranges were asked for."""
    return counted(server, "grpc_server_msg_received_total", grpc_method="Range")


async def test_each_release_wakes_one_waiter(own_etcd: Callable[..., Etcd]) -> None:
    """Of 200 that wait for one name, each release wakes one: one event, one look, one grant, in the order of arrival."""
    server = own_etcd()
    factory = MakeClient(server.url, "aio")
    locks, other = factory.connect(), factory.connect()
    lease = await other.lock("x", ttl=60).acquire()
    served: list[int] = []

    async def one(number: int) -> None:
        async with locks.lock("x", ttl=60, timeout=60):
            served.append(number)

    async with background() as tasks:
        for number in range(WAITERS):
            tasks.append(asyncio.ensure_future(one(number)))
            if number % 20 == 0:
                await waiting(other, "x", number + 1)
        await waiting(other, "x", WAITERS)
        events, looks = sent(server), looked(server)
        await lease.release()
        await asyncio.gather(*tasks)
        assert sorted(served) == list(range(WAITERS))
        assert sent(server) - events <= WAITERS + 5
        assert looked(server) - looks <= WAITERS * 1.1 + 5
    await factory.finish()


async def test_blocked_permit_is_woken_by_any_departure_ahead(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Whichever of three holders releases its permit, the first waiter gets it, and the others go on waiting."""
    engine = clients.on(own_etcd().url).engine()
    permit = Claim("x", 30, mode=Mode.PERMIT, limit=3)
    holders = [await _grant(engine, permit) for _ in range(3)]
    queue = [await _waiting(engine, permit) for _ in range(4)]
    assert [len(blocked.engine_state.blocked_by) for blocked in queue] == [3, 4, 5, 6]
    assert await engine.wait(queue[0], 0.05) is None
    async with background(*(clients.run(engine.wait(blocked, SOON)) for blocked in queue[:2])) as (first, second):
        await asyncio.sleep(0.2)
        await engine.release(holders[1])
        assert isinstance(await first, Grant)
        assert not second.done()
        await engine.release(holders[2])
        assert isinstance(await second, Grant)
    for blocked in queue[2:]:
        assert await engine.wait(blocked, 0.05) is None


async def test_semaphore_does_not_degrade_to_a_mutex(etcd1: Etcd, clients: Clients) -> None:
    """With three permits and eight claims, each departure admits one more claim: three hold the lock until none waits."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    permit = Claim("x", 60, mode=Mode.PERMIT, limit=3)
    granted: asyncio.Queue[Grant] = asyncio.Queue()

    async def one() -> None:
        claim = permit.with_new_id()
        outcome = await clients.run(engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE))
        grant = outcome if isinstance(outcome, Grant) else await clients.run(engine.wait(outcome, SOON))
        assert grant is not None
        granted.put_nowait(grant)

    async with background(*(one() for _ in range(8))) as tasks:
        held = [await granted.get() for _ in range(3)]
        for _ in range(5):
            assert len((await engine.inspect("x")).holders) == 3
            assert await engine.release(held.pop(1))
            held.append(await asyncio.wait_for(granted.get(), SOON))
        await asyncio.gather(*tasks)
    for grant in held:
        assert await engine.release(grant)


async def test_many_permits(etcd1: Etcd, clients: Clients) -> None:
    """With forty holders, one watch covers them all, and any departure wakes the waiter."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    permit = Claim("x", 30, mode=Mode.PERMIT, limit=40)
    holders = [await _grant(engine, permit) for _ in range(40)]
    blocked = await _waiting(engine, permit)
    async with background(clients.run(engine.wait(blocked, SOON))) as (task,):
        await asyncio.sleep(0.2)
        await engine.release(holders[17])
        assert isinstance(await task, Grant)


async def test_downgrade_admits_the_readers_behind_it(etcd1: Etcd, clients: Clients) -> None:
    """A writer that becomes a reader keeps its token, wakes the waiting readers, and is removed as a reader later."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    writer = await _grant(engine, Claim("x", 30))
    readers = [await _waiting(engine, Claim("x", 30, mode=Mode.SHARED)) for _ in range(2)]
    async with background(*(clients.run(engine.wait(reader, SOON)) for reader in readers)) as tasks:
        await asyncio.sleep(0.2)
        downgraded = await engine.downgrade(writer)
        grants = [await task for task in tasks]
    assert all(isinstance(grant, Grant) for grant in grants)
    assert downgraded.token == writer.token
    assert downgraded.claim.mode is Mode.SHARED
    assert (await engine.downgrade(writer)).token == writer.token, "it can be repeated"
    holders = (await engine.inspect("x")).holders
    assert [holder.mode for holder in holders] == [Mode.SHARED] * 3
    assert holders[0].token == writer.token
    await engine.abandon(writer.claim)
    assert len((await engine.inspect("x")).holders) == 2


async def test_release_before_the_watch_starts_is_not_missed(etcd1: Etcd, clients: Clients) -> None:
    """A release between the look and the watch is not missed: the watch begins where the look ended."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    busy = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert isinstance(busy, Waiting)
    await engine.release(grant)
    assert isinstance(await engine.wait(busy, 10), Grant)


async def test_forced_release_before_the_watch_starts_is_reported(etcd1: Etcd, clients: Clients) -> None:
    """A holder is told at once of a forced release that came before its claim was watched."""
    url = own_prefix(etcd1.url)
    locks, other = clients.connect(url), clients.connect(url)
    for _ in range(3):
        lease = await locks.lock("x", ttl=60).acquire()
        assert await other.force_release("x", reason="test") == 1
        assert await lease.lost.wait(timeout=SOON)
        assert lease.reason is LossReason.GONE


async def test_lock_is_watched_after_the_watcher_has_ended(etcd1: Etcd, clients: Clients) -> None:
    """After nothing was held for a while, what is held then is watched as before."""
    url = own_prefix(etcd1.url)
    locks, other = clients.connect(url), clients.connect(url)
    async with locks.lock("x", ttl=60):
        await asyncio.sleep(0.3)
    await asyncio.sleep(2.6)
    lease = await locks.lock("x", ttl=60).acquire()
    await asyncio.sleep(0.3)
    assert await other.force_release("x", reason="test") == 1
    assert await lease.lost.wait(timeout=SOON)


async def test_waiter_behind_one_that_leaves_watches_the_next(etcd1: Etcd, clients: Clients) -> None:
    """When the claims ahead leave the queue, the last one watches the holder, and gets the lock from it."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    grant = await _grant(engine, Claim("x", 30))
    queue = [await _waiting(engine, Claim("x", 30)) for _ in range(3)]
    async with background(clients.run(engine.wait(queue[2], SOON))) as (task,):
        await asyncio.sleep(0.2)
        for blocked in queue[:2]:
            await engine.abandon(blocked.claim)
        await asyncio.sleep(0.2)
        assert not task.done()
        await engine.release(grant)
        assert isinstance(await task, Grant)


async def _grant(engine: Engine, claim: Claim) -> Grant:
    grant = await engine.attempt(claim.with_new_id(), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    return grant


async def _waiting(engine: Engine, claim: Claim) -> Waiting:
    blocked = await engine.attempt(claim.with_new_id(), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(blocked, Waiting)
    return blocked


async def test_release_without_connection_does_not_end_other_watches(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """Who gives back a lease while the connection is down does not end the watch of another one when it is up again."""
    way = proxy(etcd1)
    near = own_prefix(way.url)
    locks, other = clients.connect(near), clients.connect(etcd1.url + "/" + near.rpartition("/")[2])
    first = await locks.lock("first", ttl=6).acquire()
    await asyncio.sleep(0.3)
    held = [await locks.lock(name, ttl=30).acquire() for name in ("a", "b", "c")]
    await asyncio.sleep(0.3)
    way.refuse()
    way.cut("both")
    with pytest.raises(EngineUnavailable):
        await first.release()
    way.disconnect()
    way.heal()
    await asyncio.sleep(1)
    for lease in held:
        assert await other.force_release(lease.name, reason="test") == 1
    for lease in held:
        assert await lease.lost.wait(timeout=SOON), f"{lease.name} was not watched any more"
        assert lease.reason is LossReason.GONE


async def test_dead_connection_of_the_watcher_is_replaced(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """The client notices a silent connection, and watches its leases over another one."""
    way = proxy(etcd1)
    prefix = own_prefix(etcd1.url).rpartition("/")[2]
    factory = clients.on(f"etcd://{way.address},{etcd1.address}/{prefix}")
    locks, other = factory.connect(), clients.connect(f"{etcd1.url}/{prefix}")
    engine: Any = client_of(locks).engine
    client = engine._client
    client._next = 0
    lease = await locks.lock("x", ttl=9).acquire()

    await eventually(lambda: _watched(client), "nothing is watched")
    way.cut("both")
    client._next = 1
    if clients.runtime_name == "blocking":
        for connection in [connection for connection in client._idle if connection.endpoint == 0]:
            connection.retired = True  # renewals go on elsewhere, and only the watch is on the dead connection
    assert await other.force_release("x", reason="test") == 1
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE


async def test_watches_end_with_held_locks(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Nothing is watched for a claim that somebody deleted, or that was given back just when its watch began."""
    server = own_etcd()
    locks = clients.connect(server.url)
    keep = await locks.lock("keep", ttl=30).acquire()

    async def brief(number: int) -> None:
        async with locks.lock(f"n{number}", ttl=30):
            await asyncio.sleep(0.09 + number % 20 / 1000)

    for _ in range(5):
        await asyncio.gather(*(brief(number) for number in range(40)))
    for number in range(10):
        lease = await locks.lock(f"f{number}", ttl=30).acquire()
        await asyncio.sleep(0.15)
        await locks.force_release(lease.name, reason="test")
        assert await lease.lost.wait(timeout=SOON)
    engine: Any = client_of(locks).engine

    async def few() -> bool:
        return sum(len(connection.watches) for connection in engine._client._all) <= 2

    await eventually(few, "watches are left behind")
    await keep.release()


async def test_watch_of_another_connection_is_not_cancelled(etcd1: Etcd, clients: Clients) -> None:
    """Cancelling a watch of another connection does nothing, although both have the same number."""
    engine: Any = clients.on(own_prefix(etcd1.url)).engine()
    old, new = [await engine._client._connect_to(0, 5) for _ in range(2)]
    one, other = (connection.watches.start(b"key", lambda: None) for connection in (old, new))
    assert one.id == other.id
    new.watches.cancel(one)
    assert list(new.watches._watches.values()) == [other]
    for connection in (old, new):
        engine._client._drop(connection)


async def test_lock_acquired_over_another_member_is_watched_at_once(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """A lock that is acquired while the watcher's connection is dead and nothing is held is watched within its ttl."""
    way = proxy(etcd1)
    prefix = own_prefix(etcd1.url).rpartition("/")[2]
    locks = clients.connect(f"etcd://{way.address},{etcd1.address}/{prefix}")
    other = clients.connect(f"{etcd1.url}/{prefix}")
    engine: Any = client_of(locks).engine
    client = engine._client
    client._next = 0
    async with locks.lock("first", ttl=3):
        await eventually(lambda: _watched(client), "nothing is watched")
    way.cut("both")  # the watcher stays on this connection for two seconds, with nothing to watch
    client._next = 1
    for connection in list(client._idle):
        client._retire(connection) if clients.runtime_name == "blocking" else client._idle.remove(connection)
    lease = await locks.lock("x", ttl=3).acquire()
    began = time.monotonic()
    assert await other.force_release("x", reason="test") == 1
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE
    assert time.monotonic() - began < 3 * 1.5, "a third of the ttl to probe, and a third for the reply"
    way.heal()


async def _watched(client: Any) -> bool:
    return any(len(connection.watches) for connection in client._all)
