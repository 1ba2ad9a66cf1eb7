"""A network that stops: callers get their answer in time, and nothing of what they asked for is left when it goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from fencelock import EngineUnavailable, LockTimeout
from fencelock.core.clock import boottime
from tests.contract.engines import EngineCase
from tests.contract.factory import ClientFactory
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, take, wait_until_free, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.servers.cluster import Cluster
from tests.servers.plugin import Session
from tests.servers.proxy import Proxies
from tests.servers.redis import RedisNodes

pytestmark = pytest.mark.server

ANSWER = 0.5
"""Seconds after its timeout within which a caller gets its answer."""
SLACK = 1.0
"""What a busy machine may add."""


class Network:
    """The proxies between a client and its engine."""

    def __init__(self, proxies: Proxies, locks: LocksView) -> None:
        self._proxies = proxies
        self.locks = locks

    def stop(self) -> None:
        """Deliver nothing in either direction."""
        for proxy in self._proxies.members:
            proxy.cut()

    def heal(self) -> None:
        """Deliver what is on its way, and everything else."""
        self._proxies.heal()


@pytest.fixture
def network(case: EngineCase, engines: Session, url: str, runtime_name: str, ttl_scale: TtlScale) -> Iterator[Network]:
    """A client whose network can be stopped."""
    assert case.server is not None
    server = engines.get(case.server)
    members = list(server.members) if isinstance(server, Cluster | RedisNodes) else [server]
    with Proxies(members) as proxies:
        for member, proxy in zip(members, proxies.members, strict=True):
            url = url.replace(member.address, proxy.address)
        yield Network(proxies, ClientFactory(url, runtime_name, ttl_scale).connect())


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """Return how long a call takes that cannot succeed."""
    began = boottime()
    with pytest.raises((EngineUnavailable, LockTimeout)):
        await work()
    return boottime() - began


@pytest.mark.parametrize("timeout", [0.0, 0.2])
async def test_hung_engine_does_not_delay_a_caller_with_little_time(
    network: Network, factory: ClientFactory, timeout: float
) -> None:
    """On a warm connection the caller is told within half a second of its timeout, and its claim is cleaned up later."""
    locks = network.locks
    await take(locks, "x")
    network.stop()
    took = await seconds(lambda: locks.lock("x", ttl=30).acquire(timeout=timeout))
    network.heal()
    assert took < timeout + ANSWER + SLACK
    await wait_until_free(factory.connect(), "x")
    await locks.close()


@pytest.mark.parametrize("ttl", [30, 2.5])
async def test_engine_that_hangs_as_the_timeout_ends(network: Network, factory: ClientFactory, ttl: float) -> None:
    """A waiter's answer does not wait for the clean-up, which goes on in the background.

    With the shorter ttl the waiter has shown a sign of life, and has asked again, before the engine hangs.
    """
    locks, others = network.locks, factory.connect()
    await take(locks, "y")
    async with others.lock("x"):
        began = boottime()
        async with background(seconds(lambda: locks.lock("x", ttl=ttl).acquire(timeout=1))) as (waiter,):
            await waiting(others, "x")
            network.stop()
            await waiter
            took = boottime() - began
        network.heal()
        assert took < 1 + ANSWER + SLACK
    await wait_until_unclaimed(others, "x")
    await locks.close()
