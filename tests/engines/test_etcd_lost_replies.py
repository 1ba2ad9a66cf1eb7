"""Requests whose reply is lost after etcd has carried them out, and which are asked again: nothing is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fencelock.core.clock import NO_DEADLINE
from fencelock.core.records import FOREVER
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.grpc import EtcdConnection
from fencelock.engines.etcd.messages import TXN
from fencelock.errors import OutcomeUnknown
from fencelock.model import Claim, Grant, Waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import own_prefix
from tests.servers.etcd import Etcd


@contextmanager
def lost_reply(what: bytes) -> Iterator[None]:
    """Lose the reply to the first transaction that has these bytes in it."""
    call, lost = EtcdConnection.call, False

    async def lossy(self: EtcdConnection, method: str, body: bytes, timeout: float) -> bytes:
        nonlocal lost
        answer = await call(self, method, body, timeout)
        if method == TXN and what in body and not lost:
            lost = True
            raise OutcomeUnknown("the reply was lost")
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EtcdConnection, "call", lossy)
        yield
    assert lost


@pytest.fixture
def engine(etcd1: Etcd, clients: Clients) -> EtcdEngine:
    """A client's engine, with a prefix of its own."""
    engine = clients.on(own_prefix(etcd1.url)).engine()
    assert isinstance(engine, EtcdEngine)
    return engine


async def test_force_release_does_not_drop_the_next_holder(engine: EtcdEngine) -> None:
    """A forced release whose reply was lost does not remove the next holder: its outcome is unknown."""
    holder = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(holder, Grant)
    waiter = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(waiter, Waiting)
    with lost_reply(b"/claims/x/"), pytest.raises(OutcomeUnknown, match="may have released 'x' by force"):
        await engine.force_release("x")
    assert await engine.release(holder) is False
    successor = await engine.wait(waiter, 5)
    assert isinstance(successor, Grant)
    assert await engine.release(successor) is True


@pytest.mark.parametrize("expect", [None, 0])
async def test_record_is_written_once(engine: EtcdEngine, expect: int | None) -> None:
    """A write whose reply was lost finds itself when it is repeated, and is no conflict with itself."""
    with lost_reply(b"=value"):
        written = await engine.records.write("r", b"value", token=1, ttl=30, expect=expect)
    assert written.done
    assert written.record is not None
    record = await engine.records.read("r")
    assert record is not None
    assert (record.value, record.version) == (b"value", written.record.version)


async def test_record_that_was_written_over_meanwhile(engine: EtcdEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose reply was lost, and which somebody else has written over since, is unknown rather than a conflict."""
    call = EtcdConnection.call
    state = "first"

    async def overtaken(self: EtcdConnection, method: str, body: bytes, timeout: float) -> bytes:
        nonlocal state
        answer = await call(self, method, body, timeout)
        if method == TXN and b"=value" in body and state == "first":
            state = "other"
            assert (await engine.records.write("r", b"other", token=2, ttl=30)).done
            raise OutcomeUnknown("the reply was lost")
        return answer

    monkeypatch.setattr(EtcdConnection, "call", overtaken)
    with pytest.raises(OutcomeUnknown, match="read it again"):
        await engine.records.write("r", b"value", token=1, ttl=30, expect=0)
    record = await engine.records.read("r")
    assert record is not None
    assert record.value == b"other"


async def test_release_is_unknown_rather_than_lost(engine: EtcdEngine) -> None:
    """A release whose reply was lost does not say that the lock was lost before."""
    grant = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    with lost_reply(b"/claims/x/"), pytest.raises(OutcomeUnknown):
        await engine.release(grant)
    successor = await engine.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(successor, Grant)
    assert await engine.release(grant) is False
    assert await engine.release(successor) is True


async def test_replaced_record_leaves_no_lease(engine: EtcdEngine) -> None:
    """A record without expiry has one lease: the lease of the value before is revoked."""
    records = engine.records
    leases: list[int] = []
    for number in range(3):
        assert (await records.write("r", b"%d" % number, token=1, ttl=FOREVER)).done
        _, pair, _ = await records._read(records._keyspace.record("r"))
        assert pair is not None
        leases.append(pair.lease)
    left = [m.read_lease(await records._client.request(m.TIME_TO_LIVE, m.lease_request(lease)))[1] for lease in leases]
    assert left[:2] == [-1, -1]
    assert left[2] > FOREVER / 2
