"""The table of killed backends: a session that is ended at each step of acquire, wait, hold and release, on both engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fencelock import EngineUnavailable, LockTimeout, LossReason
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, take, wait_until_unclaimed, waiting
from tests.engines.conftest import Clients
from tests.engines.postgres_server import advisory, connected, empty, kill_sessions, sessions
from tests.servers.postgres import Postgres
from tests.support.waiting import SOON, eventually

TURN = "SELECT pg_advisory_lock(hashtextextended('x', hashtextextended('fencelock', 7306372540837290870)))"
"""What makes every step on the name x wait, on rows."""
GREETING = "SELECT pg_advisory_lock(7306372540837290869)"
"""What makes every greeting wait."""
BLOCKED = "wait_event_type = 'Lock'"


@pytest.fixture
def pg(postgres: Postgres) -> Postgres:
    """The PostgreSQL that all tests share, empty."""
    return empty(postgres)


@pytest.fixture(params=["rows", "advisory"])
def url(request: pytest.FixtureRequest, pg: Postgres) -> str:
    """Either engine."""
    return pg.url if request.param == "rows" else advisory(pg)


@contextmanager
def held_up(pg: Postgres, *statements: str) -> Iterator[None]:
    """Have what we do wait in the middle of a step, until the end of the block."""
    with connected(pg) as connection:
        connection.execute("BEGIN")
        for statement in statements:
            connection.execute(statement.encode())
        yield


async def kill_blocked(pg: Postgres) -> None:
    """End whichever session of ours is in the middle of a step, as soon as there is one."""

    async def killed() -> bool:
        return kill_sessions(pg, BLOCKED) > 0

    await eventually(killed, "a session of ours waits in the middle of a step")


async def has_it(locks: LocksView, token: int) -> None:
    """Make sure that there is one holder, and no other claim."""
    seen = await locks.inspect("x")
    assert ([holder.token for holder in seen.holders], seen.waiters) == ([token], ())


async def test_session_killed_during_its_setup(pg: Postgres, url: str, clients: Clients) -> None:
    """The client opens another session and acquires the lock."""
    await take(clients.connect(url), "warm")
    locks = clients.connect(url, ttl=5)
    with held_up(pg, GREETING):
        task = asyncio.ensure_future(locks.lock("x").acquire(timeout=SOON))
        await kill_blocked(pg)
    lease = await asyncio.wait_for(task, SOON)
    await has_it(locks, lease.token)
    assert await lease.release() is True


async def test_session_killed_during_an_attempt(pg: Postgres, url: str, clients: Clients) -> None:
    """The attempt is repeated; there is one grant, and its token is higher than the last."""
    locks = clients.connect(url, ttl=5)
    first = await take(locks, "warm")
    step = TURN if url == pg.url else "LOCK TABLE fencelock.name IN EXCLUSIVE MODE"
    with held_up(pg, step):
        task = asyncio.ensure_future(locks.lock("x").acquire(timeout=SOON))
        await kill_blocked(pg)
    lease = await asyncio.wait_for(task, SOON)
    assert lease.token > first
    await has_it(locks, lease.token)
    assert await lease.release() is True


async def test_sessions_killed_while_waiting(pg: Postgres, url: str, clients: Clients) -> None:
    """The waiter and its listener reconnect each time, and the waiter gets the lock in the end."""
    other, locks = clients.connect(url, ttl=30), clients.connect(url, ttl=30)
    lease = await other.lock("x").acquire()
    mine = ",".join(map(str, sessions(pg)))
    async with background(locks.lock("x").acquire(timeout=2 * SOON)) as (task,):

        async def killed() -> bool:
            return kill_sessions(pg, f"pid NOT IN ({mine})") > 0

        for _ in range(3):
            await waiting(other, "x")
            await eventually(killed, "it is connected again")
        await waiting(other, "x")
        await lease.release()
        second = await asyncio.wait_for(task, SOON)
    assert second.token > lease.token
    await has_it(locks, second.token)
    await second.release()


async def test_session_killed_while_holding(pg: Postgres, url: str, clients: Clients) -> None:
    """A lease in rows survives its session; an advisory lock is lost, reported, and acquired by the next client."""
    locks, other = clients.connect(url), clients.connect(url)
    lease = await locks.lock("x", ttl=6).acquire()
    kill_sessions(pg)
    if url == pg.url:
        await renewed(lease)
        assert await lease.release() is True
    else:
        assert await lease.lost.wait(SOON)
        assert lease.reason is LossReason.GONE
        assert await lease.release() is False
    assert await take(other, "x") > lease.token


async def test_session_killed_during_a_renewal(pg: Postgres, clients: Clients) -> None:
    """The renewal is repeated over another session, and the lease continues."""
    locks = clients.connect(pg.url)
    lease = await locks.lock("x", ttl=6).acquire()
    with held_up(pg, "SELECT FROM fencelock.claim FOR UPDATE"):
        await kill_blocked(pg)
    await renewed(lease)
    assert await lease.release() is True


async def test_session_killed_during_a_release(pg: Postgres, url: str, clients: Clients) -> None:
    """The lock is free, and the next waiter gets it."""
    locks, other = clients.connect(url), clients.connect(url)
    lease = await locks.lock("x", ttl=30).acquire()
    mine = ",".join(map(str, sessions(pg)))
    async with background(other.lock("x").acquire(timeout=SOON)) as (task,):
        await waiting(other, "x")
        if url == pg.url:
            with held_up(pg, TURN):
                release = asyncio.ensure_future(lease.release())
                await kill_blocked(pg)
            assert await asyncio.wait_for(release, SOON) is True
        else:
            assert kill_sessions(pg, f"pid IN ({mine})") >= 1
            assert await lease.release() is False
        second = await asyncio.wait_for(task, SOON)
    assert second.token > lease.token
    await second.release()


async def test_session_killed_while_a_waiter_dequeues(pg: Postgres, url: str, clients: Clients) -> None:
    """No claim of the waiter is left."""
    locks, other = clients.connect(url, ttl=5), clients.connect(url, ttl=5)
    lease = await other.lock("x", ttl=30).acquire()
    mine = ",".join(map(str, sessions(pg)))
    async with background(locks.lock("x").acquire(timeout=4.0)) as (task,):
        await waiting(other, "x")
        if url == pg.url:
            with held_up(pg, TURN):
                await kill_blocked(pg)
        else:
            await asyncio.sleep(3.9)
            kill_sessions(pg, f"pid NOT IN ({mine})")
        with pytest.raises((LockTimeout, EngineUnavailable)):  # whichever it was about to do: leave, or look once more
            await asyncio.wait_for(task, SOON)
    assert await lease.release() is True
    await wait_until_unclaimed(other, "x")
