"""Many locks over few connections, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import fencelock
from fencelock import aio
from tests.engines.redis_server import commands, connections, tell
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Own = Callable[..., Redis]


async def test_thousand_waiting_tasks(server: Redis) -> None:
    """A thousand tasks that wait for a thousand names share a handful of connections."""
    async with aio.connect(server.url) as holders, aio.connect(server.url) as locks:
        held = await asyncio.gather(*(holders.lock(f"n{i}", ttl=60).acquire() for i in range(1000)))
        waiters = [asyncio.ensure_future(locks.lock(f"n{i}", ttl=60).acquire()) for i in range(1000)]

        async def all_wait() -> bool:
            return len(tell(server, "KEYS", "*:queue:*")) == 1000

        await eventually(all_wait, "all wait")
        assert len(connections(server)) <= 4
        await asyncio.gather(*(lease.release() for lease in held))
        got = await asyncio.gather(*waiters)
        assert len(connections(server)) <= 4
        assert all(new.token > old.token for new, old in zip(got, held, strict=True))
        await asyncio.gather(*(lease.release() for lease in got))


async def test_ten_thousand_leases(own_redis: Own) -> None:
    """The client renews 10,000 leases in batches, and holds all of them after more than a ttl."""
    server = own_redis(settings={"appendonly": "no"})
    ttl = 15.0
    async with aio.connect(server.url, ttl=ttl) as locks:
        leases = []
        for start in range(0, 10_000, 500):
            leases += await asyncio.gather(*(locks.lock(f"n{i}").acquire() for i in range(start, start + 500)))
        tell(server, "CONFIG", "RESETSTAT")
        await asyncio.sleep(1.1 * ttl)
        for lease in leases:
            lease.check()
        # Each lease is renewed at least every third of its ttl: one by one that would be 30,000 calls.
        assert commands(server)["evalsha"] <= 1500
        assert len(connections(server)) <= 4
        for start in range(0, 10_000, 500):
            assert all(await asyncio.gather(*(lease.release() for lease in leases[start : start + 500])))


def test_hundred_acquires_in_a_row(server: Redis) -> None:
    """The pool reuses connections: a hundred acquires in a row, while a lease is renewed, need one or two."""
    with fencelock.connect(server.url) as locks:
        before = tell(server, "INFO", "stats")["total_connections_received"]
        with locks.lock("other", ttl=4) as other:
            first, number = other.deadline, 0
            while number < 100 or other.deadline == first:
                with locks.lock(f"n{number}"):
                    number += 1
        used = tell(server, "INFO", "stats")["total_connections_received"] - before - 1
    assert used <= 2


async def test_threads_share_connections(server: Redis) -> None:
    """Each waiting thread needs a connection; afterwards the pool keeps a few, and `close` closes them all."""
    with fencelock.connect(server.url) as locks:

        def work() -> None:
            for _ in range(5):
                with locks.lock("x", timeout=SOON):
                    pass

        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(20)))
        assert 1 <= len(connections(server)) <= 10

    async def none() -> bool:
        return not connections(server)

    await eventually(none, "all connections are closed")
