"""The keys of claims on a real etcd: slots are used again, but never while an attempt may arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fencelock.core.clock import NO_DEADLINE
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.grpc import EtcdConnection
from fencelock.engines.etcd.release import Releaser
from fencelock.errors import ClientClosed, OutcomeUnknown
from fencelock.model import Claim, Grant, Mode, Waiting
from tests.contract.steps import background, take, waiting
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


async def test_slots_are_used_again(etcd1: Etcd, url: str, clients: Clients) -> None:
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


async def test_claims_at_the_same_time_have_keys_of_their_own(etcd1: Etcd, url: str, clients: Clients) -> None:
    """Claims that are there at the same time have keys of their own, and giving one back leaves the others alone."""
    engine = clients.on(url).engine()
    first = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(first, Grant)
    others = [Claim("x", 30) for _ in range(3)]
    for claim in others:
        assert isinstance(await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE), Waiting)
    assert len(claims(etcd1, url)) == 4
    assert await engine.release(first) is True
    again = Claim("x", 30)
    assert isinstance(await engine.attempt(again, enqueue=True, deadline=NO_DEADLINE), Waiting)
    assert await engine.release(first) is False, "its key is another claim's by now"
    await engine.abandon(first.claim)
    assert len(claims(etcd1, url)) == 4
    for claim in (*others, again):
        await engine.abandon(claim)
    assert claims(etcd1, url) == []


async def test_late_release_does_not_delete_the_next_claim_on_its_key(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """A deletion that was held up does not meet the next claim of the same client when it comes after all."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    engine._client._next = 0  # by the proxy
    grant = await engine.attempt(Claim("x", 9), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.release(grant)
    assert await engine.release(grant) is True  # by the other way
    later = await engine.attempt(Claim("x", 9), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(later, Grant)
    assert later.engine_state.key == grant.engine_state.key, (
        "it is the same key, and the deletion compares the revision"
    )
    way.heal()
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert claims(etcd1, near) == [later.engine_state.key.decode()]
    assert await engine.release(later) is True


async def test_slot_of_an_attempt_in_flight_is_not_used_again(
    etcd1: Etcd, proxy: Callable[..., Proxy], clients: Clients
) -> None:
    """The key of an attempt without an answer is not used again, though its claim was had and given back."""
    way = proxy(etcd1)
    near = own_prefix(etcd1.url_at(f"{way.address},{etcd1.address}"))
    engine = clients.on(near).engine()
    assert isinstance(engine, EtcdEngine)
    warm = await engine.attempt(Claim("warm", 9), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(warm, Grant)
    engine._client._next = 0  # by the proxy
    claim = Claim("x", 9)
    for link in list(engine._client._all):
        engine._client._drop(link)
    way.cut("to_server")
    with pytest.raises(OutcomeUnknown):
        await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    grant = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert grant.attempt_in_flight
    assert await engine.release(grant) is True
    await engine.abandon(claim)
    later = await engine.attempt(Claim("x", 9), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(later, Grant)
    assert later.engine_state.key != grant.engine_state.key
    way.heal()
    assert await engine.release(later) is True
    assert await engine.release(warm) is True


async def test_key_that_another_claim_has_is_left_alone(etcd1: Etcd, url: str, clients: Clients) -> None:
    """A key that comes back, as with a restored backup, is neither taken nor deleted: a claim gets another and waits."""
    engine = clients.on(url).engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert await engine.release(grant) is True
    old = grant.engine_state.key.decode()
    etcd1.put(old, '{"mode":"exclusive","owner":"somebody"}')
    claim = Claim("x", 30)
    later = await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(later, Waiting)
    assert set(claims(etcd1, url)) == {old, later.engine_state.key.decode()}
    await engine.abandon(claim)
    assert claims(etcd1, url) == [old]
    assert await engine.release(grant) is False, "it was created later than the claim that was released"
    assert claims(etcd1, url) == [old]


async def test_revoked_session_is_replaced(etcd1: Etcd, url: str, clients: Clients) -> None:
    """After its session was ended by an operator, a client goes on with another, and nothing is left of the first."""
    engine = clients.on(url).engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    revoke(etcd1, str(grant.engine_state.session.handle))
    later = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(later, Grant)
    assert later.token > grant.token
    assert await engine.release(grant) is False
    assert claims(etcd1, url) == [later.engine_state.key.decode()]
    assert await engine.release(later) is True


async def test_slot_that_is_used_again_at_once(
    etcd1: Etcd, url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that another thread uses as soon as it is free belongs to that thread's claim, whatever the first does next."""
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    abandon = Releaser.abandon
    other, third = Claim("x", 30), Claim("x", 30)
    between: list[Grant | Waiting] = []

    async def abandoned(self: Releaser, claim: Claim) -> None:
        await abandon(self, claim)
        with monkeypatch.context() as patched:
            patched.setattr(Releaser, "abandon", abandon)
            between.append(await engine.attempt(other, enqueue=True, deadline=NO_DEADLINE))

    permit = Claim("x", 30, mode=Mode.PERMIT, limit=1)
    holder = await engine.attempt(permit, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(holder, Grant)
    with monkeypatch.context() as patched:
        patched.setattr(Releaser, "abandon", abandoned)
        refused = await engine.attempt(permit.with_new_id(), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(refused, Waiting)
    (outcome,) = between
    assert isinstance(outcome, Waiting)
    found = engine._claims.get(other.id)
    assert found is not None
    assert found is outcome.engine_state
    assert isinstance(await engine.attempt(third, enqueue=True, deadline=NO_DEADLINE), Waiting)
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
    assert isinstance(await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE), Grant)

    async def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Releaser, "_transact", interrupted)
        try:
            await engine.abandon(claim)
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("it was not interrupted")
    assert len(claims(etcd1, url)) == 1
    other = await engine.attempt(Claim("y", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(other, Grant)
    assert claims(etcd1, url) == []
    assert await engine.release(other) is True


async def test_close_before_an_attempt_is_sent(url: str, clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt whose connection close() closes before anything is sent raises ClientClosed, not EngineUnavailable."""
    engine = clients.on(url).engine()
    assert isinstance(await engine.attempt(Claim("warm", 30), enqueue=True, deadline=NO_DEADLINE), Grant)
    call = EtcdConnection.call

    async def closed(self: EtcdConnection, method: str, body: bytes, timeout: float) -> bytes:
        await engine.close()
        return await call(self, method, body, timeout)

    monkeypatch.setattr(EtcdConnection, "call", closed)
    with pytest.raises(ClientClosed):
        await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
