"""The queue in Lua, on a real server: waiters do not poll, a hand-over wakes one waiter, and dead waiters are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import commands, tell
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Own = Callable[..., Redis]
WAITERS = 20


def commands_sent(server: Redis) -> dict[str, int]:
    """Return the commands since the last RESETSTAT, without those that this measurement sends."""
    ours = {"info", "hello", "auth", "select", "client|setinfo", "config|resetstat", "command"}
    return {name: calls for name, calls in commands(server).items() if name not in ours}


async def test_waiters_do_not_poll(server: Redis, clients: Clients) -> None:
    """Twenty waiters send nothing while they wait; each hand-over takes one script and one PUBLISH."""
    locks = clients.connect(server.url, ttl=300)  # nothing is renewed in the test, even on a slow machine
    lease = await locks.lock("x").acquire()
    async with background(*(take(locks, "x", 60) for _ in range(WAITERS))) as waiters:
        await waiting(locks, "x", WAITERS)
        tell(server, "CONFIG", "RESETSTAT")
        await asyncio.sleep(2)
        assert sum(commands_sent(server).values()) == 0, commands_sent(server)
        tell(server, "CONFIG", "RESETSTAT")
        await lease.release()
        await asyncio.gather(*waiters)
        seen = commands_sent(server)
    assert seen["evalsha"] == WAITERS + 1, "one release each, and nothing else"
    assert seen["publish"] == WAITERS, "one notification for each next waiter"
    assert "subscribe" not in seen


async def test_hand_over_wakes_one(server: Redis, clients: Clients) -> None:
    """A release wakes the next waiter and no other."""
    locks = clients.connect(server.url, ttl=300)
    lease = await locks.lock("x").acquire()

    async def hold() -> int:
        async with locks.lock("x") as mine:
            await done.wait()
            return mine.token

    done = asyncio.Event()
    async with background(*(hold() for _ in range(WAITERS))) as waiters:
        await waiting(locks, "x", WAITERS)
        tell(server, "CONFIG", "RESETSTAT")
        await lease.release()
        await waiting(locks, "x", WAITERS - 1)
        await asyncio.sleep(0.3)
        assert commands(server)["publish"] == 1
        done.set()
        tokens = await asyncio.gather(*waiters)
    assert len(set(tokens)) == WAITERS


@pytest.mark.parametrize("watched", [False, True], ids=["unwatched", "watched"])
async def test_killed_waiters_are_skipped(server: Redis, clients: Clients, watched: bool) -> None:
    """Killed waiters do not delay the next one, although their queue entries last for a minute.

    This also holds if another client subscribes to all channels.
    """
    monitor: Any = redis.Redis(host=server.host, port=server.port).pubsub()  # type: ignore[no-untyped-call]
    if watched:
        monitor.psubscribe("*")
    factory = clients.on(server.url)
    locks = factory.connect()
    lease = await locks.lock("x", ttl=60).acquire()
    dead = [await factory.worker(ttl=60) for _ in range(2)]
    async with background(*(worker.acquire("x", ttl=60) for worker in dead)) as killed:
        await waiting(locks, "x", 2)
        async with background(take(locks, "x", 30)) as (waiter,):
            await waiting(locks, "x", 3)
            for worker in dead:
                await worker.kill()
            await asyncio.wait(killed)
            for task in killed:
                assert task.exception() is not None

            async def disconnected() -> bool:
                return len(tell(server, "PUBSUB", "CHANNELS")) <= 2

            await eventually(disconnected, "the server has noticed that they are gone")
            await lease.release()
            async with asyncio.timeout(SOON):
                assert await waiter > lease.token
    # The killed waiters are still queued; new claims pass them, too.
    assert len((await locks.inspect("x")).waiters) == 2
    async with asyncio.timeout(SOON):
        assert await take(locks, "x", 30)
    monitor.close()


async def test_publishing_that_is_forbidden(own_redis: Own, clients: Clients) -> None:
    """If a server forbids PUBLISH, waiters still get the lock: they attempt again by themselves."""
    server = own_redis()
    tell(server, "ACL", "SETUSER", "default", "-publish")
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=4).acquire()

    async def wait() -> int:
        async with locks.lock("x", ttl=4) as mine:
            return mine.token

    async with background(wait(), wait()) as waiters:
        await waiting(locks, "x", 2)
        await lease.release()
        async with asyncio.timeout(SOON):
            tokens = await asyncio.gather(*waiters)
    assert len({lease.token, *tokens}) == 3


async def test_waiters_behind_a_dead_one_do_not_poll(server: Redis, clients: Clients) -> None:
    """A waiter behind a dead one attempts once when the dead one's entry expires, and does not poll."""
    factory = clients.on(server.url)
    locks = factory.connect(ttl=300)
    lease = await locks.lock("x").acquire()
    dead = await factory.worker()
    async with background(dead.acquire("x", ttl=0.6)) as (task,):
        await waiting(locks, "x", 1)
        async with background(take(locks, "x", 60), take(locks, "x", 60)) as waiters:
            await waiting(locks, "x", 3)
            await dead.kill()
            await asyncio.wait([task])
            assert task.exception() is not None

            async def gone() -> bool:
                return len((await locks.inspect("x")).waiters) == 2

            async def quiet() -> bool:
                tell(server, "CONFIG", "RESETSTAT")
                await asyncio.sleep(1)
                return sum(commands_sent(server).values()) == 0

            await eventually(gone, "the dead waiter's entry has expired")
            await eventually(quiet, "no client sends a command for a second")
            await lease.release()
            async with asyncio.timeout(SOON):
                await asyncio.gather(*waiters)


async def test_first_waiter_dies(server: Redis, clients: Clients) -> None:
    """If the holder expires and the first waiter is dead, the second gets the lock without a wake-up."""
    factory = clients.on(server.url)
    locks = factory.connect()
    holder, first = await factory.worker(), await factory.worker()
    token = await holder.acquire("x", ttl=4)
    async with background(first.acquire("x", ttl=4.5)) as (task,):
        await waiting(locks, "x", 1)
        async with background(take(locks, "x", 30)) as (second,):
            await waiting(locks, "x", 2)
            await first.kill()
            await holder.kill()
            await asyncio.wait([task])
            assert task.exception() is not None
            async with asyncio.timeout(SOON):
                assert await second > token
