"""Forks with connections to a real etcd: the child never speaks on one that it inherited, and has sessions of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import leases, own_prefix
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually

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


async def test_child_that_ends_says_nothing(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A child that does nothing sends nothing, and its end closes nothing of the parent's."""
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


async def test_child_has_its_own(own_etcd: Callable[..., Etcd], proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A child connects anew, has a session of its own, and ends no more than that; the parent goes on."""
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


async def test_fork_while_waiting(etcd1: Etcd, clients: Clients) -> None:
    """A parent that waits is served although a child came and went meanwhile."""
    factory = clients.on(own_prefix(etcd1.url))
    locks, worker = factory.connect(), await factory.worker()
    holder = await locks.lock("x", ttl=60).acquire()
    await worker.do(
        """
lease = await locks.lock('mine', ttl=60).acquire()
import threading
got = []
if asyncio.iscoroutinefunction(locks.raw.close):
    task = asyncio.ensure_future(locks.lock('x', ttl=60).acquire())
    while not (await locks.inspect('x')).waiters:  # its loop runs only while it does something
        await asyncio.sleep(0.01)
else:
    thread = threading.Thread(target=lambda: got.append(locks.raw.lock('x', ttl=60).acquire()))
    thread.start()
"""
    )
    await waiting(locks, "x")
    assert await worker.do(CHILD) == [True, True, True, False]
    assert await holder.release()
    token = await worker.do(
        """
if asyncio.iscoroutinefunction(locks.raw.close):
    got.append(await task)
else:
    thread.join(15)
result = got[0].token
got[0].check()
"""
    )
    assert token > holder.token
    await locks.force_release("x", reason="test")


async def test_killed_holder(etcd1: Etcd, clients: Clients) -> None:
    """A process that is killed is replaced when its session has run out, and leaves nothing."""
    factory = clients.on(own_prefix(etcd1.url))
    locks, worker = factory.connect(), await factory.worker()
    token = await worker.acquire("x", ttl=2)
    async with background(take(locks, "x", SOON)) as (task,):
        await waiting(locks, "x")
        await worker.kill()
        assert await task > token

    async def free() -> bool:
        return not (await locks.inspect("x")).holders

    await eventually(free, "nothing is left")
