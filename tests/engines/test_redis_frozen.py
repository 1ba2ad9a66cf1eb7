"""Connections that a firewall has forgotten: no data passes, neither side gets an error, and new connections work."""

from __future__ import annotations

import asyncio

from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.redis_server import tell
from tests.servers.redis import Redis
from tests.support.waiting import SOON


async def test_lease_is_kept(server: Redis, clients: Clients) -> None:
    """A lease of 4.5 s is kept although its connections freeze repeatedly: the client opens new ones in time."""
    async with forwarding(server) as path:
        locks = clients.connect(path.url)
        lease = await locks.lock("x", ttl=4.5).acquire()
        for _ in range(3):
            path.freeze()
            await renewed(lease)
        assert path.accepted >= 3
        assert await lease.release()
        await locks.close()


async def test_acquire_on_dead_connections(server: Redis, clients: Clients) -> None:
    """An acquire succeeds without an error although the client's open connections are dead."""
    async with forwarding(server) as path:
        locks = clients.connect(path.url)
        await asyncio.gather(*(take(locks, "x") for _ in range(4)))
        path.freeze()
        async with asyncio.timeout(SOON), locks.lock("x", ttl=4, timeout=SOON) as lease:
            assert lease.remaining > 0
        await locks.close()


async def test_waiter_keeps_its_place(server: Redis, clients: Clients) -> None:
    """A waiter whose connection is dead opens a new one before its queue entry expires, and is served first."""
    near = clients.connect(server.url)
    served: list[str] = []

    async def wait(locks: LocksView, label: str) -> None:
        async with locks.lock("x", ttl=9):
            served.append(label)

    async with forwarding(server) as path:
        far = clients.connect(path.url)
        lease = await near.lock("x", ttl=60).acquire()
        async with background(wait(far, "first")) as (first,):
            await waiting(near, "x", 1)
            async with background(wait(near, "second")) as (second,):
                await waiting(near, "x", 2)
                path.freeze()
                # It attempts after 3 s and waits 3 s for the reply; without a new connection its entry expires after 9 s.
                await asyncio.sleep(9.3)
                assert len((await near.inspect("x")).waiters) == 2
                await lease.release()
                async with asyncio.timeout(SOON):
                    await asyncio.gather(first, second)
        await far.close()
    assert served == ["first", "second"]
    assert tell(server, "KEYS", "*:queue:*") == []
