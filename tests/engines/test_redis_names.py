"""Names and namespaces on a real Redis: any characters are kept exactly, and unused names leave no keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.crc import key_slot

from fencelock import LockTimeout, aio
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import only_counters, tell
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Own = Callable[..., Redis]

NAMES = [
    "a", "a*", "a?", "a[b]", "a[^b]", "a\\", "a\\*", "a-z", "{a}", "{}", "}{", "a}b", "a b", " a ", "🔒", "a🔒",
    "é", "É", "e\u0301",
    "holders:a", "queue:a", "waiters:a", "a}:holders:b", "a}:queue:b", "x:{1}:holders:y", "token", "layout", "%41", "A",
    "a:b", "/", "..", "'", '"', "$1", "n" * 1024, "\u2028", "\ud7ff",
]  # fmt: skip


async def found(locks: LocksView | aio.Locks, prefix: str = "") -> list[str]:
    """Return the names in use."""
    return [name async for name in locks.names(prefix)]


async def test_keys_of_a_name_share_a_slot(server: Redis, clients: Clients) -> None:
    """All keys of a name have the same hash slot, whatever characters the name has."""
    locks = clients.connect(server.url)
    for name in NAMES:
        before = set(tell(server, "KEYS", "*"))
        lease = await locks.lock(name).acquire()
        async with background(take(locks, name)) as (waiter,):
            await waiting(locks, name)
            stored = set(tell(server, "KEYS", "*")) - before - {b"fencelock:layout"}
            assert (
                len(stored) >= 3
            )  # the holder, the queue, the waiters; the counter, if the name is the first of its bucket
            assert len({key_slot(key) for key in stored}) == 1, stored
            await lease.release()
            await waiter


async def test_names_are_exact(server: Redis, clients: Clients) -> None:
    """No name is taken for another, held or waited for, and `names` finds exactly the names with a prefix."""
    locks = clients.connect(server.url)
    leases = [await locks.lock(name).acquire() for name in NAMES]
    assert await found(locks) == sorted(NAMES)
    # A queued claim has other kinds of keys than a holder: they are not names.
    async with background(*(locks.lock(name).acquire() for name in NAMES)) as waiters:
        for name in NAMES:
            await waiting(locks, name)
        for prefix in [*NAMES, "a}", "b", "y", "h", "q", "*", "?", "[", "n" * 1023]:
            assert await found(locks, prefix) == sorted(name for name in NAMES if name.startswith(prefix)), prefix
        assert await found(locks) == sorted(NAMES)
        for lease in leases:
            assert await lease.release()
        for lease in await asyncio.gather(*waiters):
            await lease.release()
    assert await found(locks) == []


@pytest.mark.parametrize(
    "spaces",
    [
        ("a", "a:b", "a:{1}", "a:{1}:holders"), ("a", "A", "a%3Ab", "a:b"), ("{a}", "{b}", "a", "b"), ("*", "?", "a", "[a]"),
        ("a/call", "a", "a/", "é"),
    ],
)  # fmt: skip
async def test_namespaces_never_mix(server: Redis, clients: Clients, spaces: tuple[str, ...]) -> None:
    """Clients hold the same names in namespaces that look like parts of each other's keys."""
    sides = {space: clients.connect(server.url, namespace=space) for space in spaces}
    leases = [await locks.lock(name).acquire() for locks in sides.values() for name in ("x", "b:{1}:holders:x")]
    assert len({lease.id for lease in leases}) == 8
    for locks in sides.values():
        assert await found(locks) == ["b:{1}:holders:x", "x"]
        assert len((await locks.inspect("x")).holders) == 1
    for lease in leases:
        assert await lease.release()


async def test_names_leave_no_trace(own_redis: Own) -> None:
    """20,000 names leave nothing but the counters of their buckets and the version of the layout."""
    server = own_redis(settings={"appendonly": "no"})

    async def some(start: int) -> None:
        for i in range(start, start + 100):
            async with locks.lock(f"order:{i}"):
                pass

    async with aio.connect(server.url) as locks:
        await asyncio.gather(*(some(start) for start in range(0, 20_000, 100)))
        assert await found(locks) == []
    assert tell(server, "DBSIZE") <= 1024 + 1
    assert only_counters(server)


async def test_abandoned_claims_leave_no_keys(server: Redis, clients: Clients) -> None:
    """Claims that timed out, expired, or were cancelled or killed leave nothing behind after their ttl."""
    factory = clients.on(server.url)
    locks = factory.connect()
    worker = await factory.worker()
    await worker.acquire("killed", ttl=1)
    await worker.kill()
    expired = await locks.lock("expired", ttl=1, renew=False).acquire()
    async with factory.connect().lock("held", ttl=60):
        for _ in range(3):
            with pytest.raises(LockTimeout):
                await locks.lock("held", ttl=1, timeout=0.2).acquire()
            assert await locks.lock("held", ttl=1).try_acquire() is None
        other = await factory.worker()
        async with background(other.acquire("held", ttl=3)) as (task,):
            await waiting(locks, "held")
            await other.kill()
            await asyncio.wait([task])
            assert task.exception() is not None

    async def clean() -> bool:
        return only_counters(server)

    await eventually(clean, "only counters are left", SOON)
    assert expired.lost.is_set()
