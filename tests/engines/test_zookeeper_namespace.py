"""A namespace that is removed under running clients: they create it again, and tokens still rise."""

from __future__ import annotations

import asyncio

import pytest

from fencelock.core.clock import NO_DEADLINE
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.model import Claim, Grant, Waiting
from tests.contract.steps import take
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot, engine_of
from tests.servers.zookeeper import ZooKeeper


def two(server: ZooKeeper, clients: Clients) -> tuple[ZooKeeperEngine, ZooKeeperEngine]:
    """Return two engines on one namespace."""
    factory = clients.on(chroot(server))
    first, second = factory.engine(), factory.engine()
    assert isinstance(first, ZooKeeperEngine)
    assert isinstance(second, ZooKeeperEngine)
    return first, second


@pytest.mark.parametrize("what", ["root", "locks", "layout"])
async def test_clients_create_a_removed_namespace_again(zookeeper1: ZooKeeper, clients: Clients, what: str) -> None:
    """Clients continue without help, beside new ones, and agree on the tokens."""
    url = chroot(zookeeper1)
    old, other = clients.connect(url), clients.connect(url)
    tokens = [await take(old, "x"), await take(other, "x")]
    for first, second in ((old, other), (other, old)):
        with bare(zookeeper1) as kazoo:
            kazoo.delete(getattr(engine_of(old)._namespace.paths, what), recursive=True)
        tokens += [await take(locks, "x") for locks in (first, clients.connect(url), second, first)]
        async with second.lock("x") as lease:
            (holder,) = (await first.inspect("x")).holders
            tokens.append(holder.token)
            assert holder.token == lease.token
    assert tokens == sorted(set(tokens))


async def test_queued_claim_is_enqueued_again_in_the_new_namespace(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A queued claim whose node was removed is enqueued again: its token is above those granted meanwhile."""
    (engine, other), claim = two(zookeeper1, clients), Claim("x", 30)
    holder = await other.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(holder, Grant)
    busy = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(busy, Waiting)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._namespace.paths.root, recursive=True)
    meanwhile = await other.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(meanwhile, Grant)
    assert await other.release(meanwhile)
    grant = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert holder.token < meanwhile.token < grant.token


async def test_claim_of_a_layout_that_was_removed_keeps_its_token(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A claim that still has its node has one token, also if the layout was removed: later claims have higher ones."""
    (engine, other), claim = two(zookeeper1, clients), Claim("x", 30)
    first = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(first, Grant)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._namespace.paths.layout, recursive=True)
    meanwhile = await other.attempt(Claim("y", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(meanwhile, Grant)
    assert meanwhile.token > first.token
    first.engine_state.node = None  # as if the reply had been lost
    again = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(again, Grant)
    assert again.token == first.token


async def test_records_after_the_namespace_was_removed(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Records can be written again, with higher versions."""
    engine, _ = two(zookeeper1, clients)
    first = await engine.records.write("key", b"one", token=1, ttl=60)
    with bare(zookeeper1) as kazoo:
        kazoo.delete(engine._namespace.paths.root, recursive=True)
    assert await engine.records.read("key") is None
    second = await engine.records.write("key", b"two", token=1, ttl=60)
    assert first.done
    assert second.done
    assert second.record is not None
    assert first.record is not None
    assert second.record.version > first.record.version


async def test_clients_that_start_at_the_same_time_agree_on_the_base(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Clients that create a namespace at the same moment end up with one base."""
    url = chroot(zookeeper1)
    many = [clients.connect(url) for _ in range(6)]
    tokens = await asyncio.gather(*(take(locks, "x", 30) for locks in many))
    assert len(set(tokens)) == len(tokens)
    assert len({engine_of(locks)._namespace.base for locks in many}) == 1
    with bare(zookeeper1) as kazoo:
        assert len(kazoo.get_children(engine_of(many[0])._namespace.paths.layout)) == 1


async def test_base_that_is_deleted_by_hand(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """Without its base the layout gets a new one, above all tokens that the client knows of."""
    url = chroot(zookeeper1)
    old, other = clients.connect(url), clients.connect(url)
    tokens = [await take(old, "x"), await take(other, "x")]
    namespace = engine_of(old)._namespace
    with bare(zookeeper1) as kazoo:
        kazoo.delete(namespace.paths.base(namespace.base))
    tokens += [await take(locks, "x") for locks in (old, other, old)]
    assert tokens == sorted(set(tokens))
