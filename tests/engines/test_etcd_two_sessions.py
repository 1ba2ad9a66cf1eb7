"""Two attempts of one client that make a session at the same time: both use one session, and no lock is granted twice."""

from __future__ import annotations

import asyncio

import pytest

from fencelock.core.clock import NO_DEADLINE, Deadline, boottime
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.keyspace import Numbering
from fencelock.engines.etcd.session import EtcdSession, Sessions
from fencelock.engines.etcd.token_base import TokenBase
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import keys, leases, own_prefix
from tests.servers.etcd import Etcd
from tests.support.waiting import eventually

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
    grant, get, read = Sessions._grant, Sessions.get, TokenBase.read

    async def slow_grant(self: Sessions, seconds: int, timeout: float) -> EtcdSession:
        first = not numbers
        session = await grant(self, seconds, timeout)
        numbers.append(session.handle)
        if first:
            await second_has_session.wait()
        return session

    async def noted_get(self: Sessions, ttl: float, timeout: float) -> EtcdSession:
        session = await get(self, ttl, timeout)
        (second_has_session if len(numbers) == 2 and not second_has_session.is_set() else first_has_session).set()
        return session

    async def late_read(self: TokenBase, timeout: float = 5.0) -> Numbering:
        await first_has_session.wait()
        return await read(self, timeout)

    monkeypatch.setattr(Sessions, "_grant", slow_grant)
    monkeypatch.setattr(Sessions, "get", noted_get)
    monkeypatch.setattr(TokenBase, "read", late_read)
    slow = asyncio.create_task(engine.attempt(Claim("other", 30), enqueue=True, deadline=NO_DEADLINE))
    await eventually(lambda: _true(numbers), "the first grant is under way")
    holder = await engine.attempt(Claim("x", 30), enqueue=False, deadline=Deadline(boottime, 0.5))
    assert isinstance(holder, Grant)
    other = await slow
    assert isinstance(other, Grant)

    assert isinstance(await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE), Waiting)
    waiting = Claim("x", 30)
    assert isinstance(await engine.attempt(waiting, enqueue=True, deadline=NO_DEADLINE), Waiting)
    assert holder.engine_state.key.decode() in keys(etcd1, "/" + url.rpartition("/")[2] + "/fencelock/claims/x/")
    assert await engine.renew([holder, other]) == [Renewal.RENEWED] * 2
    assert other.engine_state.session is holder.engine_state.session

    async def revoked() -> bool:
        return len({str(number) for number in numbers} & set(leases(etcd1))) == 1

    await eventually(revoked, "the session that nobody uses is revoked")
    await engine.abandon(waiting)
    assert await engine.release(holder) is True
    assert await engine.release(other) is True


async def _true(value: object) -> bool:
    return bool(value)
