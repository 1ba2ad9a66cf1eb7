"""A server that hangs: a caller with a timeout gets its answer in time, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencelock import EngineUnavailable, LockTimeout
from fencelock.core.clock import boottime
from tests.contract.steps import background, take, wait_until_free, waiting
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import chroot
from tests.servers.zookeeper import ZooKeeper


@pytest.mark.parametrize("warm", [True, False])
async def test_timeout_while_the_server_hangs(
    own_zookeeper: Callable[..., ZooKeeper], clients: Clients, warm: bool
) -> None:
    """A caller with half a second gets its answer soon after that, not after a whole ttl; nothing is left behind."""
    server = own_zookeeper()
    locks = clients.connect(chroot(server))
    if warm:
        await take(locks, "x")
    server.pause()
    for ask in (locks.lock("x", timeout=0.5).acquire, locks.lock("x").try_acquire):
        begun = boottime()
        with pytest.raises(EngineUnavailable):
            await ask()
        assert boottime() - begun < 9
    server.resume()
    await wait_until_free(locks, "x")


async def test_timeout_of_a_waiter_whose_server_hangs(
    own_zookeeper: Callable[..., ZooKeeper], clients: Clients
) -> None:
    """A waiter whose server no longer replies gets its answer soon after its timeout."""
    server = own_zookeeper()
    url = chroot(server)
    locks, other = clients.connect(url), clients.connect(url)
    lease = await other.lock("x").acquire()

    async def wait() -> float:
        with pytest.raises((EngineUnavailable, LockTimeout)):
            await locks.lock("x", timeout=6).acquire()
        return boottime()

    begun = boottime()
    async with background(wait()) as (waiter,):
        await waiting(other, "x")
        server.pause()
        assert await waiter - begun < 16
    server.resume()
    await lease.release()
