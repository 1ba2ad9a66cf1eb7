"""Waiting on a real etcd: one waiter wakes for each release, in order, for mutexes, readers and permits alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import EngineUnavailable
from fencelock.core.engine import Engine
from fencelock.engines.etcd import held, watch
from fencelock.engines.etcd.watch import Watcher, Watches
from fencelock.model import Claim, Grant, LossReason, Waiting
from tests.contract.runtimes import client_of
from tests.contract.subject import SOON, Subject, background, eventually, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import counted, own_prefix
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy

WAITERS = 200


def sent(server: Etcd) -> float:
    """Return how many events the server has sent to watchers."""
    return counted(server, "etcd_debugging_mvcc_events_total")


def looked(server: Etcd) -> float:
    """Return how many ranges were asked for."""
    return counted(server, "grpc_server_msg_received_total", grpc_method="Range")


async def test_one_wakes_per_release(own_etcd: Callable[..., Etcd]) -> None:
    """Of 200 that wait for one name, each release wakes one: one event, one look, one grant, in the order of arrival."""
    server = own_etcd()
    subject = Subject(server.url, "aio")
    locks, other = subject.connect(), subject.connect()
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
    await subject.finish()


async def test_first_in_line_for_a_permit(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """Of those who wait for a permit only the first watches the holders: any that leaves lets exactly that one in."""
    server = own_etcd()
    engine = clients.on(server.url).engine()
    limit = 3
    holders = [await _grant(engine, limit) for _ in range(limit)]
    shared = Claim("x", 30, shared=True, limit=limit)
    lines: list[Grant | Waiting] = [await engine.attempt(shared.again(), queue=True) for _ in range(4)]
    assert all(isinstance(busy, Waiting) for busy in lines)
    first, *rest = lines
    assert isinstance(first, Waiting)
    watchers = [len(busy.handle.blocked.by) for busy in lines]
    assert watchers == [limit, 1, 1, 1]
    assert isinstance(await engine.wait(first, 0.05), Waiting)
    await engine.release(holders[1])
    granted = await engine.wait(first, SOON)
    assert isinstance(granted, Grant)
    for busy in rest:
        assert isinstance(busy, Waiting)
        assert isinstance(await engine.wait(busy, 0.05), Waiting)


async def test_many_permits(etcd1: Etcd, clients: Clients) -> None:
    """With more holders than are worth a watch each, the first in line watches them all as one."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    limit = 40
    holders = [await _grant(engine, limit) for _ in range(limit)]
    busy = await engine.attempt(Claim("x", 30, shared=True, limit=limit), queue=True)
    assert isinstance(busy, Waiting)
    other = clients.on(own_prefix(etcd1.url)).engine()
    assert other is not engine

    async def leave() -> None:
        await asyncio.sleep(0.1)
        await engine.release(holders[17])

    if clients.runtime_name == "aio":
        async with background(leave()):
            assert isinstance(await engine.wait(busy, SOON), Grant)
    else:
        await engine.release(holders[17])
        assert isinstance(await engine.wait(busy, SOON), Grant)


async def test_what_happened_before_the_watch(etcd1: Etcd, clients: Clients) -> None:
    """A release between the look and the watch is not missed: the watch begins where the look ended."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    grant = await engine.attempt(Claim("x", 30), queue=True)
    busy = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(grant, Grant)
    assert isinstance(busy, Waiting)
    await engine.release(grant)
    assert isinstance(await engine.wait(busy, 10), Grant)


async def test_force_release_within_the_first_moment(etcd1: Etcd, clients: Clients) -> None:
    """A holder is told at once of a forced release that came before its claim was watched."""
    url = own_prefix(etcd1.url)
    locks, other = clients.connect(url), clients.connect(url)
    for _ in range(3):
        lease = await locks.lock("x", ttl=60).acquire()
        assert await other.force_release("x", reason="test") == 1
        assert await lease.lost.wait(timeout=SOON)
        assert lease.reason is LossReason.GONE


async def test_watch_ends_and_begins_again(etcd1: Etcd, clients: Clients) -> None:
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


@pytest.mark.parametrize("number", [3])
async def test_abandoned_in_the_middle(etcd1: Etcd, clients: Clients, number: int) -> None:
    """A waiter that leaves the line lets the one behind watch whoever is ahead then."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    grant = await engine.attempt(Claim("x", 30), queue=True)
    claims = [Claim("x", 30) for _ in range(number)]
    lines = [await engine.attempt(claim, queue=True) for claim in claims]
    await engine.abandon(claims[0])
    await engine.abandon(claims[1])
    last = lines[2]
    assert isinstance(last, Waiting)
    moved = await engine.wait(last, SOON)
    assert isinstance(moved, Waiting)
    assert isinstance(grant, Grant)
    assert moved.handle.blocked.by == (grant.handle.key,)
    await engine.release(grant)

    async def granted() -> bool:
        return isinstance(await engine.wait(moved, SOON), Grant)

    await eventually(granted, "the last in line is served")


async def _grant(engine: Engine, limit: int) -> Grant:
    grant = await engine.attempt(Claim("x", 30, shared=True, limit=limit), queue=True)
    assert isinstance(grant, Grant)
    return grant


async def test_given_back_while_cut_off(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
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


async def test_watch_on_a_dead_link(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A connection that says nothing any more is noticed, and what is held is watched anew over another one."""
    way = proxy(etcd1)
    prefix = own_prefix(etcd1.url).rpartition("/")[2]
    subject = clients.on(f"etcd://{way.address},{etcd1.address}/{prefix}")
    locks, other = subject.connect(), clients.connect(f"{etcd1.url}/{prefix}")
    engine: Any = client_of(locks).engine
    links = engine._links
    links._at = 0
    lease = await locks.lock("x", ttl=9).acquire()

    async def watched() -> bool:
        return any(link.watches._watchers for link in links._all)

    await eventually(watched, "nothing is watched")
    way.cut("both")
    links._at = 1
    if clients.runtime_name == "blocking":
        for link in [link for link in links._idle if link.member == 0]:
            link.retired = True  # renewals go on elsewhere, and only the watch is on the link that is dead
    assert await other.force_release("x", reason="test") == 1
    assert await lease.lost.wait(timeout=SOON)
    assert lease.reason is LossReason.GONE


async def test_watches_end_with_what_is_held(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
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
        return sum(len(link.watches._watchers) for link in engine._links._all) <= 2

    await eventually(few, "watches are left behind")
    await keep.release()


async def test_watches_of_two_links(etcd1: Etcd, clients: Clients) -> None:
    """To end a watch that was begun on another link ends nothing, though both have the same number."""
    engine: Any = clients.on(own_prefix(etcd1.url)).engine()
    old, new = await engine._links.visit(0), await engine._links.visit(0)
    one, other = (link.watches.begin(b"key", b"", 0, lambda: None) for link in (old, new))
    assert one.id == other.id
    new.watches.end(one)
    assert list(new.watches._watchers.values()) == [other]
    for link in (old, new):
        engine._links.leave(link)


async def test_waiting_in_turns(etcd1: Etcd, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the same one again goes on with the watch it has, and is not told of what that one did before."""
    url = own_prefix(etcd1.url)
    locks, other = clients.connect(url), clients.connect(url)
    begun = 0
    begin = Watches.begin

    def counting(self: Watches, key: bytes, end: bytes, revision: int, ring: Callable[[], object]) -> Watcher:
        nonlocal begun
        begun += not revision  # who holds something watches from its revision on
        return begin(self, key, end, revision, ring)

    monkeypatch.setattr(Watches, "begin", counting)
    monkeypatch.setattr(watch, "FRESH", SOON)  # however slow the machine is
    monkeypatch.setattr(held, "LINGER", SOON)
    for turn in range(5):
        for _ in range(turn):
            await take(other, "x")
        lease = await other.lock("x", ttl=60).acquire()
        async with background(take(locks, "x")) as (task,):
            await waiting(other, "x")  # in the blocking world, looking has a link of its own
            await asyncio.sleep(0.05)
            looks = looked(etcd1)
            assert not task.done()
            await lease.release()
            await task
            assert looked(etcd1) - looks <= 2, "one look after the one event; another if that was too early"
    assert begun == 1


async def test_kept_watch_ends(own_etcd: Callable[..., Etcd], clients: Clients) -> None:
    """A watch that nobody waits with any more ends a little later, also while another lock is held."""
    server = own_etcd()
    locks, other = clients.connect(server.url), clients.connect(server.url)

    async def watched(number: int) -> None:
        async def so() -> bool:
            return counted(server, "etcd_debugging_mvcc_watcher_total") == number

        await eventually(so, "only what is held is watched")

    async def hand_over() -> None:
        lease = await other.lock("x", ttl=60).acquire()
        async with background(take(locks, "x")) as (task,):
            await waiting(other, "x")
            await lease.release()
            await task

    await hand_over()
    await watched(0)
    async with locks.lock("kept", ttl=60):
        await hand_over()
        await watched(1)
