"""`connect` with an application's own redis-py client: fencelock copies its settings and does not use its connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

import fencelock
from fencelock import aio
from tests.engines.redis_server import connections, tell
from tests.servers.redis import Redis

Own = Callable[..., Redis]
PASSWORD = "s3cr3t"


@pytest.fixture
def server(own_redis: Own) -> Redis:
    """A server with a password."""
    return own_redis(settings={"requirepass": PASSWORD})


@pytest.fixture(params=["plain", "decoding", "resp2", "pool", "url"])
def settings(request: pytest.FixtureRequest, server: Redis) -> dict[str, Any]:
    """The arguments from which an application may make its client."""
    base: dict[str, Any] = {"host": server.host, "port": server.port, "password": PASSWORD, "db": 4}
    return {
        "plain": base,
        "decoding": {**base, "decode_responses": True, "health_check_interval": 1, "client_name": "theirs"},
        "resp2": {**base, "protocol": 2},
        "pool": {"pool": base},
        "url": {"url": f"redis://:{PASSWORD}@{server.address}/4"},
    }[request.param]


def make(module: Any, settings: dict[str, Any]) -> Any:
    """Return a blocking or an asyncio client."""
    if "pool" in settings:
        return module.Redis(
            connection_pool=module.BlockingConnectionPool(max_connections=1, timeout=5, **settings["pool"])
        )
    if "url" in settings:
        return module.Redis.from_url(settings["url"])
    return module.Redis(**settings)


def test_client(server: Redis, settings: dict[str, Any]) -> None:
    """fencelock connects with a blocking client's settings; the client's own connections work before, meanwhile and after."""
    client = make(redis, settings)
    client.set("theirs", "1")
    with fencelock.connect(client) as locks:
        lease = locks.lock("x").acquire()
        with pytest.raises(fencelock.LockTimeout):
            locks.lock("x", timeout=0.1).acquire()
        assert lease.release()
        assert locks.lock("x").try_acquire().release()  # type: ignore[union-attr]
        assert PASSWORD not in repr(locks)
        assert server.address in repr(locks)
        assert client.get("theirs") in ("1", b"1")
        assert tell(server, "EXISTS", "fencelock:layout", db=4) == 1
    assert client.get("theirs") in ("1", b"1")
    assert len(connections(server)) == 1
    client.close()
    client.connection_pool.disconnect()


async def test_asyncio_client(server: Redis, settings: dict[str, Any]) -> None:
    """fencelock connects with an asyncio client's settings; the client's own connections keep working."""
    client = make(redis.asyncio, settings)
    await client.set("theirs", "1")
    async with aio.connect(client) as locks:
        lease = await locks.lock("x").acquire()
        with pytest.raises(fencelock.LockTimeout):
            await locks.lock("x", timeout=0.1).acquire()
        assert await lease.release()
        assert PASSWORD not in repr(locks)
        assert server.address in repr(locks)
        assert await client.get("theirs") in ("1", b"1")
        assert tell(server, "EXISTS", "fencelock:layout", db=4) == 1
    assert await client.get("theirs") in ("1", b"1")
    await client.aclose()
    await client.connection_pool.disconnect()  # the application closes its own connections


def test_client_that_is_closed(server: Redis) -> None:
    """Closing the user's client does not disturb the locks."""
    client = redis.Redis(host=server.host, port=server.port, password=PASSWORD)
    with fencelock.connect(client) as locks, locks.lock("x") as lease:
        client.close()
        lease.renew()


@pytest.fixture
def wrong() -> Callable[[str], Any]:
    """Makes objects that are no client, or a client of the wrong kind."""

    def make(kind: str) -> Any:
        if kind == "cluster":
            # Without its constructor, which would connect: the test needs only the type.
            return redis.RedisCluster.__new__(redis.RedisCluster)
        if kind == "asyncio cluster":
            return redis.asyncio.RedisCluster.__new__(redis.asyncio.RedisCluster)
        if kind == "pool":
            return redis.ConnectionPool()
        if kind == "fake":
            return type("FakeRedis", (redis.Redis,), {"__module__": "fakeredis._server"})()
        if kind == "fake pool":
            fake = type("FakeConnection", (redis.asyncio.Connection,), {"__module__": "fakeredis.aioredis"})
            return redis.asyncio.Redis(connection_pool=redis.asyncio.ConnectionPool(connection_class=fake))
        return {"blocking": redis.Redis, "asyncio": redis.asyncio.Redis}[kind](password=PASSWORD)

    return make


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of clusters without a constructor call
@pytest.mark.parametrize(
    ("connect", "kind", "words"),
    [
        (fencelock.connect, "asyncio", "must be a redis.Redis here.*fencelock.aio.connect takes this one"),
        (aio.connect, "blocking", "must be a redis.asyncio.Redis here.*fencelock.connect takes this one"),
        (fencelock.connect, "cluster", "redis.Redis here.*RedisCluster"),
        (aio.connect, "cluster", "redis.asyncio.Redis here.*RedisCluster"),
        (fencelock.connect, "asyncio cluster", "RedisCluster"),
        (aio.connect, "asyncio cluster", "RedisCluster"),
        (fencelock.connect, "pool", "redis.Redis here.*ConnectionPool"),
        (fencelock.connect, "fake", "fakeredis .*memory://"),
        (aio.connect, "fake pool", "fakeredis .*memory://"),
    ],
)
def test_wrong_clients(connect: Callable[[Any], Any], kind: str, words: str, wrong: Callable[[str], Any]) -> None:
    """`connect` refuses a client of the other runtime, of a cluster, of no server, and an object that is no client."""
    with pytest.raises(TypeError, match=words) as caught:
        connect(wrong(kind))
    assert PASSWORD not in str(caught.value)
