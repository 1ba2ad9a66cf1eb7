"""What a waiter may conclude from the end of the one ahead, and what not; who reads when whoever should is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import pytest

import fencelock
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.place import Place
from fencelock.engines.zookeeper.places import Places
from fencelock.model import Claim, Grant, Waiting
from fencelock.runtime.blocking import run_sync
from tests.contract.runtimes import core_of
from tests.contract.subject import SOON, background, waiting
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot
from tests.servers.proxy import Proxy
from tests.servers.zookeeper import ZooKeeper


async def test_called_for_a_place_that_it_has_lost(
    zookeeper1: ZooKeeper, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """Who hears that it is next, and then that its node is gone, does not hold the name from the end of the line."""
    way = proxy(zookeeper1)
    path = chroot(zookeeper1).rpartition("/")[2]
    subject = clients.on(f"{way.url}/{path}")
    engine = subject.engine()
    other = clients.on(f"{zookeeper1.url}/{path}").engine()
    assert isinstance(engine, ZooKeeperEngine)

    async def wait(busy: Waiting, timeout: float) -> Grant | Waiting:
        work = engine.wait(busy, timeout)
        return await (work if clients.runtime_name == "aio" else subject.call(run_sync, work))

    first = await other.attempt(Claim("x", 30), queue=True)
    assert isinstance(first, Grant)
    waiter = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(waiter, Waiting)
    behind = await other.attempt(Claim("x", 30), queue=True)
    assert isinstance(behind, Waiting)
    await engine.inspect("x")  # by now it watches the first
    way.cut("to_client")
    assert await other.force_release("x") == 1
    assert await other.force_release("x") == 1
    async with background(wait(waiter, 0.3)) as (task,):
        await asyncio.sleep(0.6)  # it looks now, and hears of everything at once
        way.heal()
        again = await task
    assert isinstance(again, Waiting), "it has lined up anew"
    assert isinstance(await wait(again, 0.5), Waiting), "another holds it"
    assert len((await other.inspect("x")).holders) == 1


@pytest.mark.parametrize("busy", [False, True])
def test_reader_that_never_left(zookeeper1: ZooKeeper, busy: bool) -> None:
    """A thread that was interrupted in the moment in which it had to leave the reading to others is not waited for."""
    with fencelock.connect(chroot(zookeeper1)) as locks:
        with locks.lock("x", ttl=20):
            pass
        (session,) = locks._client.engine._sessions._open.values()  # type: ignore[attr-defined]
        turns = session.handle._driver.turns
        assert turns.enter(gone := object()) is True  # and a Ctrl-C just before it comes to leave
        if busy:
            turns._asleep = True  # or while it slept
        with ThreadPoolExecutor(1) as others:
            for _ in range(5):
                assert others.submit(lambda: locks.lock("x", ttl=20).acquire(timeout=15).release()).result(30)
        assert turns._reader is not gone
        assert gone not in turns._waiting


async def test_node_that_somebody_writes_to(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Who holds a name and has its node written to by hand is told that it is lost, as whoever is next is let in."""
    url = chroot(zookeeper1)
    locks, others = clients.connect(url), clients.connect(url)
    lease = await locks.lock("x", ttl=15).acquire()
    async with background(others.lock("x", ttl=15).acquire()) as (task,):
        await waiting(others, "x")
        with bare(zookeeper1) as kazoo:
            kazoo.set(core_of(lease)._grant.handle.path, b"")
        after = await task
    assert await lease.lost.wait(SOON)
    assert after.token > lease.token
    assert await after.release() is True


def test_closed_under_a_waiter_that_looks(zookeeper1: ZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is woken by close(), finds its claim still there, and waits on, is told when it is gone."""
    url = chroot(zookeeper1)
    listen, remove = Place.listen, Places.remove
    listens = Semaphore(0)

    async def listening(self: Place, timeout: float) -> None:
        listens.release()
        await listen(self, timeout)

    async def removing(self: Places, place: Place, patience: float) -> bool:
        assert listens.acquire(timeout=SOON)
        time.sleep(0.1)  # noqa: ASYNC251  # it has looked, and waits again
        return await remove(self, place, patience)

    with fencelock.connect(url) as others, others.lock("x", ttl=60):
        locks = fencelock.connect(url)
        with ThreadPoolExecutor(1) as threads:
            waiter = threads.submit(locks.lock("x", ttl=60).acquire)
            while not others.inspect("x").waiters:
                time.sleep(0.01)
            with monkeypatch.context() as patched:
                patched.setattr(Place, "listen", listening)
                patched.setattr(Places, "remove", removing)
                locks.close()
                assert isinstance(waiter.exception(SOON), fencelock.FencelockError)
