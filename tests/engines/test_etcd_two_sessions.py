"""Two attempts of one client that make a session at the same time: both use one session, and no lock is granted twice."""

from __future__ import annotations

import asyncio

import pytest

from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.layout import About
from fencelock.engines.etcd.namespace import Namespace
from fencelock.engines.etcd.sessions import Lease, Sessions
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.contract.subject import eventually
from tests.engines.conftest import Clients
from tests.engines.etcd_server import keys, leases, own_prefix
from tests.servers.etcd import Etcd

pytestmark = pytest.mark.runtime_name("aio")  # the blocking runtime runs the same coroutines in threads


async def test_slow_first_grant_does_not_lead_to_two_holders(
    etcd1: Etcd, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first lease grant is slow, a second attempt makes a session of its own: the lock it gets stays held.

    The second attempt is granted its lock on its session after the first attempt has stored the other session. A third
    claim for that name must wait, and the holder must keep its key.
    """
    url = own_prefix(etcd1.url)
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    second_has_session, first_has_session = asyncio.Event(), asyncio.Event()
    numbers: list[int] = []
    grant, make, read = Sessions._grant, Sessions.make, Namespace.read

    async def slow_grant(self: Sessions, seconds: int, within: float) -> Lease:
        first = not numbers
        session = await grant(self, seconds, within)
        numbers.append(session.handle)
        if first:
            await second_has_session.wait()
        return session

    async def noted_make(self: Sessions, ttl: float, within: float) -> Lease:
        session = await make(self, ttl, within)
        (second_has_session if len(numbers) == 2 and not second_has_session.is_set() else first_has_session).set()
        return session

    async def late_read(self: Namespace, seconds: float = 5.0) -> About:
        await first_has_session.wait()
        return await read(self, seconds)

    monkeypatch.setattr(Sessions, "_grant", slow_grant)
    monkeypatch.setattr(Sessions, "make", noted_make)
    monkeypatch.setattr(Namespace, "read", late_read)
    slow = asyncio.create_task(engine.attempt(Claim("other", 30), queue=True))
    await eventually(lambda: _true(numbers), "the first grant is under way")
    holder = await engine.attempt(Claim("x", 30), queue=False, patience=0.0)
    assert isinstance(holder, Grant)
    other = await slow
    assert isinstance(other, Grant)

    assert isinstance(await engine.attempt(Claim("x", 30), queue=False), Waiting)
    waiting = Claim("x", 30)
    assert isinstance(await engine.attempt(waiting, queue=True), Waiting)
    assert holder.handle.key in keys(etcd1, "/" + url.rpartition("/")[2] + "/fencelock/claims/x/")
    assert await engine.renew([holder, other]) == [Renewal.RENEWED] * 2
    assert other.handle.session is holder.handle.session

    async def revoked() -> bool:
        return len({str(number) for number in numbers} & set(leases(etcd1))) == 1

    await eventually(revoked, "the session that nobody uses is revoked")
    await engine.abandon(waiting)
    assert await engine.release(holder) is True
    assert await engine.release(other) is True


async def _true(value: object) -> bool:
    return bool(value)
