"""The contestants on ZooKeeper: the locks of kazoo, tooz and fencelock, and bare requests. Each imports its package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from bench.harness import Run

TTL = 30
# The server does not sync to disk: the benchmark measures the locks, not the disk.
SETTINGS = {"forceSync": "no"}
# Servers in tests use Java's fast, simple compiler. A measured server uses the optimizing one, as in production.
JVM = {"_JAVA_OPTIONS": "-XX:TieredStopAtLevel=4 -Xmx512m"}


_open: list[Callable[[], object]] = []


def finish() -> None:
    """Close all clients before the server stops: kazoo would try to reconnect, and log it."""
    while _open:
        _open.pop()()


def ours(url: str) -> AbstractContextManager[Any]:
    import fencelock

    locks = fencelock.connect(url)
    _open.append(locks.close)
    return locks.lock("fencelock", ttl=TTL)


def kazoo(url: str) -> AbstractContextManager[Any]:
    lock: AbstractContextManager[Any] = _client(url).Lock("/kazoo")
    return lock


def tooz(url: str) -> AbstractContextManager[Any]:
    from tooz.coordination import get_coordinator

    coordinator = get_coordinator(f"{url}?timeout={TTL}", b"bench")
    coordinator.start()
    _open.append(coordinator.stop)
    lock: AbstractContextManager[Any] = coordinator.get_lock(b"tooz")
    return lock


def raw(url: str) -> AbstractContextManager[Any]:
    from bench.zookeeper_bare import BareLock

    return BareLock(url, "/raw", TTL)


def bare(url: str) -> Run:
    """Return a run of the fewest requests of a lock: create and children together, then delete."""
    client = _client(url)
    client.ensure_path("/bare")

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            created = client.create_async("/bare/lock-", b"bench", ephemeral=True, sequence=True)
            children = client.get_children_async("/bare")
            path = created.get()
            assert path.rpartition("/")[2] in children.get()
            client.delete(path)

    return run


def bare_async(url: str, loop: asyncio.AbstractEventLoop) -> Run:
    """Return the same run for asyncio, with a future for each of kazoo's callbacks."""
    client = _client(url)
    client.ensure_path("/bare-async")

    def future(request: Any) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = loop.create_future()
        request.rawlink(lambda it: loop.call_soon_threadsafe(reply.set_result, it.get()))
        return reply

    async def pairs(repetitions: int) -> None:
        for _ in range(repetitions):
            created = future(client.create_async("/bare-async/lock-", b"bench", ephemeral=True, sequence=True))
            children = future(client.get_children_async("/bare-async"))
            path = await created
            assert path.rpartition("/")[2] in await children
            await future(client.delete_async(path))

    return lambda repetitions: loop.run_until_complete(pairs(repetitions))


def ours_async(url: str, loop: asyncio.AbstractEventLoop) -> AbstractAsyncContextManager[Any]:
    from fencelock import aio

    async def lock() -> AbstractAsyncContextManager[Any]:
        locks = aio.connect(url)
        _open.append(lambda: loop.run_until_complete(locks.close()))
        return locks.lock("fencelock-async", ttl=TTL)

    return loop.run_until_complete(lock())


def _client(url: str) -> Any:
    from kazoo.client import KazooClient

    client = KazooClient(url.partition("://")[2], timeout=TTL)
    client.start()
    _open.append(client.stop)
    return client
