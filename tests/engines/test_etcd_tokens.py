"""Tokens and times on a real etcd: the token base follows the clock, and `held_for` counts from the grant."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencelock.core.clock import NO_DEADLINE, wall_us
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.token_base import MAX_LAG
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.etcd_server import own_prefix, pairs
from tests.servers.etcd import Etcd
from tests.support.waiting import SOON, eventually

DAY = 86_400_000_000


class Base:
    """The token base of a namespace, as an operator sees it."""

    def __init__(self, server: Etcd, url: str) -> None:
        self.server = server
        self.url = url
        self._key = "/" + url.rpartition("/")[2] + "/fencelock/about"

    def write(self, base: int, origin: int = 0) -> None:
        self.server.put(self._key, f"2 {base} {origin}")

    def read(self) -> tuple[int, int]:
        layout, base, origin = (self.server.get(self._key) or "").split()
        assert layout == "2"
        return int(base), int(origin)

    def raise_by(self, microseconds: int) -> None:
        base, origin = self.read()
        self.write(base + microseconds, origin)

    def writes(self) -> int:
        (pair,) = pairs(self.server, self._key)
        return int(pair["version"])


@pytest.fixture
def base(etcd1: Etcd) -> Base:
    """A namespace of the test's own."""
    return Base(etcd1, own_prefix(etcd1.url))


def engine_of(clients: Clients, url: str) -> EtcdEngine:
    engine = clients.on(url).engine()
    assert isinstance(engine, EtcdEngine)
    return engine


async def attempt(engine: EtcdEngine, claim: Claim) -> Any:
    return await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)


async def test_base_far_behind_is_raised_to_the_clock(
    base: Base, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A namespace whose tokens are days behind the clock gives tokens of today, with a warning."""
    base.write(wall_us() - 3 * DAY, 77)
    before = wall_us()
    with caplog.at_level(logging.WARNING, "fencelock"):
        token = await take(clients.connect(base.url), "x")
    assert before <= token <= wall_us() + MAX_LAG
    assert any("raised the token base" in record.getMessage() for record in caplog.records)
    assert base.read()[1] == 77, "the origin of record versions stays"


async def test_base_a_little_behind_is_left_alone(
    base: Base, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a minute of the clock, nobody writes the base; a raise of minutes is not worth a warning."""
    base.write(wall_us() - MAX_LAG // 2)
    locks = clients.connect(base.url)
    with caplog.at_level(logging.WARNING, "fencelock"):
        await take(locks, "x")
        assert base.writes() == 1
        base.write(wall_us() - 5 * MAX_LAG)
        await take(locks, "x")
    assert base.writes() == 3
    assert not caplog.records


async def test_base_ahead_of_the_clock_is_not_lowered(base: Base, clients: Clients) -> None:
    """After a client with a wrong clock, tokens go on from there: nothing lowers the base."""
    base.write(wall_us() + 7 * DAY)
    assert await take(clients.connect(base.url), "x") > wall_us() + 6 * DAY
    assert base.writes() == 1


async def test_tokens_rise_across_a_raise(base: Base, clients: Clients) -> None:
    """A client that has cached the base notices a raise by another one, and its next token lies above."""
    locks, other = clients.connect(base.url), clients.connect(base.url)
    first = await take(locks, "x")
    base.raise_by(DAY)
    second = await take(locks, "x")
    assert second > first + DAY
    assert second < await take(other, "x") < await take(locks, "x")


async def test_two_raises_between_a_create_and_a_re_read(base: Base, clients: Clients) -> None:
    """A waiting claim keeps the base of its creation, for its holder and for `inspect`; later claims lie above."""
    engine = engine_of(clients, base.url)
    holder = await attempt(engine, Claim("x", 30))
    claim = Claim("x", 30)
    queued = await attempt(engine, claim)
    assert isinstance(queued, Waiting)
    base.raise_by(DAY)
    later = await attempt(engine, Claim("x", 30))
    base.raise_by(DAY)
    assert isinstance(await attempt(engine, claim), Waiting)
    assert await engine.release(holder) is True
    grant = await engine.wait(queued, SOON)
    assert isinstance(grant, Grant)
    assert holder.token < grant.token < holder.token + DAY
    (shown,) = (await engine.inspect("x")).holders
    assert shown.token == grant.token
    assert await engine.release(grant) is True
    last = await engine.wait(later, SOON)
    assert isinstance(last, Grant)
    assert grant.token + DAY < last.token < grant.token + DAY + MAX_LAG
    assert await engine.release(last) is True


async def test_clients_that_raise_at_the_same_time(base: Base, clients: Clients) -> None:
    """Of ten clients that find the base behind, one raises it, and all tokens differ."""
    base.write(wall_us() - 10 * MAX_LAG)
    locks = [clients.connect(base.url) for _ in range(10)]
    tokens = await asyncio.gather(*(take(client, "x", SOON) for client in locks))
    assert len(set(tokens)) == 10
    assert base.writes() == 2


async def test_raise_is_not_a_loss(base: Base, clients: Clients) -> None:
    """A lock that is held while the base is raised stays held, with its token."""
    engine = engine_of(clients, base.url)
    gone: list[str] = []
    engine.on_gone = gone.append
    grant = await attempt(engine, Claim("x", 30))
    base.raise_by(DAY)
    assert await take(clients.connect(base.url), "y") > grant.token + DAY // 2
    assert await engine.renew([grant]) == [Renewal.RENEWED]
    assert [holder.token for holder in (await engine.inspect("x")).holders] == [grant.token]
    assert await engine.release(grant) is True
    assert gone == []


async def test_record_versions_do_not_follow_the_base(base: Base, clients: Clients) -> None:
    """A record that was read before a raise can be written with the version that was read."""
    records = engine_of(clients, base.url).records
    written = (await records.write("r", b"1", token=1, ttl=30)).record
    assert written is not None
    base.raise_by(DAY)
    read = await records.read("r")
    assert read is not None
    assert read.version == written.version
    again = await records.write("r", b"2", token=1, ttl=30, expect=written.version)
    assert again.done
    assert again.record is not None
    assert again.record.version > written.version


async def test_held_for_counts_from_the_grant_after_the_first_renewal(
    own_etcd: Callable[..., Etcd], clients: Clients
) -> None:
    """A lock that was handed over counts from when its holder queued, and after its renewal from the grant."""
    url = own_etcd().url
    locks, other = clients.connect(url), clients.connect(url)

    async def held_for() -> float:
        (holder,) = (await other.inspect("x")).holders
        assert holder.held_for is not None
        return holder.held_for

    first = await other.lock("x", ttl=60).acquire()
    assert 0 <= await held_for() < SOON
    async with background(locks.lock("x", ttl=60).acquire(SOON)) as (task,):
        await waiting(other, "x")
        await asyncio.sleep(1)
        granted = time.monotonic()
        await first.release()
        lease = await task
        assert await held_for() >= 1
        await lease.renew()
        assert await held_for() <= time.monotonic() - granted + 0.1
        (before,) = (await other.inspect("x")).holders

        async def longer() -> bool:
            return await held_for() > (before.held_for or 0.0)

        await eventually(longer, "it is held for longer")
        assert before.token == lease.token
        await lease.release()
