"""URLs for a real Redis: Unix sockets, TLS, redis-py's options, and errors for wrong URLs."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import fencelock
from fencelock import EngineUnavailable, InvalidURL, aio
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import connections, free_port, tell
from tests.servers.redis import Redis, RedisNodes, RedisTls
from tests.support.waiting import SOON

Own = Callable[..., Redis]
SECRET = "s3cr3t"


async def test_unix_socket(own_redis: Own, clients: Clients) -> None:
    """`unix://` connects over a socket in the file system, and selects the database."""
    server = own_redis(settings={"unixsocket": "locks.sock"})
    path = server.data / "locks.sock"
    locks = clients.connect(f"unix://{path}?db=7")
    async with locks.lock("x"):
        assert tell(server, "DBSIZE", db=7) == 3
    with pytest.raises(EngineUnavailable, match=r"missing\.sock"):
        await clients.connect(f"unix://{path.with_name('missing.sock')}").inspect("x")


@pytest.mark.parametrize("scheme", ["redis", "valkey", "REDIS", "Valkey"])
async def test_schemes(server: Redis, clients: Clients, scheme: str) -> None:
    """`valkey://` is the same as `redis://`, and the case of a scheme does not matter."""
    await take(clients.connect(f"{scheme}://{server.address}/0"), "x")


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_tls(redis_tls: RedisTls, clients: Clients, scheme: str) -> None:
    """Waiting, renewing and many acquires at once work over TLS; a certificate that is not trusted is refused."""
    locks = clients.connect(redis_tls.tls_url.replace("rediss", scheme))
    lease = await locks.lock("x", ttl=4.5).acquire()
    async with background(take(locks, "x")) as (waiter,):
        await waiting(locks, "x")
        await renewed(lease)
        assert await lease.release()
        assert await waiter > lease.token
    await asyncio.gather(*(take(locks, f"y{i}") for i in range(20)))
    with pytest.raises(EngineUnavailable, match=r"(?i)certificate"):
        await clients.connect(redis_tls.tls_url.partition("?")[0]).inspect("x")
    await clients.connect(redis_tls.tls_url.partition("?")[0] + "?ssl_cert_reqs=none").inspect("x")


async def test_tls_to_a_server_that_hangs(redis_tls: RedisTls, clients: Clients) -> None:
    """Over TLS, a server that hangs is noticed as fast as without TLS, and the client works again afterwards."""
    locks = clients.connect(redis_tls.tls_url)
    lease = await locks.lock("x", ttl=3).acquire()
    redis_tls.pause()
    with pytest.raises(EngineUnavailable, match=r"no answer within|cannot reach"):  # the renewer may have noticed first
        async with asyncio.timeout(SOON):
            await lease.renew()
    assert await lease.lost.wait(SOON)
    redis_tls.resume()
    assert await take(locks, "x") > lease.token


async def test_tls_to_a_port_without_tls(server: Redis, clients: Clients) -> None:
    """TLS on a port without TLS raises EngineUnavailable."""
    with pytest.raises(EngineUnavailable, match="cannot reach Redis"):
        await clients.connect(f"rediss://{server.address}/0?socket_connect_timeout=1&socket_timeout=1").inspect("x")


async def test_connect_error_says_what_to_do(redis_tls: RedisTls, server: Redis, clients: Clients) -> None:
    """The error text adds advice to the driver's error, and shows no internals of the driver."""
    plain = redis_tls.tls_url.replace("rediss", "redis").partition("?")[0]
    for url, hint in (
        (f"rediss://{server.address}/0?socket_timeout=0.5", "does it speak TLS there"),
        (plain, "if it wants TLS"),
        (f"redis://app:wrong@{server.address}/0", "check the user and the password"),
        (f"redis+sentinel://127.0.0.1:{free_port()}/nosuch", "are the Sentinels up"),
    ):
        with pytest.raises(EngineUnavailable, match=hint) as caught:
            await clients.connect(url).lock("x").acquire()
        assert "<redis" not in str(caught.value)
    for url, hint in (
        ("redis://h:7100,h:7101/0", "several servers are redlock://"),
        ("redis://h1, h2", "several servers are redlock://"),
        ("unix://run/redis.sock", "unix:///run/redis.sock"),
        ("redlock://h1,h2,h3/first", "^'redlock://h1,h2,h3/first' is .*the database is a number"),
    ):
        with pytest.raises(InvalidURL, match=hint):
            fencelock.connect(url)


async def test_spaces_between_nodes(own_redis_nodes: Callable[..., RedisNodes], clients: Clients) -> None:
    """A list of nodes may have spaces after its commas."""
    nodes = own_redis_nodes(3)
    nodes.members[2].stop()  # now both other nodes are needed
    await take(clients.connect(f"redlock://{', '.join(node.address for node in nodes.members)}"), "x")


async def test_options(own_redis: Own, clients: Clients) -> None:
    """redis-py's options keep their meaning; `decode_responses` and the older protocol do no harm."""
    server = own_redis(settings={"requirepass": "p@ss/w:rd"})
    locks = clients.connect(
        f"redis://default:p%40ss%2Fw%3Ard@{server.address}?db=5&client_name=mine&socket_timeout=3&decode_responses=yes"
        "&protocol=2&health_check_interval=1&retry_on_timeout=true&max_connections=1&socket_keepalive=true"
    )
    async with locks.lock("ünïcode"):
        assert tell(server, "DBSIZE", db=5) == 3
        assert {client["name"] for client in connections(server)} == {"mine"}
        assert [name async for name in locks.names()] == ["ünïcode"]


async def test_unreachable_server_is_named(clients: Clients) -> None:
    """The error for an unreachable server or an unknown host name has its address."""
    port = free_port()
    for address in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        with pytest.raises(EngineUnavailable) as caught:
            await clients.connect(f"redis://:{SECRET}@{address}/0").inspect("x")
        assert address in str(caught.value)
        assert str(caught.value).startswith("'x': ")
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    for host in ("no-such-host.invalid", "a" * 70 + ".invalid", ".."):
        with pytest.raises(EngineUnavailable):
            await clients.connect(f"redis://{host}:{port}/0").inspect("x")


@pytest.mark.parametrize("connect", [fencelock.connect, aio.connect])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr3t@host/0?nonsense=1",
        "redis://:s3cr3t@host/0?socket_timeout=soon",
        "redis://:s3cr3t@host/0?db=first",
        "redis://:s3cr3t@host:port/0",
        "redis://user:s3cr3t/more@host/0",
        "redis://user:s3cr3t?more@host/0",
        "redis://:s3cr3t@host:99999/0",
        "redis://host/0?password=s3cr3t&nonsense=1",
        "rediss://:s3cr3t@host/0?ssl_cert_reqs=perhaps",
        "redis://:s3cr3t@[::1/0",
        "redis+sentinel://:s3cr3t@host",
        "redis+sentinel://:s3cr3t@/service",
        "redis+sentinel://:s3cr3t@host:port/service",
        "redis+sentinel://:s3cr3t@host/service/first",
        "redis+sentinel://:s3cr3t@host/service?nonsense=1",
        "redis+sentinel://:s3cr3t@host/service?sentinel_nonsense=1",
        "redis+sentinel://:s3cr3t@host/service?sentinel_socket_timeout=soon",
        "redis+sentinel://host/service?sentinel_password=s3cr3t&db=first",
    ],
)
def test_wrong_urls(connect: Callable[..., Any], url: str) -> None:
    """`connect` itself refuses a wrong URL, and no message or traceback shows the password."""
    with pytest.raises(InvalidURL) as caught:
        connect(url)
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)


@pytest.mark.parametrize("connect", [fencelock.connect, aio.connect])
def test_password_is_not_shown(connect: Callable[..., Any]) -> None:
    """A client does not show the password of its URL."""
    for url in (
        "redis://u:s3cr3t@host/0",
        "redis+sentinel://:s3cr3t@h/s?sentinel_password=s3cr3t",
        "unix://:s3cr3t@/p",
    ):
        locks = connect(url)
        assert "s3cr3t" not in repr(locks) + repr(locks._client.engine) + repr(vars(locks._client.engine))
