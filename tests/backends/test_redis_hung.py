"""A server that hangs and goes on: what it was asked meanwhile is carried out then, and must be undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencelock import EngineUnavailable
from fencelock.core.clock import boottime
from tests.backends.conftest import Clients
from tests.contract.subject import SOON, background, free_again, take, waiting
from tests.engines.redis import Redis


async def test_nothing_is_left_of_what_a_hung_server_was_asked(
    own_redis: Callable[..., Redis], clients: Clients
) -> None:
    """A lock that was asked for in vain is free as soon as the server goes on, and not only after a ttl."""
    server = own_redis()
    locks = clients.connect(f"{server.url}?socket_timeout=0.5&socket_connect_timeout=0.5")
    await take(locks, "x")
    server.pause()
    with pytest.raises(EngineUnavailable):
        await locks.lock("x", ttl=60, timeout=0.5).acquire()
    server.resume()
    await free_again(locks, "x")


@pytest.mark.parametrize(("ttl", "connected"), [(30, True), (1, True), (30, False)])
async def test_timeout_while_the_server_hangs(
    own_redis: Callable[..., Redis], clients: Clients, ttl: float, connected: bool
) -> None:
    """Whoever has a second is told after little more than that, also if a new connection has to be made first."""
    server = own_redis()
    locks = clients.connect(f"{server.url}?socket_timeout=20&socket_connect_timeout=20")
    if connected:
        await take(locks, "x")
    server.pause()
    begun = boottime()
    with pytest.raises(EngineUnavailable):
        await locks.lock("x", ttl=ttl, timeout=1).acquire()
    assert boottime() - begun < 9
    server.resume()


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_timeout_of_a_waiter_whose_server_fails(
    own_redis: Callable[..., Redis], clients: Clients, how: str
) -> None:
    """A waiter whose time is over is told so, whether its server no longer answers or is no longer there."""
    server = own_redis()
    locks, other = clients.connect(server.url), clients.connect(server.url)
    lease = await other.lock("x").acquire()

    async def wait() -> float:
        with pytest.raises(EngineUnavailable):
            await locks.lock("x", timeout=6).acquire()
        return boottime()

    begun = boottime()
    async with background(wait()) as (waiter,):
        await waiting(other, "x")
        if how == "hangs":
            server.pause()
        else:
            server.kill()
        assert await waiter - begun < 6 + SOON
    if how == "hangs":
        server.resume()
        assert await lease.release()
    else:
        with pytest.raises(EngineUnavailable):
            await lease.release()
