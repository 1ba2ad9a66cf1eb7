"""Every fence, in both APIs, refuses a lease that has ended by its own clock; a token pair has no clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

import fencelock
from fencelock import LeaseLost, StaleToken, aio
from fencelock.aio.fences import etcd as aio_etcd
from fencelock.aio.fences import file as aio_file
from fencelock.aio.fences import memory as aio_memory
from fencelock.aio.fences import objects as aio_objects
from fencelock.aio.fences import redis as aio_redis
from fencelock.aio.fences import sql as aio_sql
from fencelock.aio.fences import zookeeper as aio_zookeeper
from fencelock.aio.lockfree import optimistic as aio_optimistic
from fencelock.fences import TokenPair
from fencelock.fences.etcd import EtcdFence
from fencelock.fences.file import FileFence
from fencelock.fences.http import FencingTokenAuth, header
from fencelock.fences.memory import MemoryFence
from fencelock.fences.objects import ObjectFence, StoredObject
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import FenceColumn, SqlFence, StandaloneSqlFence
from fencelock.fences.zookeeper import ZooKeeperFence
from fencelock.lockfree.optimistic import RecordKey

ENDINGS = ("expired", "released")


class Untouched:
    """A client that must not be used: the fence refuses the lease before its first statement."""

    def transaction(self, *args: Any) -> Any:
        pytest.fail("the fence has sent a statement")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.transaction


class UntouchedAsync(Untouched):
    """The same for the asyncio API; by its module it is a client of redis.asyncio."""

    __module__ = "redis.asyncio"

    async def transaction(self, *args: Any) -> Any:
        pytest.fail("the fence has sent a statement")


def no_connection() -> Any:
    pytest.fail("the fence has opened a connection")


def check_sql(lease: Any, folder: Path) -> None:
    database = sqlite3.connect(":memory:")
    statements: list[str] = []
    database.set_trace_callback(statements.append)
    try:
        SqlFence().check(database, lease)
    finally:
        database.close()
        assert statements == []


async def check_sql_awaited(lease: Any, folder: Path) -> None:
    async with aiosqlite.connect(":memory:") as database:
        statements: list[str] = []
        await database.set_trace_callback(statements.append)
        try:
            await aio_sql.SqlFence().check(database, lease)
        finally:
            assert statements == []


def replace(lease: Any, folder: Path) -> None:
    with FileFence().replace(lease, folder / "stock"):
        pytest.fail("the fence has opened the file")


async def replace_awaited(lease: Any, folder: Path) -> None:
    async with aio_file.FileFence().replace(lease, folder / "stock"):
        pytest.fail("the fence has opened the file")


def write_memory(lease: Any, folder: Path) -> None:
    with MemoryFence().write(lease):
        pytest.fail("the block has begun")


async def write_memory_awaited(lease: Any, folder: Path) -> None:
    async with aio_memory.MemoryFence().write(lease):
        pytest.fail("the block has begun")


SEEN = StoredObject(b"100", '"etag"', None, {})

BLOCKING: dict[str, Callable[[Any, Path], object]] = {
    "sql check": check_sql,
    "sql enter": lambda lease, _: StandaloneSqlFence(no_connection).enter(lease),
    "sql column": lambda lease, _: FenceColumn(paramstyle="qmark").clause(lease),
    "redis enter": lambda lease, _: RedisFence(Untouched()).enter(lease),
    "redis set": lambda lease, _: RedisFence(Untouched()).set(lease, "apples", 95),
    "redis hset": lambda lease, _: RedisFence(Untouched()).hset(lease, "sold", {"apples": 5}),
    "redis delete": lambda lease, _: RedisFence(Untouched()).delete(lease, "apples"),
    "redis run": lambda lease, _: RedisFence(Untouched()).run(lease, "return 1"),
    "redis pipeline": lambda lease, _: RedisFence(Untouched()).pipeline(lease, Untouched()),
    "etcd enter": lambda lease, _: EtcdFence(Untouched()).enter(lease),
    "etcd transaction": lambda lease, _: EtcdFence(Untouched()).transaction(lease, {}),
    "etcd compare": lambda lease, _: EtcdFence(Untouched()).compare(lease),
    "etcd value": lambda lease, _: EtcdFence(Untouched()).value(lease),
    "zookeeper enter": lambda lease, _: ZooKeeperFence(Untouched()).enter(lease),
    "zookeeper check": lambda lease, _: ZooKeeperFence(Untouched()).check(lease, Untouched()),
    "zookeeper commit": lambda lease, _: ZooKeeperFence(Untouched()).commit(lease, Untouched()),
    "file enter": lambda lease, folder: FileFence().enter(lease, folder / "stock"),
    "file write": lambda lease, folder: FileFence().write(lease, folder / "stock", b"95"),
    "file replace": replace,
    "object read": lambda lease, _: ObjectFence(Untouched(), "shop").read(lease, "apples"),
    "object write": lambda lease, _: ObjectFence(Untouched(), "shop").write(lease, "apples", b"95", SEEN),
    "object update": lambda lease, _: ObjectFence(Untouched(), "shop").update(lease, "apples", lambda body: b"95"),
    "memory enter": lambda lease, _: MemoryFence().enter(lease),
    "memory check": lambda lease, _: MemoryFence().check(lease),
    "memory write": write_memory,
    "http header": lambda lease, _: header(lease),
    "http auth": lambda lease, _: FencingTokenAuth(lease),
}

AWAITED: dict[str, Callable[[Any, Path], Awaitable[object]]] = {
    "sql check": check_sql_awaited,
    "sql enter": lambda lease, _: aio_sql.StandaloneSqlFence(no_connection).enter(lease),
    "redis enter": lambda lease, _: aio_redis.RedisFence(UntouchedAsync()).enter(lease),
    "redis set": lambda lease, _: aio_redis.RedisFence(UntouchedAsync()).set(lease, "apples", 95),
    "redis hset": lambda lease, _: aio_redis.RedisFence(UntouchedAsync()).hset(lease, "sold", {"apples": 5}),
    "redis delete": lambda lease, _: aio_redis.RedisFence(UntouchedAsync()).delete(lease, "apples"),
    "redis run": lambda lease, _: aio_redis.RedisFence(UntouchedAsync()).run(lease, "return 1"),
    "etcd enter": lambda lease, _: aio_etcd.EtcdFence(UntouchedAsync()).enter(lease),
    "etcd transaction": lambda lease, _: aio_etcd.EtcdFence(UntouchedAsync()).transaction(lease, {}),
    "zookeeper enter": lambda lease, _: aio_zookeeper.ZooKeeperFence(Untouched()).enter(lease),
    "zookeeper commit": lambda lease, _: aio_zookeeper.ZooKeeperFence(Untouched()).commit(lease, Untouched()),
    "file enter": lambda lease, folder: aio_file.FileFence().enter(lease, folder / "stock"),
    "file write": lambda lease, folder: aio_file.FileFence().write(lease, folder / "stock", b"95"),
    "file replace": replace_awaited,
    "object read": lambda lease, _: aio_objects.ObjectFence(Untouched(), "shop").read(lease, "apples"),
    "object write": lambda lease, _: aio_objects.ObjectFence(Untouched(), "shop").write(lease, "apples", b"95", SEEN),
    "object update": lambda lease, _: aio_objects.ObjectFence(Untouched(), "shop").update(
        lease, "apples", lambda body: b"95"
    ),
    "memory enter": lambda lease, _: aio_memory.MemoryFence().enter(lease),
    "memory check": lambda lease, _: aio_memory.MemoryFence().check(lease),
    "memory write": write_memory_awaited,
}


def short_lease(locks: fencelock.Locks) -> fencelock.Lease:
    return locks.lock("stock", ttl=0.1, renew=False).acquire()


def ended_lease(locks: fencelock.Locks, ending: str) -> fencelock.Lease:
    """Return a lease that has expired or was released."""
    lease = short_lease(locks)
    if ending == "expired":
        assert lease.lost.wait(30)
    else:
        lease.release()
    return lease


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("use", BLOCKING.values(), ids=BLOCKING)
def test_ended_lease_is_refused(use: Callable[[Any, Path], object], ending: str, tmp_path: Path) -> None:
    """A fence raises LeaseLost for an ended lease before its first statement, and says what to do."""
    with fencelock.connect("memory://ended") as locks:
        lease = ended_lease(locks, ending)
        with pytest.raises(LeaseLost, match=r"'stock'.* acquire (it )?again"):
            use(lease, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("use", AWAITED.values(), ids=AWAITED)
def test_ended_lease_is_refused_awaited(
    use: Callable[[Any, Path], Awaitable[object]], ending: str, tmp_path: Path
) -> None:
    """The asyncio API refuses an ended lease of asyncio before its first statement, too."""

    async def main() -> None:
        async with aio.connect("memory://ended-aio") as locks:
            lease = await locks.lock("stock", ttl=0.1, renew=False).acquire()
            if ending == "expired":
                assert await lease.lost.wait(30)
            else:
                await lease.release()
            with pytest.raises(LeaseLost, match=r"'stock'.* acquire (it )?again"):
                await use(lease, tmp_path)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_lease_that_ends_while_a_file_is_written(tmp_path: Path) -> None:
    """A file is not replaced if the lease ends while the new version is written."""
    path = tmp_path / "stock"
    path.write_bytes(b"100")
    with fencelock.connect("memory://ended-file") as locks:
        lease = short_lease(locks)
        with pytest.raises(LeaseLost), FileFence().replace(lease, path) as file:
            file.write(b"95")
            assert lease.lost.wait(30)
    assert path.read_bytes() == b"100"


def test_lease_that_ends_while_an_object_is_changed() -> None:
    """An object is not put if the lease ends while its change is computed."""

    class Store(Untouched):
        def get_object(self, **options: Any) -> Any:
            return {"Body": self, "ETag": '"etag"'}

        def read(self) -> bytes:
            return b"100"

    with fencelock.connect("memory://ended-object") as locks:
        lease = short_lease(locks)

        def change(body: bytes | None) -> bytes:
            assert lease.lost.wait(30)
            return b"95"

        with pytest.raises(LeaseLost):
            ObjectFence(Store(), "shop").update(lease, "apples", change)


def test_lease_that_ends_before_its_pipeline_is_executed() -> None:
    """The block in which a pipeline is executed does not begin if the lease has ended since the writes were queued."""

    class Pipeline:
        def eval(self, *args: Any) -> None: ...

    with fencelock.connect("memory://ended-pipeline") as locks:
        lease = short_lease(locks)
        fenced = RedisFence(Untouched()).pipeline(lease, Pipeline())
        fenced.set("apples", 95)
        assert lease.lost.wait(30)
        with pytest.raises(LeaseLost), fenced.refusals():
            pytest.fail("the pipeline was executed")


def test_lease_that_ends_between_two_requests() -> None:
    """No request is sent with the token of a lease that has ended since the auth was made."""
    with fencelock.connect("memory://ended-auth") as locks:
        lease = short_lease(locks)
        auth = FencingTokenAuth(lease)
        assert lease.lost.wait(30)
        with pytest.raises(LeaseLost):
            auth(pytest.fail)


def test_record_is_not_written_under_an_ended_lease() -> None:
    """A record refuses a lease that has ended, also one that ended after it was given."""
    with fencelock.connect("memory://ended-record") as locks:
        lease = short_lease(locks)
        record = RecordKey(locks, "stock", lease=lease)
        assert lease.lost.wait(30)
        with pytest.raises(LeaseLost):
            record.write(b"95", 0)
        with pytest.raises(LeaseLost):
            RecordKey(locks, "stock", lease=lease)
        assert record.read().value is None


def test_record_is_not_written_under_an_ended_lease_awaited() -> None:
    """A record of the asyncio API refuses a lease that has ended, too."""

    async def main() -> None:
        async with aio.connect("memory://ended-record-aio") as locks:
            lease = await locks.lock("stock", ttl=0.1, renew=False).acquire()
            record = aio_optimistic.RecordKey(locks, "stock", lease=lease)
            assert await lease.lost.wait(30)
            with pytest.raises(LeaseLost):
                await record.write(b"95", 0)

    asyncio.run(main())


def test_token_pair_of_an_ended_lease_is_judged_by_the_mark() -> None:
    """A token pair has no clock: the fence accepts it until it has accepted a newer token."""
    fence = MemoryFence()
    with fencelock.connect("memory://ended-pair") as locks:
        old = ended_lease(locks, "expired")
        pair = TokenPair(old.token, old.id, old.name)
        fence.enter(pair)
        with locks.lock("stock") as new:
            fence.enter(new)
            with pytest.raises(StaleToken):
                fence.enter(pair)


def test_column_judges_an_executed_update_by_its_count() -> None:
    """The count of an UPDATE that was executed decides, also if the lease has ended meanwhile."""
    column = FenceColumn(paramstyle="qmark")
    with fencelock.connect("memory://ended-column") as locks:
        lease = ended_lease(locks, "expired")
        column.check(lease, 1)
        with pytest.raises(StaleToken):
            column.check(lease, 0)
