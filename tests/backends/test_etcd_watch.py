"""Waiting on a real etcd: one waiter wakes for each release, in order, for mutexes, readers and permits alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fencelock.core.backend import Backend
from fencelock.model import Busy, Claim, Grant, Reason
from tests.backends.conftest import Clients
from tests.backends.etcd_server import counted, own_prefix
from tests.contract.subject import SOON, Subject, background, eventually, waiting
from tests.engines.etcd import Etcd

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
    backend = clients.on(server.url).backend()
    limit = 3
    holders = [await _grant(backend, limit) for _ in range(limit)]
    lines = [await backend.attempt(Claim("x", 30, shared=True, limit=limit), queue=True) for _ in range(4)]
    assert all(isinstance(busy, Busy) for busy in lines)
    first, *rest = lines
    assert isinstance(first, Busy)
    watchers = [len(busy.handle.blocked.by) for busy in lines]
    assert watchers == [limit, 1, 1, 1]
    assert isinstance(await backend.wait(first, 0.05), Busy)
    await backend.release(holders[1])
    granted = await backend.wait(first, SOON)
    assert isinstance(granted, Grant)
    for busy in rest:
        assert isinstance(busy, Busy)
        assert isinstance(await backend.wait(busy, 0.05), Busy)


async def test_many_permits(etcd1: Etcd, clients: Clients) -> None:
    """With more holders than are worth a watch each, the first in line watches them all as one."""
    backend = clients.on(own_prefix(etcd1.url)).backend()
    limit = 40
    holders = [await _grant(backend, limit) for _ in range(limit)]
    busy = await backend.attempt(Claim("x", 30, shared=True, limit=limit), queue=True)
    assert isinstance(busy, Busy)
    other = clients.on(own_prefix(etcd1.url)).backend()
    assert other is not backend

    async def leave() -> None:
        await asyncio.sleep(0.1)
        await backend.release(holders[17])

    if clients.colour == "aio":
        async with background(leave()):
            assert isinstance(await backend.wait(busy, SOON), Grant)
    else:
        await backend.release(holders[17])
        assert isinstance(await backend.wait(busy, SOON), Grant)


async def test_what_happened_before_the_watch(etcd1: Etcd, clients: Clients) -> None:
    """A release between the look and the watch is not missed: the watch begins where the look ended."""
    backend = clients.on(own_prefix(etcd1.url)).backend()
    grant = await backend.attempt(Claim("x", 30), queue=True)
    busy = await backend.attempt(Claim("x", 30), queue=True)
    assert isinstance(grant, Grant)
    assert isinstance(busy, Busy)
    await backend.release(grant)
    assert isinstance(await backend.wait(busy, 10), Grant)


async def test_force_release_within_the_first_moment(etcd1: Etcd, clients: Clients) -> None:
    """A holder is told at once of a forced release that came before its claim was watched."""
    url = own_prefix(etcd1.url)
    locks, other = clients.connect(url), clients.connect(url)
    for _ in range(3):
        lease = await locks.lock("x", ttl=60).acquire()
        assert await other.force_release("x", reason="test") == 1
        assert await lease.lost.wait(timeout=5)
        assert lease.reason is Reason.GONE


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
    assert await lease.lost.wait(timeout=5)


@pytest.mark.parametrize("number", [3])
async def test_abandoned_in_the_middle(etcd1: Etcd, clients: Clients, number: int) -> None:
    """A waiter that leaves the line lets the one behind watch whoever is ahead then."""
    backend = clients.on(own_prefix(etcd1.url)).backend()
    grant = await backend.attempt(Claim("x", 30), queue=True)
    claims = [Claim("x", 30) for _ in range(number)]
    lines = [await backend.attempt(claim, queue=True) for claim in claims]
    await backend.abandon(claims[0])
    await backend.abandon(claims[1])
    last = lines[2]
    assert isinstance(last, Busy)
    moved = await backend.wait(last, SOON)
    assert isinstance(moved, Busy)
    assert isinstance(grant, Grant)
    assert moved.handle.blocked.by[0].endswith(grant.claim.id)
    await backend.release(grant)

    async def granted() -> bool:
        return isinstance(await backend.wait(moved, SOON), Grant)

    await eventually(granted, "the last in line is served")


async def _grant(backend: Backend, limit: int) -> Grant:
    grant = await backend.attempt(Claim("x", 30, shared=True, limit=limit), queue=True)
    assert isinstance(grant, Grant)
    return grant
