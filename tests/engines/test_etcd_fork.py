"""Forks with connections to a real etcd: the child never speaks on one that it inherited, and has sessions of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.engines.conftest import Clients
from tests.engines.etcd_server import leases, own_prefix
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON

CHILD = """
import gc

async def child():
    one = await locks.lock('other', ttl=5).acquire()
    busy = await locks.lock('x').try_acquire()
    answer = [lease.lost.is_set(), busy is None, await one.release(), await lease.release()]
    await locks.close()
    return answer
result = forked(child)
gc.collect()
"""

CHILD_THAT_ENDS = """
def child():
    import gc
    gc.collect()
    return None

result = forked(child)
"""


async def test_child_that_ends_sends_nothing(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A child that does nothing sends nothing, and its end closes no connection of its parent."""
    way = proxy(etcd1)
    worker = await clients.on(own_prefix(way.url)).worker()
    token = await worker.acquire("x", ttl=60)
    await asyncio.sleep(0.5)  # what is held is watched by now
    before = way.stats()
    await worker.do(CHILD_THAT_ENDS)
    await asyncio.sleep(0.2)
    after = way.stats()
    assert (after.accepted, after.open) == (before.accepted, before.open)
    assert after.to_server.forwarded == before.to_server.forwarded
    assert await worker.do("lease.check(); await lease.renew(); result = lease.token") == token
    assert await worker.do("result = await lease.release()") is True


async def test_child_opens_its_own_session(
    own_etcd: Callable[..., Etcd], proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """A child opens its own connection and session, and ends only that one; the parent's lease continues."""
    server = own_etcd()
    way = proxy(server)
    worker = await clients.on(way.url).worker()
    token = await worker.acquire("x", ttl=30)
    (session,) = leases(server)
    before = way.stats()
    assert await worker.do(CHILD) == [True, True, True, False]
    assert way.stats().accepted > before.accepted
    assert leases(server) == [session]
    assert await worker.do("lease.check(); await lease.renew(); result = lease.token") == token
    other = clients.connect(server.url)
    assert await other.force_release("x", reason="test") == 1
    assert await worker.do(f"result = await lease.lost.wait(timeout={SOON})") is True
