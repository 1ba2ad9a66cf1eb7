"""ZooKeeper over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencelock import EngineUnavailable
from fencelock.model import new_id
from tests.contract.steps import background, renewed, take, waiting
from tests.engines.conftest import Clients
from tests.servers.zookeeper import ZooKeeper
from tests.servers.zookeeper_tls import ZooKeeperTls
from tests.support.waiting import SOON


@pytest.fixture(scope="module")
def tls(zookeeper1: ZooKeeper) -> Iterator[ZooKeeperTls]:
    """A ZooKeeper with TLS, for all tests of this file."""
    with ZooKeeperTls() as server:
        yield server


async def test_lock_over_tls(tls: ZooKeeperTls, clients: Clients) -> None:
    """Locks are held, waited for and handed over as without TLS; both see the same."""
    chroot = new_id()
    locks = clients.connect(f"{tls.tls_url}/{chroot}?ca={tls.certificate}", ttl=9)
    plain = clients.connect(f"{tls.url}/{chroot}")
    lease = await locks.lock("x").acquire()
    async with background(plain.lock("x").acquire()) as (task,):
        await waiting(locks, "x")
        await renewed(lease)
        assert await lease.release() is True
        successor = await asyncio.wait_for(task, SOON)
    assert successor.token > lease.token
    await successor.release()
    for number in range(20):
        await take(locks, f"{number}" * 500)
    assert [name async for name in locks.names()] == []


async def test_server_that_is_not_trusted(tls: ZooKeeperTls, clients: Clients, tmp_path: Path) -> None:
    """A server whose certificate nobody vouches for is refused, in words."""
    locks = clients.connect(f"{tls.tls_url}/{new_id()}")
    with pytest.raises(EngineUnavailable, match=r"(?i)certificate"):
        await asyncio.wait_for(locks.lock("x").acquire(), SOON)
