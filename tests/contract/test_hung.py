"""An engine that does not reply for a while: callers get their error in time, and their claims are removed afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from fencelock import EngineUnavailable, LockTimeout, LossReason
from fencelock.core.clock import boottime
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, take, wait_until_free, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.servers.cluster import Cluster
from tests.servers.plugin import Session
from tests.servers.proxy import Proxies
from tests.servers.redis import RedisNodes
from tests.support.waiting import SOON

pytestmark = pytest.mark.server

REPLY = 0.5
"""Seconds after its timeout within which a caller gets its error on an open connection."""
FIRST_CONNECT = 3.0
"""The same for a client that has yet to connect."""
SLACK = 1.0
"""Seconds that a loaded machine may add."""


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
        yield Network(proxies, MakeClient(url, runtime_name, ttl_scale).connect())


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """Return how long a call takes that cannot succeed."""
    began = boottime()
    with pytest.raises((EngineUnavailable, LockTimeout)):
        await work()
    return boottime() - began


@pytest.mark.parametrize("timeout", [0.0, 0.2])
async def test_hung_engine_does_not_delay_a_caller_with_little_time(
    network: Network, factory: MakeClient, timeout: float
) -> None:
    """The caller gets its error within half a second of its timeout, and the client removes its claim later."""
    locks = network.locks
    await take(locks, "x")
    network.stop()
    took = await seconds(lambda: locks.lock("x", ttl=30).acquire(timeout=timeout))
    network.heal()
    assert took < timeout + REPLY + SLACK
    await wait_until_free(factory.connect(), "x")
    await locks.close()


@pytest.mark.parametrize("ttl", [30, 2.5])
async def test_timeout_does_not_wait_for_the_clean_up_on_a_hung_engine(
    network: Network, factory: MakeClient, ttl: float
) -> None:
    """A waiter's error does not wait for the clean-up, which runs in the background.

    With the shorter ttl the waiter has repeated its attempt before the engine hangs.
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
        assert took < 1 + REPLY + SLACK
    await wait_until_unclaimed(others, "x")
    await locks.close()


async def test_first_connect_to_a_hung_engine_ends_with_the_timeout(
    network: Network, factory: MakeClient, case: EngineCase
) -> None:
    """A caller with a timeout gets its error soon after it; one without is served when the engine replies again.

    On Redlock the latter gets an error, too: it does not wait for a majority.
    """
    locks = network.locks
    network.stop()
    async with background(locks.lock("patient").acquire()) as (patient,):
        took = await seconds(lambda: locks.lock("x", ttl=30).acquire(timeout=0.5))
        network.heal()
        if case.id == "redlock":
            with pytest.raises(EngineUnavailable, match="0 of 5"):
                await patient
        else:
            await (await asyncio.wait_for(patient, 2 * SOON)).release()
    assert took < 0.5 + FIRST_CONNECT + SLACK
    await wait_until_free(factory.connect(), "x")
    await locks.close()


async def test_lease_expires_while_the_engine_hangs(network: Network, factory: MakeClient) -> None:
    """A holder sees the loss by its own clock while the engine hangs, and the next holder has a higher token."""
    lease = await network.locks.lock("x", ttl=0.75).acquire()
    network.stop()
    assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.EXPIRED
    network.heal()
    assert await take(factory.connect(), "x") > lease.token
    await network.locks.close()


async def test_lease_survives_an_engine_that_hangs_for_less_than_its_ttl(network: Network) -> None:
    """A renewal that the engine could not answer at first succeeds afterwards."""
    lease = await network.locks.lock("x", ttl=3).acquire()
    network.stop()
    await asyncio.sleep(1.2)
    network.heal()
    await renewed(lease)
    assert await lease.release() is True
    await network.locks.close()
