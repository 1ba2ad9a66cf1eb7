"""Servers that refuse commands: EngineUnavailable has the server's own error text, and no claim is left behind."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

import pytest

from fencelock import EngineUnavailable
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import tell
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually

Own = Callable[..., Redis]
SECRET = "s3cr3t-word"


async def refused(locks: LocksView, name: str = "x") -> str:
    """Assert that an acquire is refused; return the error text."""
    with pytest.raises(EngineUnavailable) as caught:
        await locks.lock(name).try_acquire()
    assert caught.value.name == name
    everything = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(locks)
    assert SECRET not in everything
    return str(caught.value)


async def test_replica(own_redis: Own, clients: Clients) -> None:
    """A replica refuses, with the advice to use its master; once it is promoted the same client works."""
    master = own_redis(settings={"repl-diskless-sync-delay": "0"})
    replica = own_redis(settings={"replicaof": f"{master.host} {master.port}"})
    await take(clients.connect(master.url), "other")

    async def in_sync() -> bool:
        return bool(tell(replica, "INFO", "replication")["master_link_status"] == "up")

    await eventually(in_sync, "the replica follows")
    locks = clients.connect(replica.url)
    for _ in range(2):
        said = await refused(locks)
        assert "READONLY" in said
        assert "connect to the master" in said
    tell(replica, "REPLICAOF", "NO", "ONE")
    await take(locks, "x")


async def test_master_that_becomes_a_replica(own_redis: Own, clients: Clients) -> None:
    """If its server becomes read-only, a renewal is refused, and the holder keeps the lease until its ttl is over."""
    server = own_redis()
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=4).acquire()
    tell(server, "REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(EngineUnavailable, match="READONLY"):
        await lease.renew()
    assert lease.remaining > 0
    assert await lease.lost.wait(SOON)
    tell(server, "REPLICAOF", "NO", "ONE")
    assert await take(locks, "x") > lease.token


async def test_out_of_memory(own_redis: Own, clients: Clients) -> None:
    """A full server refuses new claims; a holder keeps its lock, and its release still grants the next waiter."""
    server = own_redis(settings={"maxmemory-policy": "noeviction"})
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=30).acquire()
    async with background(locks.lock("x", ttl=30).acquire()) as (waiter,):
        await waiting(locks, "x")
        tell(server, "CONFIG", "SET", "maxmemory", "1")
        said = await refused(locks, "y")
        assert "OOM" in said
        assert "out of memory" in said
        with pytest.raises(EngineUnavailable, match="OOM"):
            await locks.lock("x").acquire()
        assert [seen async for seen in locks.names()] == ["x"]
        assert len((await locks.inspect("x")).waiters) == 1
        await lease.renew()
        assert await lease.release()
        successor = await waiter
    assert successor.token > lease.token
    assert await successor.release()
    assert [seen async for seen in locks.names()] == []
    tell(server, "CONFIG", "SET", "maxmemory", "0")
    assert await take(locks, "x") > successor.token


async def test_out_of_memory_before_the_first_connection(own_redis: Own, clients: Clients) -> None:
    """A server that is full before the first connection refuses with its own error text."""
    server = own_redis(settings={"maxmemory": "1"})
    assert "OOM" in await refused(clients.connect(server.url))


async def test_too_few_replicas(own_redis: Own, clients: Clients) -> None:
    """A server with too few replicas (min-replicas-to-write) refuses a claim, and nothing is left behind."""
    server = own_redis()
    locks = clients.connect(server.url)
    await take(locks, "x")
    tell(server, "CONFIG", "SET", "min-replicas-to-write", "1")
    said = await refused(locks)
    assert "NOREPLICAS" in said
    tell(server, "CONFIG", "SET", "min-replicas-to-write", "0")
    assert (await locks.inspect("x")).holders == ()
    await take(locks, "x")


async def test_server_that_cannot_save(own_redis: Own, clients: Clients) -> None:
    """A server that stops writes because it cannot save its data refuses with its own error text."""
    server = own_redis(settings={"appendonly": "no", "save": "3600 1000000", "stop-writes-on-bgsave-error": "yes"})
    locks = clients.connect(server.url)
    await take(locks, "x")
    blocked = server.data / "dump.rdb"
    blocked.mkdir()
    tell(server, "BGSAVE")

    async def failed() -> bool:
        return bool(tell(server, "INFO", "persistence")["rdb_last_bgsave_status"] == "err")

    await eventually(failed, "the save failed")
    said = await refused(locks)
    assert "MISCONF" in said
    assert "cannot save" in said


@pytest.mark.parametrize(
    ("login", "words"),
    [
        ("", "give the password in the URL"),
        (f":{SECRET}@", "invalid username-password pair"),
        (f"nobody:{SECRET}@", "invalid username-password pair"),
    ],
)
async def test_wrong_login(
    own_redis: Own, clients: Clients, login: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A server refuses a client without a password or with a wrong one, and no message shows the password."""
    server = own_redis(settings={"requirepass": "right"})
    locks = clients.connect(f"redis://{login}{server.address}/0")
    with caplog.at_level(logging.DEBUG):
        said = await refused(locks)
    assert words in said
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "rights",
    [
        ["allcommands", "allkeys"],
        ["allcommands", "allchannels"],
        ["allcommands", "allchannels", "~other:*"],
        ["+@connection", "+subscribe", "+info", "+get", "+set", "allchannels", "allkeys"],
        ["allcommands", "-exists", "allchannels", "allkeys"],
        ["allcommands", "-info", "allchannels", "allkeys"],
    ],
    ids=["no channels", "no keys", "other keys", "no scripts", "not inside scripts", "no info"],
)
async def test_user_without_rights(own_redis: Own, clients: Clients, rights: list[str]) -> None:
    """If a user lacks a right, the error has the server's text and names the rights that are needed."""
    server = own_redis()
    tell(server, "ACL", "SETUSER", "app", "on", f">{SECRET}", "resetchannels", *rights)
    said = await refused(clients.connect(f"redis://app:{SECRET}@{server.address}/0"))
    assert any(words in said for words in ("NOPERM", "user executing the script can't", "ACL failure in script"))
    assert "begin with the namespace" in said


async def test_user_with_exactly_the_required_rights(own_redis: Own, clients: Clients) -> None:
    """The rights that the error message names are enough: these commands, on the namespace's keys and channels."""
    server = own_redis()
    needed = (
        "hello auth client select subscribe info scan eval evalsha time exists get set hset hget hdel "
        "hexists hgetall hvals pexpire pttl rpush lpush lpop lindex lpos lrange lrem publish del"
    )
    tell(
        server, "ACL", "SETUSER", "app", "on", f">{SECRET}", "resetchannels", "~ours:*", "&ours/*",
        *(f"+{word}" for word in needed.split()),
    )  # fmt: skip
    locks = clients.connect(f"redis://app:{SECRET}@{server.address}/0", namespace="ours")
    lease = await locks.lock("x").acquire()
    await lease.renew()
    async with background(take(locks, "x")) as (waiter,):
        await waiting(locks, "x")
        assert [name async for name in locks.names()] == ["x"]
        assert await locks.force_release("x", reason="test") == 1
        assert await waiter > lease.token
    assert not await lease.release()


async def test_cluster_node(own_redis: Own, clients: Clients) -> None:
    """A node of a Redis Cluster is refused with an error that says so, whether or not the cluster works."""
    server = own_redis(settings={"cluster-enabled": "yes", "databases": "1"})
    locks = clients.connect(server.url)
    assert "Redis Cluster" in await refused(locks)
    tell(server, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")

    async def works() -> bool:
        return "ok" in str(tell(server, "CLUSTER INFO")["cluster_state"])

    await eventually(works, "the cluster works")
    assert "use a server of its own" in await refused(locks)


async def test_layout_of_another_release(server: Redis, clients: Clients) -> None:
    """A namespace with the layout of another release is refused; other namespaces work."""
    tell(server, "SET", "theirs:layout", "99")
    said = await refused(clients.connect(server.url, namespace="theirs"))
    assert "layout 99" in said
    assert tell(server, "DBSIZE") == 1
    await take(clients.connect(server.url, namespace="mine"), "x")


@pytest.mark.parametrize(("policy", "maxmemory", "warns"), [
    ("allkeys-lru", "100mb", True), ("volatile-ttl", "100mb", True), ("allkeys-lru", "0", False),
    ("noeviction", "100mb", False),
])  # fmt: skip
async def test_eviction(
    own_redis: Own, clients: Clients, caplog: pytest.LogCaptureFixture, policy: str, maxmemory: str, warns: bool
) -> None:
    """If a server's policy may evict locks, the log has one warning."""
    server = own_redis(settings={"maxmemory-policy": policy, "maxmemory": maxmemory})
    locks = clients.connect(server.url)
    for _ in range(2):
        await take(locks, "x")
        tell(server, "CLIENT", "KILL", "TYPE", "pubsub")
    said = [
        record for record in caplog.records if record.name == "fencelock.redis" and "may drop locks" in record.message
    ]
    assert len(said) == warns
    assert all(policy in record.message for record in said)
