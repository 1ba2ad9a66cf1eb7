"""A user's own redis-py client in a URL's place: connected as it is, and otherwise left alone."""

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
def given(request: pytest.FixtureRequest, server: Redis) -> dict[str, Any]:
    """What a client may be made with."""
    base: dict[str, Any] = {"host": server.host, "port": server.port, "password": PASSWORD, "db": 4}
    return {
        "plain": base,
        "decoding": {**base, "decode_responses": True, "health_check_interval": 1, "client_name": "theirs"},
        "resp2": {**base, "protocol": 2},
        "pool": {"pool": base},
        "url": {"url": f"redis://:{PASSWORD}@{server.address}/4"},
    }[request.param]


def make(module: Any, given: dict[str, Any]) -> Any:
    """Return a blocking or an asyncio client."""
    if "pool" in given:
        return module.Redis(
            connection_pool=module.BlockingConnectionPool(max_connections=1, timeout=5, **given["pool"])
        )
    if "url" in given:
        return module.Redis.from_url(given["url"])
    return module.Redis(**given)


def test_client(server: Redis, given: dict[str, Any]) -> None:
    """A blocking client is connected like, not used: its own connections work before, meanwhile and afterwards."""
    client = make(redis, given)
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


async def test_asyncio_client(server: Redis, given: dict[str, Any]) -> None:
    """The same for the asyncio twin."""
    client = make(redis.asyncio, given)
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
    """Makes things that are not a client of the right kind."""

    def make(kind: str) -> Any:
        if kind == "cluster":
            # Its constructor connects; what matters here is only what it is.
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # clusters that were never made
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
