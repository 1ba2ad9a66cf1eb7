"""A server that hangs and continues: it runs the requests of that time late, and they must be undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis

from fencelock import ClientClosed, EngineUnavailable, LeaseLost
from fencelock.core.clock import boottime
from fencelock.engines.redis.engine import RedisEngine
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, is_free, renewed, take, wait_until_free, waiting
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.redis_server import tell
from tests.servers.proxy import Proxies
from tests.servers.redis import Redis
from tests.support.waiting import SOON, eventually


@pytest.mark.parametrize("then", ["used", "closed"])
@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_release_in_an_outage(own_redis: Callable[..., Redis], clients: Clients, how: str, then: str) -> None:
    """The client repeats a failed release as soon as it reaches the server again, or is closed."""
    server = own_redis()
    with Proxies((server,)) as between:
        (proxy,) = between.members
        locks = clients.connect(f"redis://{proxy.address}/0")
        lease = await locks.lock("x", ttl=60).acquire()
        if how == "refused":
            proxy.refuse()
        else:
            proxy.drop("to_server")
        proxy.disconnect()
        with pytest.raises(EngineUnavailable, match="'x' could not be released"):
            await lease.release()
        assert not await is_free(clients.connect(server.url), "x")
        proxy.disconnect()
        proxy.heal()
        if then == "closed":
            await locks.close()
            assert await is_free(clients.connect(server.url), "x")
        await wait_until_free(clients.connect(server.url), "x")


async def test_release_that_is_refused(own_redis: Callable[..., Redis], clients: Clients) -> None:
    """The client repeats a release that a server refuses because it is busy with a script."""
    server = own_redis(settings={"lua-time-limit": "50"})
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=60).acquire()

    def keep_busy() -> None:
        with pytest.raises(redis.ResponseError, match="killed"):
            tell(server, "EVAL", "while true do end", 0)

    async def is_busy() -> bool:
        try:
            return not tell(server, "PING")
        except redis.ResponseError as error:
            return "BUSY" in str(error)

    script = asyncio.create_task(asyncio.to_thread(keep_busy))
    await eventually(is_busy, "the server is busy")
    with pytest.raises(EngineUnavailable, match="BUSY"):
        await lease.release()
    with pytest.raises(EngineUnavailable, match="BUSY"):
        await take(locks, "y")
    tell(server, "SCRIPT", "KILL")
    await script
    await take(locks, "y")
    await wait_until_free(clients.connect(server.url), "x")


@pytest.mark.parametrize(("ttl", "silence"), [(4.5, 2.2), (9, 4.5)])
async def test_renewal_that_has_to_connect(
    own_redis: Callable[..., Redis], clients: Clients, ttl: float, silence: float
) -> None:
    """A new connection that gets no reply is given up early enough to renew the lease over another one."""
    async with forwarding(own_redis()) as path:
        locks = clients.connect(path.url)
        lease = await locks.lock("x", ttl=ttl).acquire()
        path.swallows = True
        path.hang_up()
        await asyncio.sleep(silence)
        path.swallows = False
        await renewed(lease)
        assert await lease.release()
        await locks.close()


async def with_failed_release(server: Redis, clients: Clients) -> LocksView:
    """Return a client that could not release "x", as the server is stopped from then on."""
    locks = clients.connect(server.url)
    lease = await locks.lock("x", ttl=3).acquire()
    server.pause()
    with pytest.raises(EngineUnavailable, match="'x' could not be released"):
        await lease.release()
    return locks


class Interrupted(BaseException):
    """Stands for a KeyboardInterrupt."""


async def test_close_again(own_redis: Callable[..., Redis], clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that is interrupted before it closes the engine can be called again, and closes the client."""
    server = own_redis()
    locks = await with_failed_release(server, clients)
    server.resume()

    async def interrupted(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(RedisEngine, "close", interrupted)
        await locks.close()
    await locks.close()
    with pytest.raises(ClientClosed):
        await locks.lock("x").acquire()
    await wait_until_free(clients.connect(server.url), "x")


async def test_close_in_an_outage(own_redis: Callable[..., Redis], clients: Clients) -> None:
    """A leftover that cannot be abandoned, as the server hangs, delays close() only a little; the claim expires."""
    server = own_redis()
    locks = await with_failed_release(server, clients)
    begun = boottime()
    await locks.close()
    assert boottime() - begun < 4
    server.resume()
    await wait_until_free(clients.connect(server.url), "x")


async def test_loss_in_an_outage(own_redis: Callable[..., Redis], clients: Clients) -> None:
    """LeaseLost names the outage if the lease expired because of it, and not if the lease had expired before."""
    server = own_redis()
    locks = clients.connect(server.url)
    early = await locks.lock("early", ttl=1, renew=False).acquire()
    lease = await locks.lock("x", ttl=3).acquire()
    await eventually(early.lost.is_set, "the first lease has expired")
    server.kill()
    await eventually(lease.lost.is_set, "the second lease has expired")
    with pytest.raises(
        LeaseLost, match=rf"before it could be renewed \(cannot reach Redis at {server.address}: Error 111"
    ):
        lease.check()
    with pytest.raises(LeaseLost, match="before it could be renewed; others"):
        early.check()
    with pytest.raises(EngineUnavailable, match=rf"^'y': cannot reach Redis at {server.address}"):
        await locks.lock("y").acquire()


async def test_timeout_of_a_waiter_whose_server_dies(own_redis: Callable[..., Redis], clients: Clients) -> None:
    """A waiter gets EngineUnavailable when its server dies."""
    server = own_redis()
    locks, other = clients.connect(server.url), clients.connect(server.url)
    lease = await other.lock("x").acquire()

    async def wait() -> None:
        with pytest.raises(EngineUnavailable):
            await locks.lock("x", timeout=6).acquire()

    async with background(wait()) as (waiter,):
        await waiting(other, "x")
        server.kill()
        await asyncio.wait_for(waiter, 6 + SOON)
    with pytest.raises(EngineUnavailable):
        await lease.release()
