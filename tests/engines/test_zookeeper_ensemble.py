"""Servers that are killed, restarted and wiped; ensembles that lose members, their leader, or their majority."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import EngineUnavailable, LossReason
from fencelock.engines.zookeeper.session import ZooKeeperSession
from tests.contract.runtimes import LocksView
from tests.contract.steps import take
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import chroot, session_of
from tests.servers.zookeeper import ZooKeeper, ZooKeeperCluster
from tests.support.waiting import SOON, eventually

LONG = 60.0
ONE_RUNTIME = pytest.mark.runtime_name("aio")
"""A member's start costs seconds of a core, and what a session does without one is the same in both runtimes."""


def member_of(ensemble: ZooKeeperCluster, session: ZooKeeperSession) -> ZooKeeper:
    """Return the member that a client is connected to."""
    assert session._connection is not None
    connection: Any = session._connection._connection
    sock = connection._transport.get_extra_info("socket")
    port = sock.getpeername()[1]
    return next(member for member in ensemble.members if member.port == port)


async def goes_on(locks: LocksView, name: str) -> int:
    """Take a lock and give it back, as soon as the ensemble is there again; return the token."""
    tokens: list[int] = []

    async def taken() -> bool:
        try:
            tokens.append(await take(locks, name))
        except EngineUnavailable:
            return False
        return True

    await eventually(taken, "the ensemble grants again", LONG)
    return tokens[0]


async def test_restart_with_its_data(own_zookeeper: Callable[..., ZooKeeper], clients: Clients) -> None:
    """A server that is killed and comes back with its data finds the lease held, and tokens go on rising."""
    server = own_zookeeper()
    url = chroot(server)
    locks, other = clients.connect(url), clients.connect(url)
    before = await take(locks, "y")
    lease = await locks.lock("x", ttl=180).acquire()  # a busy machine takes its time to start a server
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    assert await goes_on(other, "y") > before
    assert await other.lock("x").try_acquire() is None
    lease.check()

    async def renewed() -> bool:
        try:
            await lease.renew()
        except EngineUnavailable:
            return False
        return True

    await eventually(renewed, "the lease is renewed", LONG)
    assert await lease.release() is True
    assert await take(other, "x") > lease.token


async def test_restart_without_its_data(
    own_zookeeper: Callable[..., ZooKeeper], clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that comes back empty: the lease ends by its own clock, tokens still rise as the clock does, and it is logged.

    The server does not report that it has no such session: it refuses a client that has seen a later transaction.
    """
    server = own_zookeeper()
    locks = clients.connect(chroot(server))
    lease = await locks.lock("x", ttl=10).acquire()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.wipe)
    await asyncio.to_thread(server.start)
    assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.EXPIRED
    assert await goes_on(locks, "x") > lease.token
    assert "has lost its data" in caplog.text


@ONE_RUNTIME
@pytest.mark.parametrize("which", ["leader", "other"])
async def test_member_that_is_killed(zookeeper3: ZooKeeperCluster, clients: Clients, which: str) -> None:
    """With one of three killed, the leader even, leases live on and locks are granted; tokens rise."""
    locks = clients.connect(chroot(zookeeper3))
    lease = await locks.lock("x", ttl=60).acquire()
    token = await take(locks, "y")
    leader = await asyncio.to_thread(zookeeper3.leader)
    victim = leader if which == "leader" else next(member for member in zookeeper3.members if member is not leader)
    await asyncio.to_thread(victim.kill)
    assert await goes_on(locks, "y") > token
    lease.check()
    assert await lease.release() is True
    assert await take(locks, "x") > lease.token


@ONE_RUNTIME
async def test_member_of_ours_that_is_killed(zookeeper3: ZooKeeperCluster, clients: Clients) -> None:
    """When the very member that we are connected to is killed, another one goes on with the same session."""
    locks = clients.connect(chroot(zookeeper3))
    lease = await locks.lock("x", ttl=60).acquire()
    session = session_of(locks)
    id = session.id
    await asyncio.to_thread(member_of(zookeeper3, session).kill)
    assert await goes_on(locks, "y") > lease.token
    assert session.id == id
    lease.check()
    assert await lease.release() is True


@ONE_RUNTIME
async def test_majority_that_is_killed(zookeeper3: ZooKeeperCluster, clients: Clients) -> None:
    """With two of three killed everything is refused in time, nothing lies, and it goes on when they are back."""
    locks = clients.connect(chroot(zookeeper3))
    lease = await locks.lock("x", ttl=3).acquire()
    for member in zookeeper3.members[:2]:
        await asyncio.to_thread(member.kill)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(locks.lock("y", ttl=3).acquire(timeout=2), LONG)
    assert await lease.lost.wait(SOON)
    assert lease.reason in (
        LossReason.EXPIRED,
        LossReason.GONE,
    )  # by our clock, or told by the leader before it saw that it is alone
    with pytest.raises(EngineUnavailable):
        await locks.inspect("x")
    await asyncio.to_thread(zookeeper3.start)
    assert await goes_on(locks, "y") > lease.token
    assert await goes_on(locks, "x") > lease.token


@ONE_RUNTIME
async def test_majority_that_comes_back_in_time(zookeeper3: ZooKeeperCluster, clients: Clients) -> None:
    """A lease that is long enough outlives a majority that is gone for a while."""
    locks = clients.connect(chroot(zookeeper3))
    lease = await locks.lock("x", ttl=90).acquire()
    for member in zookeeper3.members[1:]:
        await asyncio.to_thread(member.kill)
    await asyncio.sleep(1)
    await asyncio.to_thread(zookeeper3.start)
    assert await goes_on(locks, "y") > lease.token
    lease.check()
    assert await lease.release() is True


@ONE_RUNTIME
async def test_cut_off_follower_is_not_believed(zookeeper3: ZooKeeperCluster, clients: Clients) -> None:
    """A member that stands still while the others go on costs those who hang on it their lease in time, never twice."""
    url = chroot(zookeeper3)
    locks = clients.connect(url)
    lease = await locks.lock("x", ttl=4).acquire()
    session = session_of(locks)
    mine = member_of(zookeeper3, session)
    mine.pause()
    others = ",".join(member.address for member in zookeeper3.members if member is not mine)
    other = clients.connect(url.replace(zookeeper3.address, others))
    until = asyncio.get_running_loop().time() + 20
    while asyncio.get_running_loop().time() < until:
        try:
            successor = await other.lock("x").try_acquire()
        except EngineUnavailable:
            successor = None  # the leader stood still, and they elect another
        if successor is not None:
            assert lease.lost.is_set()
            await successor.release()
            break
        if session.connected and member_of(zookeeper3, session) is not mine:
            break  # it went on by way of another member, within its ttl
        await asyncio.sleep(0.05)
    mine.resume()
    await locks.close()
