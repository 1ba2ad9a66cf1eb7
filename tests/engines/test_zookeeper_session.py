"""Sessions that are cut off, expire, or reconnect: a lease counts down by its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fencelock import EngineUnavailable, LossReason
from fencelock.core.clock import NO_DEADLINE
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot, engine_of, expire, session_of
from tests.servers.proxy import Direction, Proxy
from tests.servers.zookeeper import ZooKeeper
from tests.support.waiting import SOON, eventually

Between = Callable[..., Proxy]


def both_ways(server: ZooKeeper, between: Proxy, clients: Clients) -> tuple[LocksView, LocksView]:
    """Return a client that reaches the server by way of the proxy, and one that does so directly."""
    url = chroot(server)
    return clients.connect(url.replace(server.address, between.address)), clients.connect(url)


async def test_suspended_counts_down_and_comes_back(zookeeper1: ZooKeeper, proxy: Between, clients: Clients) -> None:
    """While the connection is gone the lease runs on by its own clock; once it is back the same session renews it."""
    between = proxy(zookeeper1)
    locks, _ = both_ways(zookeeper1, between, clients)
    lease = await locks.lock("x", ttl=20).acquire()
    session = session_of(locks)
    id = session.id
    between.refuse()
    between.disconnect()

    async def away() -> bool:
        return not session.connected

    await eventually(away, "the connection is gone")
    before = lease.remaining
    await asyncio.sleep(0.3)
    assert lease.remaining <= before - 0.3
    with pytest.raises(EngineUnavailable):
        await lease.renew()
    lease.check()
    low = lease.remaining  # it only ever sinks, unless it is renewed
    between.heal()

    async def longer() -> bool:
        lease.check()
        return lease.remaining > low

    await eventually(longer, "the lease is renewed")
    assert session.id == id
    assert await lease.release() is True


async def test_login_that_is_not_answered(zookeeper1: ZooKeeper, proxy: Between, clients: Clients) -> None:
    """A server that takes a connection and does not answer is asked again over another, however long the session is."""
    between = proxy(zookeeper1)
    locks, _ = both_ways(zookeeper1, between, clients)
    lease = await locks.lock("x", ttl=180).acquire()
    accepted = between.stats().accepted
    between.cut()
    between.disconnect()

    async def again() -> bool:
        return between.stats().accepted > accepted + 1

    await eventually(again, "it connects once more")
    between.heal()

    async def renewed() -> bool:
        try:
            await lease.renew()
        except EngineUnavailable:  # the server got an earlier handshake as well, and ended this connection
            return False
        return True

    await eventually(renewed, "the lease is renewed")
    assert await lease.release() is True


@pytest.mark.parametrize("direction", ["to_server", "to_client", "both"])
async def test_partition(zookeeper1: ZooKeeper, proxy: Between, clients: Clients, direction: Direction) -> None:
    """A holder that is cut off, either way, is told that its lease is lost before anybody else gets the lock."""
    between = proxy(zookeeper1)
    far, near = both_ways(zookeeper1, between, clients)
    lease = await far.lock("x", ttl=3).acquire()
    between.cut(direction)
    successor = await near.lock("x").acquire(SOON)
    assert lease.lost.is_set()
    assert lease.reason is LossReason.EXPIRED
    assert successor.token > lease.token
    between.heal()
    assert await lease.release() is False
    successor.check()
    assert await successor.release() is True
    assert await take(far, "x") > successor.token


@pytest.mark.parametrize("direction", ["to_server", "to_client", "both"])
async def test_short_partition(zookeeper1: ZooKeeper, proxy: Between, clients: Clients, direction: Direction) -> None:
    """A holder and a waiter that are cut off for less than their ttl keep what they had."""
    between = proxy(zookeeper1)
    far, near = both_ways(zookeeper1, between, clients)
    lease = await far.lock("x", ttl=10).acquire()
    async with background(far.lock("x", ttl=10).acquire()) as (task,):
        await waiting(near, "x")
        later = await take(near, "later")
        between.drop(direction)
        await asyncio.sleep(1.5)
        between.heal()
        await renewed(lease, 2)
        assert not task.done()
        assert await lease.release() is True
        second = await asyncio.wait_for(task, SOON)
    assert lease.token < second.token < later
    await second.release()


async def test_session_that_ends_on_the_server_while_holding(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """When the server ends the session, all its leases are lost at once, and the client can acquire again."""
    locks = clients.connect(chroot(zookeeper1))
    leases = [await locks.lock(f"x{number}", ttl=30).acquire() for number in range(3)]
    await asyncio.to_thread(expire, zookeeper1, locks)
    for lease in leases:
        assert await lease.lost.wait(SOON)
        assert lease.reason is LossReason.GONE
        assert await lease.release() is False
    assert await take(locks, "x0") > leases[0].token


async def test_session_that_ends_on_the_server_while_waiting(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A waiter whose session the server ended enqueues again and gets the lock."""
    url = chroot(zookeeper1)
    locks, other = clients.connect(url), clients.connect(url)
    holder = await other.lock("x").acquire()
    async with background(locks.lock("x", ttl=10).acquire()) as (task,):
        await waiting(other, "x")
        await asyncio.to_thread(expire, zookeeper1, locks)
        await waiting(other, "x", 1)
        await holder.release()
        lease = await asyncio.wait_for(task, SOON)
    lease.check()
    await lease.release()


async def test_node_that_is_taken_away(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A holder whose node somebody deletes is told at once: nobody waits for a renewal."""
    url = chroot(zookeeper1)
    locks = clients.connect(url)
    lease = await locks.lock("x", ttl=60).acquire()
    await asyncio.sleep(5)  # a beat: from then on it is watched
    with bare(zookeeper1) as kazoo:
        parent = engine_of(locks)._namespace.paths.of("x")
        (child,) = kazoo.get_children(parent)
        kazoo.delete(f"{parent}/{child}")
        assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.GONE


async def test_old_node_of_an_earlier_session(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A claim whose session was lost with its answer finds its old node, sees whose it is, and makes a new one."""
    engine = clients.on(chroot(zookeeper1)).engine()
    claim = Claim("x", 30)
    first = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(first, Grant)
    first.engine_state.session.end()
    assert await engine.renew([first]) == [Renewal.LOST]
    # As if the answer had been lost, too: a new attempt knows nothing of the old node but its id.
    again = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(again, Grant)
    assert again.token > first.token
    assert again.engine_state.session is not first.engine_state.session
    assert [holder.token for holder in (await engine.inspect("x")).holders] == [again.token]
    await engine.abandon(claim)
    snapshot = await engine.inspect("x")
    assert (snapshot.holders, snapshot.waiters) == ((), ())


async def test_ttl_that_the_ensemble_does_not_give(own_zookeeper: Callable[..., ZooKeeper], clients: Clients) -> None:
    """A ttl that no session of this ensemble can keep is refused, with the numbers."""
    server = own_zookeeper(settings={"minSessionTimeout": "4000", "maxSessionTimeout": "40000"})
    locks = clients.connect(chroot(server))
    for ttl, message in ((2, "a ttl of at least 4 s"), (300, "a ttl of at most 40 s")):
        with pytest.raises(ValueError, match=message) as caught:
            await locks.lock("x", ttl=ttl).acquire()
        assert caught.value.name == "x"  # type: ignore[attr-defined]
    async with locks.lock("x", ttl=5) as lease:
        assert lease.ttl == pytest.approx(4 * 2 / 3)


async def test_session_that_hangs_does_not_cost_another_its_leases(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Leases of two sessions are renewed together; if one does not answer, the other's are renewed all the same."""
    engine = clients.on(chroot(zookeeper1)).engine()
    short, long = Claim("short", 20), Claim("long", 60)
    grants: list[Grant | Waiting] = [
        await engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE) for claim in (long, short)
    ]
    assert all(isinstance(grant, Grant) for grant in grants)
    session = grants[0].engine_state.session
    session._accepted = False  # as if it were reconnecting
    held = [grant for grant in grants if isinstance(grant, Grant)]
    assert await engine.renew(held) == [Renewal.UNKNOWN, Renewal.RENEWED]
    session._accepted = True
    assert await engine.renew(held) == [Renewal.RENEWED, Renewal.RENEWED]
