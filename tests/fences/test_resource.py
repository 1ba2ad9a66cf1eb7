"""The resource of a fence is the lease's name unless the caller names another; the lease always comes before it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import fencelock
from fencelock import StaleToken
from fencelock.fences import TokenPair
from fencelock.fences.etcd import EtcdFence
from fencelock.fences.memory import MemoryFence
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import FenceColumn, SqlFence, StandaloneSqlFence
from fencelock.fences.zookeeper import ZooKeeperFence
from tests.fences.counter_servers import counter_kinds


class Fence(NamedTuple):
    """The functions of a fence: enter, write, and read its token."""

    enter: Callable[..., Any]
    write: Callable[..., Any]
    token: Callable[[str], int | None]


def _memory(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    fence = MemoryFence()
    return Fence(fence.enter, fence.check, fence.token)


def _sqlite(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    database = sqlite3.connect(folder / "app.db")
    stack.callback(database.close)
    fence = SqlFence()

    def check(*args: Any, **options: Any) -> None:
        with database:
            fence.check(database, *args, **options)

    return Fence(check, check, lambda resource: fence.token(database, resource))


def _standalone(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    fence = _sqlite(engines, folder, stack)
    standalone = StandaloneSqlFence(lambda: sqlite3.connect(folder / "app.db"))
    return Fence(standalone.enter, standalone.enter, fence.token)


def _redis(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    import redis

    client = redis.Redis.from_url(f"redis://{engines.get('redis').address}/9996")
    stack.callback(client.close)
    client.flushdb()
    fence = RedisFence(client)

    def write(lease: Any, *resource: str, **options: Any) -> None:
        named = {"resource": resource[0]} if resource else options
        fence.set(lease, "apples", 95, **named)
        fence.hset(lease, "sold", {"apples": 5}, **named)
        fence.delete(lease, "sold", **named)
        fence.run(lease, "return 1", **named)
        with client.pipeline() as pipe:
            fenced = fence.pipeline(lease, pipe, *resource, **options)
            fenced.set("apples", 95)
            with fenced.refusals():
                pipe.execute()

    return Fence(fence.enter, write, fence.token)


def _etcd(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    import etcd3gw

    server = engines.get("etcd")
    client = etcd3gw.client(host=server.host, port=server.port, api_path="/v3/")
    client.delete_prefix("test-resource/")
    fence = EtcdFence(client, prefix="test-resource/")

    def write(*args: Any, **options: Any) -> None:
        assert client.transaction({"compare": [fence.compare(*args, **options)]})["succeeded"]
        fence.transaction(args[0], {}, *args[1:], **options)

    return Fence(fence.enter, write, fence.token)


def _zookeeper(engines: Any, folder: Path, stack: ExitStack) -> Fence:
    from kazoo.client import KazooClient

    client = KazooClient(engines.get("zookeeper").address)
    client.start(timeout=30)
    stack.callback(client.close)
    stack.callback(client.stop)
    client.delete("/test-resource", recursive=True)
    fence = ZooKeeperFence(client, root="/test-resource")

    def write(*args: Any, **options: Any) -> None:
        transaction = client.transaction()
        fence.check(args[0], transaction, *args[1:], **options)
        assert transaction.commit() == [True]
        fence.commit(args[0], client.transaction(), *args[1:], **options)

    return Fence(fence.enter, write, fence.token)


MAKE = {
    "memory": _memory,
    "sqlite": _sqlite,
    "standalone": _standalone,
    "redis": _redis,
    "etcd": _etcd,
    "zookeeper": _zookeeper,
}


@pytest.fixture
def fence(kind: str, engines: Any, tmp_path: Path) -> Iterator[Fence]:
    """An empty fence of the kind."""
    with ExitStack() as stack:
        yield MAKE[kind](engines, tmp_path, stack)


@pytest.mark.parametrize("kind", counter_kinds(*MAKE))
def test_resource_defaults_to_the_name_of_the_lease(fence: Fence, kind: str) -> None:
    """The resource is the lease's name unless the caller names another one after the lease, by position or by keyword."""
    with fencelock.connect(f"memory://resource-{kind}") as locks:
        with locks.lock("order:42") as old:
            fence.enter(old)
            fence.write(old)
            fence.enter(old, "stock")
            fence.write(old, resource="stock")
            assert fence.token("order:42") == fence.token("stock") == old.token
        with locks.lock("order:42") as new:
            fence.enter(new)
            fence.write(new)
            stale = TokenPair(old.token, old.id, old.name)  # without the clock of the lease, which was released
            with pytest.raises(StaleToken, match="'order:42' refused token"):
                fence.enter(stale)
            fence.write(stale, "stock")  # this resource has accepted no newer token
            assert (fence.token("order:42"), fence.token("stock")) == (new.token, old.token)


@pytest.mark.parametrize("kind", counter_kinds(*MAKE))
def test_a_lease_without_a_name_needs_a_resource(fence: Fence) -> None:
    """A lease without a name needs a resource; a resource in place of the lease is refused with advice."""
    for step in (fence.enter, fence.write):
        with pytest.raises(TypeError, match=r"a fence's resource must be given, as in resource='order:42'"):
            step(SimpleNamespace(token=34, id="a"))
        with pytest.raises(TypeError, match=r"not str: the lease comes before the resource"):
            step("order:42", SimpleNamespace(token=34, id="a"))
        with fencelock.connect("memory://group") as locks, locks.multi("a", "b") as group:
            with pytest.raises(TypeError, match=r'not Group: .* pass group\["name"\]$'):
                step(group)
    fence.enter(SimpleNamespace(token=34, id="a"), "order:42")


def test_column_takes_the_name_of_the_lease_as_well() -> None:
    """The column form names the lock in its refusal unless the caller names a resource."""
    column = FenceColumn(paramstyle="qmark")
    lease = SimpleNamespace(token=34, id="a", name="order:42")
    with pytest.raises(StaleToken, match="'order:42' refused token 34"):
        column.check(lease, 0)
    with pytest.raises(StaleToken, match="'stock' refused token 34"):
        column.check(lease, 0, "stock")
