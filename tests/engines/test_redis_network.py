"""Connections between a client and a real Redis that break, hang or are closed by the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import LossReason
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import connections, tell
from tests.servers.proxy import Proxy
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Between = Callable[..., Proxy]


def close_connections(server: Redis) -> int:
    """Let the server close every connection, idle or not; return how many."""
    return sum(int(tell(server, "CLIENT", "KILL", "TYPE", kind)) for kind in ("normal", "pubsub"))


async def test_idle_connections_closed_by_the_server(server: Redis, clients: Clients) -> None:
    """Every operation works at once, without an error, after the server has closed all connections."""
    locks = clients.connect(server.url)

    async def hold() -> None:
        async with locks.lock("many", timeout=SOON):
            pass

    async def names() -> list[str]:
        return [name async for name in locks.names()]

    lease = await locks.lock("held", ttl=60).acquire()
    for operation in (
        locks.lock("x").try_acquire, lambda: locks.inspect("x"), names, lambda: take(locks, "y"), lease.renew,
        lambda: locks.force_release("x", reason="test"), lease.release,
    ):  # fmt: skip
        # The blocking runtime opens several connections here: the pool must not return a dead one.
        await asyncio.gather(*(hold() for _ in range(6)))
        assert close_connections(server) >= 1
        found: Any = await operation()
        if hasattr(found, "release"):
            await found.release()


async def test_connections_closed_repeatedly(server: Redis, clients: Clients) -> None:
    """If the server closes idle connections, or all of them repeatedly, no lease is lost and waiters keep their order."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=6).acquire()
    async with background(take(locks, "x"), take(locks, "x")) as waiters:
        await waiting(locks, "x", 2)
        for _ in range(8):
            close_connections(server)
            await asyncio.sleep(0.25)
        await renewed(lease)
        assert len((await locks.inspect("x")).waiters) == 2
        assert await lease.release()
        await asyncio.gather(*waiters)


async def test_waiter_whose_connection_broke_keeps_its_place(server: Redis, proxy: Between, clients: Clients) -> None:
    """A waiter that lost its connection and reconnected is served before the waiters behind it."""
    between = proxy(server)
    near, far = clients.connect(server.url), clients.connect(between.url)
    served = []

    async def wait(locks: LocksView, label: str) -> None:
        async with locks.lock("x", ttl=10) as lease:
            served.append((label, lease.token))

    lease = await near.lock("x").acquire()
    async with background(wait(far, "first")) as (first,):
        await waiting(near, "x", 1)
        async with background(wait(near, "second")) as (second,):
            await waiting(near, "x", 2)
            before = len(connections(server))
            between.disconnect()

            async def back() -> bool:
                return between.stats().open >= 1 and len(connections(server)) >= before

            await eventually(back, "it has connected again")
            await eventually(lambda: _channels_subscribed(server), "its queue entry has its new channel")
            await lease.release()
            await asyncio.gather(first, second)
    assert [label for label, _ in served] == ["first", "second"]
    assert served[0][1] < served[1][1]


async def _channels_subscribed(server: Redis) -> bool:
    """Return whether a connection is subscribed to the channel of every waiter."""
    (key,) = tell(server, "KEYS", "*:waiters:x")
    channels = {value.split(b":")[3] for value in tell(server, "HGETALL", key).values()}
    return set(tell(server, "PUBSUB", "CHANNELS")) >= channels and len(channels) >= 1


@pytest.mark.parametrize("how", ["cut", "drop"])
async def test_silent_connection_is_replaced(server: Redis, proxy: Between, clients: Clients, how: str) -> None:
    """A connection that stops without a reset is replaced in time, and a lease of 4.5 s is kept."""
    between = proxy(server)
    locks = clients.connect(between.url)
    lease = await locks.lock("x", ttl=4.5).acquire()
    assert await take(locks, "y")
    for _ in range(2):
        # Longer than a third of the ttl, after which the client renews; it waits as long for the reply, and then
        # closes the connection.
        getattr(between, how)("to_client")
        await asyncio.sleep(1.8)
        between.heal()
        await renewed(lease)
    assert await take(locks, "y")
    assert await lease.release()


async def test_silence_for_longer_than_the_ttl(server: Redis, proxy: Between, clients: Clients) -> None:
    """Without any reply the lease is lost on time by the holder's own clock; afterwards the client works again."""
    between = proxy(server)
    locks, other = clients.connect(between.url), clients.connect(server.url)
    lease = await locks.lock("x", ttl=0.8).acquire()
    between.cut()
    async with other.lock("x", timeout=SOON) as successor:
        assert lease.lost.is_set()
        assert lease.reason is LossReason.EXPIRED
        assert successor.token > lease.token
    between.heal()
    assert await take(locks, "x") > successor.token


async def test_paused_server(server: Redis, clients: Clients) -> None:
    """A pause of the server that is shorter than the ttl loses no lease; after a longer one, the holder notices in time."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=6).acquire()
    short = await locks.lock("short", ttl=0.5).acquire()
    server.pause()
    async with background(locks.lock("y", ttl=2).acquire()) as (newcomer,):
        await asyncio.sleep(1)
        assert short.lost.is_set()
        server.resume()
        await (await newcomer).release()
    await renewed(lease)
    assert await lease.release()
    assert await take(locks, "short") > short.token


async def test_client_pause(server: Redis, clients: Clients) -> None:
    """During `CLIENT PAUSE` requests wait, and then each gets its reply, once."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=9).acquire()
    tell(server, "CLIENT", "PAUSE", "700", "ALL")
    await asyncio.gather(*(take(locks, f"y{i}") for i in range(10)))
    tell(server, "CLIENT", "PAUSE", "700", "WRITE")
    tokens = await asyncio.gather(*(take(locks, "z") for _ in range(5)))
    assert len(set(tokens)) == 5
    lease.check()
    assert await lease.release()
    assert [name async for name in locks.names()] == []


async def test_slow_network(server: Redis, proxy: Between, clients: Clients) -> None:
    """Replies to requests that timed out are skipped, also if short and long ttls share a connection."""
    between = proxy(server)
    locks = clients.connect(between.url)
    lease = await locks.lock("held", ttl=6).acquire()
    between.delay(0.15)  # a reply takes 0.3 s: too long for the short ttl, but not for the long one
    async with background(*(locks.lock(f"s{i}", ttl=0.3, timeout=1.5).acquire() for i in range(3))) as shorts:
        await asyncio.gather(*(take(locks, f"l{i}") for i in range(3)))
        lease.check()
        between.heal()
        await asyncio.wait(shorts)
    for task in shorts:
        if task.exception() is None:
            await task.result().release()
    assert await lease.release()
    for i in range(3):
        assert await take(locks, f"s{i}")
        assert [seen async for seen in locks.names(f"l{i}")] == []
