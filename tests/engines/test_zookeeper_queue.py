"""Waiting without a herd, and what a client costs the server: watches, requests, sessions, nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kazoo.protocol.serialization import (
    Close,
    Create2,
    Delete,
    Exists,
    GetChildren,
    GetData,
    SetData,
    Sync,
    Transaction,
)

from fencelock.engines.zookeeper.driver import CreateContainer, Driver
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.messages import SET_WATCHES
from fencelock.model import Claim, Grant, Renewal, Waiting
from fencelock.runtime.blocking import run_sync
from tests.contract.subject import SOON, background, eventually, take, waiting
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import backend_of, bare, chroot, link_of
from tests.servers.zookeeper import ZooKeeper

REQUESTS = (Close, Create2, Delete, Exists, GetChildren, GetData, SetData, Sync, Transaction, CreateContainer)
NAMES = {request.type: request.__name__ for request in REQUESTS} | {SET_WATCHES: "SetWatches"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often which request was sent, by the driver's names, and `fired`: how many watches."""
    counter: Counter[str] = Counter()
    post, fired = Driver.post, Link._fired

    def count(self: Driver, *asked: tuple[Any, Any]) -> None:
        counter.update(NAMES[request.type] for request, _ in asked)
        post(self, *asked)

    def count_fired(self: Link, path: str, gone: bool) -> None:
        counter["fired"] += 1
        fired(self, path, gone)

    monkeypatch.setattr(Driver, "post", count)
    monkeypatch.setattr(Link, "_fired", count_fired)
    return counter


async def test_one_waiter_wakes_for_each_release(zookeeper1: ZooKeeper, clients: Clients, asked: Counter[str]) -> None:
    """With 200 waiters on one name a release fires one watch, and nobody has to look who is next."""
    subject = clients.on(chroot(zookeeper1))
    engine = subject.engine()
    claims = [Claim("x", 60, f"c{number}") for number in range(200)]
    outcomes: list[Grant | Waiting] = [await engine.attempt(claim, queue=True) for claim in claims]
    assert isinstance(outcomes[0], Grant)
    holder: Grant = outcomes[0]

    async def wait(outcome: Waiting | Grant) -> Grant:
        while isinstance(outcome, Waiting):
            work = engine.wait(outcome, 20)
            outcome = await (work if clients.runtime_name == "aio" else subject.call(run_sync, work))
        return outcome

    async with background(*(wait(busy) for busy in outcomes[1:])) as tasks:
        await asyncio.sleep(1)
        asked.clear()
        tokens = [holder.token]
        for task in tasks[:20]:
            before = asked["fired"]
            assert await engine.release(holder) is True
            holder = await asyncio.wait_for(task, SOON)
            assert asked["fired"] == before + 1
            tokens.append(holder.token)
        assert tokens == sorted(tokens)
        assert asked["GetChildren"] == 0
        assert asked["GetData"] <= 1  # a beat's look at the layout
        assert asked["Exists"] <= 20  # of its own node, by whoever has not heard of it for a beat
        assert not any(task.done() for task in tasks[20:])


async def test_uncontended_pair(zookeeper1: ZooKeeper, clients: Clients, asked: Counter[str]) -> None:
    """A lock that is free takes one create and one look, sent together, and one transaction that gives it back."""
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "x")
    asked.clear()
    for _ in range(10):
        await take(locks, "x")
    assert asked["Create2"] == asked["GetChildren"] == asked["Transaction"] == 10
    assert set(asked) <= {"Create2", "GetChildren", "Transaction", "Sync", "GetData"}
    assert asked["GetData"] < 10  # a lease that a beat of the pulse comes upon is watched


async def test_waiters_that_leave_leave_no_listeners(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Whoever gives up waiting on a long-held lock leaves nothing in this process, and no second watch on the server."""
    locks = clients.connect(chroot(zookeeper1), ttl=60)
    async with locks.lock("x"):
        for _ in range(30):
            assert await locks.lock("x").try_acquire() is None
            with pytest.raises(TimeoutError):
                await locks.lock("x").acquire(timeout=0.01)
        link = link_of(locks)
        layout = {backend_of(locks)._paths.layout}  # watched for as long as there is a connection
        assert len(link._listeners.keys() - layout) <= 1
        assert len(backend_of(locks)._places) == 1


async def test_many_leases_are_one_renewal(zookeeper1: ZooKeeper, clients: Clients, asked: Counter[str]) -> None:
    """However many leases hang on a session, renewing them all is one sync."""
    engine = clients.on(chroot(zookeeper1)).engine()
    grants: list[Grant] = []
    number, at_once = (10_000, 500) if clients.runtime_name == "aio" else (1_000, 1)
    while len(grants) < number:
        claims = [Claim(f"n{(len(grants) + more) % 100}", 300, shared=True) for more in range(at_once)]
        outcomes = await asyncio.gather(*(engine.attempt(claim, queue=False) for claim in claims))
        grants += [outcome for outcome in outcomes if isinstance(outcome, Grant)]
    await engine.renew(grants)  # the first sets the watches
    asked.clear()
    assert set(await engine.renew(grants)) == {Renewal.RENEWED}
    assert asked["Sync"] <= 3  # one of ours, and the session's own beats meanwhile
    assert sum(asked.values()) == asked["Sync"]


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
    paths = backend_of(locks)._paths
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
        kazoo.delete(backend_of(locks)._paths.of("x"))
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
    assert sorted(backend_of(locks)._sessions._open) == [20, 30]
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


async def test_waiter_that_leaves_does_not_let_the_next_in(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Whoever waits behind one that gave up, or that once held the name and lined up anew, waits for the holder."""
    subject = clients.on(chroot(zookeeper1))
    first, second, third = subject.engine(), subject.engine(), subject.engine()
    claim, late = Claim("x", 30), Claim("x", 30)
    lost = await first.attempt(claim, queue=True)
    assert isinstance(lost, Grant)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(lost.handle.path)
    holder = await second.attempt(Claim("x", 30), queue=True)
    assert isinstance(holder, Grant)
    assert isinstance(await first.attempt(claim, queue=True), Waiting)
    busy = await third.attempt(late, queue=True)
    assert isinstance(busy, Waiting)
    await first.abandon(claim)
    again = await third.wait(busy, 1)
    assert isinstance(again, Waiting)
    assert await second.release(holder) is True
    grant = await third.wait(again, SOON)
    assert isinstance(grant, Grant)
    assert grant.token > holder.token
    assert await third.release(grant) is True
    assert await third.release(grant) is False


async def test_reader_behind_readers_and_a_writer(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """What a writer passes on goes to all readers behind it, and what one reader gives back not to the writer behind two."""
    engine = clients.on(chroot(zookeeper1)).engine()
    writer = await engine.attempt(Claim("x", 30), queue=True)
    readers = [await engine.attempt(Claim("x", 30, shared=True), queue=True) for _ in range(2)]
    last = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(writer, Grant)
    assert isinstance(last, Waiting)
    await engine.release(writer)
    grants = [await engine.wait(busy, SOON) for busy in readers if isinstance(busy, Waiting)]
    first, second = (grant for grant in grants if isinstance(grant, Grant))
    await engine.release(second)
    last = await engine.wait(last, 1)
    assert isinstance(last, Waiting)
    await engine.release(first)
    assert isinstance(await engine.wait(last, SOON), Grant)
