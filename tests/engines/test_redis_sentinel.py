"""Masters found through Sentinel: real servers, a real failover, in both runtimes."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

import fencelock
from fencelock import EngineUnavailable, aio
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.redis_server import free_port, tell
from tests.servers.redis import Redis, Sentinel
from tests.support.waiting import SOON, eventually

PASSWORD, SENTINEL_PASSWORD = "for&servers%=1", "for-sentinels"


class Fleet(NamedTuple):
    """A master, its replica, and the Sentinels that watch them."""

    master: Redis
    replica: Redis
    sentinels: list[Sentinel]

    @property
    def hosts(self) -> str:
        """The Sentinels' addresses."""
        return ",".join(sentinel.address for sentinel in self.sentinels)

    async def fail_over(self) -> None:
        """Promote the replica once it has all data of the master."""

        async def caught_up() -> bool:
            given = tell(self.master, "INFO", "replication")["master_repl_offset"]
            return bool(tell(self.replica, "INFO", "replication").get("slave_repl_offset", -1) >= given)

        async def done() -> bool:
            named = tell(self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.sentinels[0].service)
            if int(named[1]) == self.replica.port:
                return True
            # Repeated: Sentinel may not know the replica yet, may be busy with it, or may have timed out on a loaded machine.
            with suppress(redis.ResponseError):
                tell(self.sentinels[0], "SENTINEL", "FAILOVER", self.sentinels[0].service)
            await asyncio.sleep(0.05)
            return False

        await eventually(caught_up, "the replica has all data", 2 * SOON)
        await eventually(done, "the replica is the master", 2 * SOON)
        self.master.kill()  # Sentinel would make it a replica only after eight seconds


@pytest.fixture
def fleet(own_redis: Callable[..., Redis], own_sentinel: Callable[..., Sentinel]) -> Callable[..., Fleet]:
    """Makes a master, a replica and a Sentinel, with or without passwords."""

    def make(secure: bool = False) -> Fleet:
        login = {"requirepass": PASSWORD, "masterauth": PASSWORD} if secure else {}
        common = {"repl-diskless-sync-delay": "0", "replica-announce-ip": "127.0.0.1", **login}
        master = own_redis(settings=common)
        replica = own_redis(settings={"replicaof": f"{master.host} {master.port}", **common})
        sentinel = own_sentinel(master, settings={"requirepass": SENTINEL_PASSWORD} if secure else {})
        tell(sentinel, "SENTINEL", "DEBUG", "info-period", "100")
        return Fleet(master, replica, [sentinel])

    return make


async def test_failover(fleet: Callable[..., Fleet], clients: Clients) -> None:
    """After a failover the same client works with the new master, a waiter gets the lock, and tokens still rise."""
    ours = fleet()
    locks = clients.connect(f"redis+sentinel://127.0.0.1:{free_port()},{ours.hosts}/mymaster/3")
    lease = await locks.lock("x", ttl=30).acquire()
    assert tell(ours.master, "DBSIZE", db=3) == 3
    async with background(locks.lock("x", ttl=30).acquire()) as (waiter,):
        await waiting(locks, "x")
        await ours.fail_over()

        async def released() -> bool:
            try:
                return len((await locks.inspect("x")).holders) == 1
            except EngineUnavailable:
                return False

        await eventually(released, "the new master answers")
        await lease.renew()
        assert await lease.release()
        successor = await waiter
    assert successor.token > lease.token
    assert await successor.release()
    assert tell(ours.replica, "DBSIZE", db=3) >= 2


async def test_passwords_for_both(fleet: Callable[..., Fleet], clients: Clients) -> None:
    """Servers and Sentinels can have different passwords, and no message shows them."""
    ours = fleet(secure=True)
    quoted = PASSWORD.replace("%", "%25").replace("&", "%26").replace("=", "%3D")
    url = f"redis+sentinel://:{quoted}@{ours.hosts}/mymaster?sentinel_password={SENTINEL_PASSWORD}&sentinel_socket_timeout=2"
    locks = clients.connect(url)
    await take(locks, "x")
    assert SENTINEL_PASSWORD not in repr(locks)
    assert PASSWORD not in repr(locks)
    by_option = f"redis+sentinel://{ours.hosts}/mymaster?password={quoted}&sentinel_password={SENTINEL_PASSWORD}"
    await take(clients.connect(by_option), "x")
    for wrong in (
        url.replace(SENTINEL_PASSWORD, "wr0ng-word"),
        url.replace(quoted, "wr0ng-word"),
        f"redis+sentinel://{ours.hosts}/mymaster?sentinel_password={SENTINEL_PASSWORD}",
    ):
        with pytest.raises(EngineUnavailable) as caught:
            await clients.connect(wrong).inspect("x")
        said = "".join(traceback.format_exception(caught.value, limit=0))
        assert "wr0ng-word" not in said
        assert SENTINEL_PASSWORD not in said


async def test_unknown_service_and_missing_sentinels(fleet: Callable[..., Fleet], clients: Clients) -> None:
    """A service that the Sentinels do not know, and Sentinels that do not listen, are reported."""
    ours = fleet()
    with pytest.raises(EngineUnavailable, match="other"):
        await clients.connect(f"redis+sentinel://{ours.hosts}/other").inspect("x")
    with pytest.raises(EngineUnavailable, match="by Sentinel"):
        await clients.connect(f"redis+sentinel://127.0.0.1:{free_port()}/mymaster").inspect("x")


async def test_many_at_once(fleet: Callable[..., Fleet], clients: Clients) -> None:
    """Many callers that need the first connection at the same time all get one, in both runtimes."""
    ours = fleet()
    locks = clients.connect(f"redis+sentinel://{ours.hosts}/mymaster")
    await asyncio.gather(*(take(locks, f"x{i}") for i in range(20)))


def test_client_of_a_sentinel(fleet: Callable[..., Fleet]) -> None:
    """With a client from `master_for`, connections go to the current master."""
    ours = fleet()
    (at,) = ours.sentinels
    sentinel = redis.sentinel.Sentinel([(at.host, at.port)])  # type: ignore[no-untyped-call]
    client = sentinel.master_for("mymaster", db=2)  # type: ignore[no-untyped-call]
    with fencelock.connect(client) as locks, locks.lock("x") as lease:
        assert lease.token
        assert "mymaster" in repr(locks)
        assert tell(ours.master, "DBSIZE", db=2) == 3
    assert client.ping()
    client.close()
    for one in sentinel.sentinels:
        one.close()


async def test_asyncio_client_of_a_sentinel(fleet: Callable[..., Fleet]) -> None:
    """With an asyncio client from `master_for`, connections go to the current master."""
    ours = fleet()
    (at,) = ours.sentinels
    sentinel = redis.asyncio.sentinel.Sentinel([(at.host, at.port)])  # type: ignore[no-untyped-call]
    client = sentinel.master_for("mymaster", db=2)
    async with aio.connect(client) as locks, locks.lock("x") as lease:
        assert lease.token
        assert "mymaster" in repr(locks)
        assert tell(ours.master, "DBSIZE", db=2) == 3
    assert await client.ping()
    await client.aclose()
    for one in sentinel.sentinels:
        await one.aclose()
