"""Data loss on a real server: flushed scripts and keys, restarts with and without data, a replica that lagged behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import redis

from fencelock import LeaseLost, LossReason
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.redis_server import tell
from tests.servers.proxy import Proxy
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Own = Callable[..., Redis]


async def test_scripts_flushed_between_any_two_calls(server: Redis, clients: Clients) -> None:
    """Every operation sends its script again after a SCRIPT FLUSH."""
    locks = clients.connect(server.url)
    for _ in range(2):
        tell(server, "SCRIPT FLUSH")
        lease = await locks.lock("x").acquire()
        tell(server, "SCRIPT FLUSH")
        await lease.renew()
        tell(server, "SCRIPT FLUSH")
        assert len((await locks.inspect("x")).holders) == 1
        async with background(locks.lock("x").acquire()) as (waiter,):
            await waiting(locks, "x")
            tell(server, "SCRIPT FLUSH")
            assert await lease.release()
            successor = await waiter
        assert successor.token > lease.token
        tell(server, "SCRIPT FLUSH")
        assert await locks.force_release("x", reason="test") == 1
        tell(server, "SCRIPT FLUSH")
        assert not await successor.release()


async def test_scripts_flushed_all_the_time(server: Redis, clients: Clients) -> None:
    """All operations, also batches of renewals, work while another client flushes the scripts without a pause."""
    locks = clients.connect(server.url)
    many = [await locks.lock(f"many{i}", ttl=6).acquire() for i in range(20)]

    async def flush() -> None:
        while True:
            await asyncio.to_thread(tell, server, "SCRIPT FLUSH")

    async def work(name: str) -> list[int]:
        return [await take(locks, name) for _ in range(30)]

    async with background(flush()):
        for tokens in await asyncio.gather(*(work("x") for _ in range(4))):
            assert tokens == sorted(set(tokens))
        await asyncio.gather(*(renewed(lease) for lease in many))
    for lease in many:
        assert await lease.release()


async def test_flushed_while_held(server: Redis, clients: Clients) -> None:
    """A holder learns at its next renewal that its lock was flushed away; tokens still rise."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=6).acquire()
    tell(server, "FLUSHALL")
    assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.GONE
    with pytest.raises(LeaseLost):
        lease.check()
    assert await take(locks, "x") > lease.token


async def test_flushed_while_waiting(server: Redis, clients: Clients) -> None:
    """Waiters whose queue entries were flushed still get the lock, one after the other."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=30, renew=False).acquire()

    async def short() -> int:
        async with locks.lock("x", ttl=4.5) as lease:
            return lease.token

    async with background(*(short() for _ in range(3))) as waiters:
        await waiting(locks, "x", 3)
        tell(server, "FLUSHALL")
        tokens = await asyncio.gather(*waiters)
    assert len(set(tokens)) == 3
    assert min(tokens) > lease.token
    assert not await lease.release()


async def test_killed_and_restarted_with_its_data(own_redis: Own, clients: Clients) -> None:
    """A lease is held and renewed through a crash that is shorter than its ttl, and its waiter keeps its place."""
    server = own_redis(settings={"appendfsync": "always"})
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=30).acquire()  # a loaded machine starts a server slowly
    async with background(locks.lock("x", ttl=30).acquire()) as (waiter,):
        await waiting(locks, "x")
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        lease.check()
        await lease.renew()
        assert not waiter.done()
        seen = await locks.inspect("x")
        assert [holder.token for holder in seen.holders] == [lease.token]
        assert len(seen.waiters) == 1
        assert await lease.release()
        successor = await waiter
    assert successor.token > lease.token
    assert await successor.release()


async def test_killed_and_restarted_without_its_data(
    own_redis: Own, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A holder loses its lease when the server came back empty, the log has a warning, and tokens still rise."""
    server = own_redis()
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=6).acquire()
    async with background(locks.lock("x", ttl=30).acquire()) as (waiter,):
        await waiting(locks, "x")
        for step in (server.kill, server.wipe, server.start):
            await asyncio.to_thread(step)
        successor = await waiter
        assert await lease.lost.wait(SOON)
    assert lease.reason in (LossReason.GONE, LossReason.EXPIRED)
    assert successor.token > lease.token
    assert "was restarted or replaced" in caplog.text
    assert await successor.release()


async def test_lagging_replica_promoted(own_redis: Own, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A replica that did not receive the last grants still mints higher tokens when it is promoted."""
    master = own_redis(settings={"repl-diskless-sync-delay": "0"})
    between = proxy(master)
    replica = own_redis(settings={"replicaof": f"{between.host} {between.port}"})
    locks = clients.connect(master.url)
    await take(locks, "x")

    async def in_sync() -> bool:
        return bool(tell(replica, "INFO", "replication")["master_link_status"] == "up")

    await eventually(in_sync, "the replica follows")
    between.cut("to_client")
    lease = await locks.lock("x", ttl=60).acquire()
    tokens = [await take(locks, f"y{i}") for i in range(50)]
    tell(replica, "REPLICAOF", "NO", "ONE")
    others = clients.connect(replica.url)
    assert await take(others, "x") > lease.token
    for i, token in enumerate(tokens):
        assert await take(others, f"y{i}") > token
    assert await lease.release()


async def replicated(own_redis: Own) -> tuple[Redis, Redis]:
    """A master, and a replica that has all of its data."""
    master = own_redis(settings={"repl-diskless-sync-delay": "0"})
    replica = own_redis(settings={"replicaof": f"{master.host} {master.port}", "repl-diskless-sync-delay": "0"})
    await follows(replica)
    return master, replica


async def follows(replica: Redis) -> None:
    """Wait until the replica has all data of its master."""

    async def in_sync() -> bool:
        return bool(tell(replica, "INFO", "replication")["master_link_status"] == "up")

    await eventually(in_sync, "the replica follows")


async def fail_over(master: Redis, replica: Redis) -> None:
    """Exchange the roles of master and replica, without data loss and without closing a connection."""
    with redis.Redis(host=master.host, port=master.port, single_connection_client=True) as client:
        client.set("failover", 1)  # WAIT covers the writes of its own connection; replicas get all writes in order
        assert client.wait(1, 5000) == 1
    tell(replica, "REPLICAOF", "NO", "ONE")
    tell(master, "REPLICAOF", replica.host, replica.port)
    await follows(master)


async def test_failover_while_others_wait(own_redis: Own, clients: Clients) -> None:
    """Waiters on the old master, now a replica, do not take a notification that the new master publishes for a grant."""
    master, replica = await replicated(own_redis)
    lease = await clients.connect(master.url).lock("x", ttl=30).acquire()

    async def wait() -> None:
        async with clients.connect(master.url).lock("x", ttl=9):
            pass

    async with background(wait(), wait(), wait()) as waiters:
        await waiting(clients.connect(master.url), "x", 3)
        await fail_over(master, replica)
        there = clients.connect(replica.url)
        await waiting(there, "x", 3)
        assert await there.force_release("x", reason="test") == 1
        newer = await there.lock("x", ttl=30).acquire()
        assert newer.token > lease.token
        await asyncio.sleep(0.3)
        assert not any(waiter.done() for waiter in waiters)
        assert await newer.release()
        tell(master, "REPLICAOF", "NO", "ONE")  # now their attempts succeed there
        async with asyncio.timeout(SOON):
            await asyncio.gather(*waiters)
    assert not await lease.release()


async def test_failover_while_held(own_redis: Own, clients: Clients) -> None:
    """If the old master, now a replica, refuses a release, the client releases on the server that its address leads to."""
    master, replica = await replicated(own_redis)
    async with forwarding(master) as path:
        locks = clients.connect(path.url)
        lease = await locks.lock("x", ttl=60).acquire()
        await fail_over(master, replica)
        path.lead_to(replica)
        assert await lease.release()
        assert await take(clients.connect(replica.url), "x") > lease.token
        await locks.close()


async def test_clock_that_goes_back(server: Redis, clients: Clients) -> None:
    """A counter that is ahead of the clock, as after the clock was set back, rises by one per grant and never falls."""
    locks = clients.connect(server.url)
    before = await take(locks, "x")
    (counter,) = tell(server, "KEYS", "fencelock:{*}")
    ahead = before + 3_600_000_000
    tell(server, "SET", counter, ahead)
    assert [await take(locks, "x") for _ in range(3)] == [ahead + 1, ahead + 2, ahead + 3]
    lease = await locks.lock("x").acquire()
    async with background(take(locks, "x")) as (waiter,):
        await waiting(locks, "x")
        assert await locks.force_release("x", reason="test") == 1
        assert await waiter > lease.token > ahead
    assert not await lease.release()
    # A token can be lower only if the counter is lost while the clock is behind: hence "clocked".
    assert locks.traits.guarantee == "clocked"


async def test_server_that_is_loading_its_data(own_redis: Own, clients: Clients) -> None:
    """A server that is loading refuses new clients with its own error text, and waiters wait until it has loaded."""
    server = own_redis(settings={"key-load-delay": "400", "loading-process-events-interval-bytes": "1024"})
    locks = clients.connect(server.url)
    holder = await locks.lock("x", ttl=60).acquire()
    for start in range(0, 8000, 1000):
        tell(server, "MSET", *(word for i in range(start, start + 1000) for word in (f"ballast{i}", "x")))
    tell(server, "BGREWRITEAOF")

    async def rewritten() -> bool:
        seen = tell(server, "INFO", "persistence")
        return not seen["aof_rewrite_in_progress"] and not seen["aof_rewrite_scheduled"]

    await eventually(rewritten, "the file is rewritten")
    async with background(take(clients.connect(server.url), "x", 60)) as (waiter,):
        await waiting(locks, "x")
        server.kill()
        server.launch()
        newcomer, said = clients.connect(server.url), ""
        until = time.monotonic() + SOON
        while "LOADING" not in said and time.monotonic() < until:
            try:
                await newcomer.inspect("y")
            except ConnectionError as error:
                said = str(error)
        assert "still reading its data" in said
        server.wait_ready()
        assert await holder.release()
        assert await waiter > holder.token
