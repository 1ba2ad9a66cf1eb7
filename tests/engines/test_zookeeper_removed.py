"""A namespace that somebody removes under running clients: they begin anew, and tokens rise all the same."""

from __future__ import annotations

import pytest

from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.model import Claim, Grant, Waiting
from tests.contract.subject import take
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import backend_of, bare, chroot
from tests.servers.zookeeper import ZooKeeper


def two(server: ZooKeeper, clients: Clients) -> tuple[ZooKeeperEngine, ZooKeeperEngine]:
    """Return two engines on one namespace."""
    subject = clients.on(chroot(server))
    first, second = subject.engine(), subject.engine()
    assert isinstance(first, ZooKeeperEngine)
    assert isinstance(second, ZooKeeperEngine)
    return first, second


@pytest.mark.parametrize("what", ["root", "locks", "layout"])
async def test_namespace_that_is_removed(zookeeper1: ZooKeeper, clients: Clients, what: str) -> None:
    """Clients that were there before go on by themselves, beside new ones, and agree on the tokens."""
    url = chroot(zookeeper1)
    old, other = clients.connect(url), clients.connect(url)
    tokens = [await take(old, "x"), await take(other, "x")]
    for first, second in ((old, other), (other, old)):
        with bare(zookeeper1) as kazoo:
            kazoo.delete(getattr(backend_of(old)._paths, what), recursive=True)
        tokens += [await take(locks, "x") for locks in (first, clients.connect(url), second, first)]
        async with second.lock("x") as lease:
            (holder,) = (await first.inspect("x")).holders
            tokens.append(holder.token)
            assert holder.token == lease.token
    assert tokens == sorted(set(tokens))


async def test_claim_of_a_namespace_that_was_removed(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A claim whose place went with its namespace lines up in the new one: its token is above those given meanwhile."""
    (engine, other), claim = two(zookeeper1, clients), Claim("x", 30)
    holder = await other.attempt(Claim("x", 30), queue=False)
    assert isinstance(holder, Grant)
    busy = await engine.attempt(claim, queue=True)
    assert isinstance(busy, Waiting)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._paths.root, recursive=True)
    meanwhile = await other.attempt(Claim("x", 30), queue=False)
    assert isinstance(meanwhile, Grant)
    assert await other.release(meanwhile)
    grant = await engine.attempt(claim, queue=True)
    assert isinstance(grant, Grant)
    assert holder.token < meanwhile.token < grant.token


async def test_node_that_was_made_under_a_layout_that_is_gone(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """An attempt without an answer has left a node, and the layout changed: the node is not taken for a place in line."""
    (engine, other), claim = two(zookeeper1, clients), Claim("x", 30)
    first = await engine.attempt(claim, queue=True)
    assert isinstance(first, Grant)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._paths.layout)
    meanwhile = await other.attempt(Claim("y", 30), queue=False)
    assert isinstance(meanwhile, Grant)
    first.handle.node = None  # as if the answer had been lost
    again = await engine.attempt(claim, queue=True)
    assert isinstance(again, Grant)
    assert again.token > meanwhile.token


async def test_records_of_a_namespace_that_is_removed(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Records can be written again, too."""
    engine, _ = two(zookeeper1, clients)
    first = await engine.records.write("key", b"one", token=1, ttl=60)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._paths.root, recursive=True)
    assert await engine.records.read("key") is None
    second = await engine.records.write("key", b"two", token=1, ttl=60)
    assert first.done
    assert second.done
    assert second.record is not None
    assert first.record is not None
    assert second.record.version > first.record.version
