"""The keys of claims on a real etcd: they are used again, so that its index does not grow, unless something may come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.leaving import Leaving
from fencelock.errors import OutcomeUnknown
from fencelock.model import Claim, Grant, Waiting
from tests.contract.subject import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import keys, own_prefix, revoke
from tests.servers.etcd import Etcd
from tests.servers.proxy import Proxy


@pytest.fixture
def url(etcd1: Etcd) -> str:
    """A prefix of the test's own on the shared server."""
    return own_prefix(etcd1.url)


def claims(server: Etcd, url: str) -> list[str]:
    """Return the keys of all claims on a name, of the prefix that a URL names."""
    return keys(server, "/" + url.rpartition("/")[2] + "/fencelock/claims/x/")


async def test_one_after_another(etcd1: Etcd, url: str, clients: Clients) -> None:
    """However often a client has a lock, waiting for it or not, it uses no more keys than are there at once."""
    locks = clients.connect(url)
    seen: set[str] = set()
    for _ in range(10):
        lease = await locks.lock("x", ttl=30).acquire()
        assert await locks.lock("x", ttl=30).try_acquire() is None
        async with background(take(locks, "x")) as (task,):
            await waiting(locks, "x")
            seen.update(claims(etcd1, url))
            await lease.release()
            await task
    assert len(seen) == 2


async def test_two_at_once(etcd1: Etcd, url: str, clients: Clients) -> None:
    """Claims that are there at the same time have keys of their own, and giving one back leaves the others alone."""
    engine = clients.on(url).engine()
    first = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(first, Grant)
    others = [Claim("x", 30) for _ in range(3)]
    for claim in others:
        assert isinstance(await engine.attempt(claim, queue=True), Waiting)
    assert len(claims(etcd1, url)) == 4
    assert await engine.release(first) is True
    again = Claim("x", 30)
    assert isinstance(await engine.attempt(again, queue=True), Waiting)
    assert await engine.release(first) is False, "its key is another claim's by now"
    await engine.abandon(first.claim)
    assert len(claims(etcd1, url)) == 4
    for claim in (*others, again):
        await engine.abandon(claim)
    assert claims(etcd1, url) == []


async def test_release_that_may_come_late(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A deletion that was held up does not meet the next claim of the same client when it comes after all."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    engine._links._at = 0  # by the proxy
    grant = await engine.attempt(Claim("x", 9), queue=True)
    assert isinstance(grant, Grant)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.release(grant)
    assert await engine.release(grant) is True  # by the other way
    later = await engine.attempt(Claim("x", 9), queue=True)
    assert isinstance(later, Grant)
    assert later.handle.key == grant.handle.key, "it is the same key, and the deletion names the claim before"
    way.heal()
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert claims(etcd1, near) == [later.handle.key]
    assert await engine.release(later) is True


async def test_attempt_that_may_come_late(etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """The key of an attempt without an answer is not used again, though its claim was had and given back."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    warm = await engine.attempt(Claim("warm", 9), queue=True)
    assert isinstance(warm, Grant)
    engine._links._at = 0  # by the proxy
    claim = Claim("x", 9)
    for link in list(engine._links._all):
        engine._links._drop(link)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.attempt(claim, queue=True)
    grant = await engine.attempt(claim, queue=True)
    assert isinstance(grant, Grant)
    assert grant.attempt_in_flight
    assert await engine.release(grant) is True
    await engine.abandon(claim)
    later = await engine.attempt(Claim("x", 9), queue=True)
    assert isinstance(later, Grant)
    assert later.handle.key != grant.handle.key
    way.heal()
    assert await engine.release(later) is True
    assert await engine.release(warm) is True


async def test_key_that_another_claim_has_is_left_alone(etcd1: Etcd, url: str, clients: Clients) -> None:
    """A key that comes back, as with a restored backup, is neither taken nor deleted: a claim gets another and waits."""
    engine = clients.on(url).engine()
    grant = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(grant, Grant)
    assert await engine.release(grant) is True
    etcd1.put(grant.handle.key, "x somebody\n" + grant.claim.id)
    claim = Claim("x", 30)
    later = await engine.attempt(claim, queue=True)
    assert isinstance(later, Waiting)
    assert set(claims(etcd1, url)) == {grant.handle.key, later.handle.key}
    await engine.abandon(claim)
    assert claims(etcd1, url) == [grant.handle.key]
    assert await engine.release(grant) is False, "it was created later than the claim that was released"
    assert claims(etcd1, url) == [grant.handle.key]


async def test_after_the_session(etcd1: Etcd, url: str, clients: Clients) -> None:
    """After its session was ended by an operator, a client goes on with another, and nothing is left of the first."""
    engine = clients.on(url).engine()
    grant = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(grant, Grant)
    revoke(etcd1, str(grant.handle.session.handle))
    later = await engine.attempt(Claim("x", 30), queue=True)
    assert isinstance(later, Grant)
    assert later.token > grant.token
    assert await engine.release(grant) is False
    assert claims(etcd1, url) == [later.handle.key]
    assert await engine.release(later) is True


async def test_key_that_is_used_again_at_once(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that another thread uses again as soon as it is free stays that one's, whatever the first has left to do."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    delete = Leaving.delete
    other, third = Claim("x", 30), Claim("x", 30)
    between: list[Grant | Waiting] = []

    async def deleted(self: Leaving, *args: object) -> tuple[bool, int]:
        found = await delete(self, *args)  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(Leaving, "delete", delete)
            between.append(await engine.attempt(other, queue=True))
        return found

    permit = Claim("x", 30, shared=True, limit=1)
    holder = await engine.attempt(permit, queue=True)
    assert isinstance(holder, Grant)
    with monkeypatch.context() as patched:
        patched.setattr(Leaving, "delete", deleted)
        assert isinstance(await engine.attempt(Claim("x", 30, shared=True, limit=1), queue=False), Waiting)
    (outcome,) = between
    assert isinstance(outcome, Waiting)
    found = engine._keys.of(other.id)
    assert found is not None
    assert found.key == outcome.handle.key
    assert isinstance(await engine.attempt(third, queue=True), Waiting)
    assert await engine.release(holder) is True
    grant = await engine.wait(outcome, 5)
    assert isinstance(grant, Grant)
    assert len(claims(etcd1, url)) == 2
    assert await engine.release(grant) is True
    await engine.abandon(third)
    assert claims(etcd1, url) == []


async def test_abandon_that_is_interrupted(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim whose removal was interrupted, as by a second Ctrl-C, goes with whatever its client does next."""
    engine = clients.on(url).engine()
    claim = Claim("x", 30)
    assert isinstance(await engine.attempt(claim, queue=True), Grant)

    async def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Leaving, "delete", interrupted)
        try:
            await engine.abandon(claim)
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("it was not interrupted")
    assert len(claims(etcd1, url)) == 1
    other = await engine.attempt(Claim("y", 30), queue=True)
    assert isinstance(other, Grant)
    assert claims(etcd1, url) == []
    assert await engine.release(other) is True
