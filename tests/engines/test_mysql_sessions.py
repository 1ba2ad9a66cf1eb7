"""The lock belongs to a session: sessions that are killed, silent, cut off, or reused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest

from fencelock import LossReason
from fencelock.core.clock import NO_DEADLINE
from fencelock.errors import EngineUnavailable
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.contract.steps import background, is_free, take, wait_until_unclaimed, waiting
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.mysql_server import holder_of, key_of, kill, own_database, sessions_in, waiters_of
from tests.servers.mariadb import MariaDB
from tests.support.waiting import SOON, eventually


async def test_killed_while_holding(mariadb: MariaDB, clients: Clients) -> None:
    """The next renewal reports a killed session as lost, and release() returns False."""
    url = own_database(mariadb)
    locks = clients.connect(url)
    lease = await locks.lock("x", ttl=6).acquire()
    kill(mariadb, holder_of(mariadb, url, "x"))
    assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.GONE
    assert await lease.release() is False
    assert await take(locks, "x") > lease.token


async def test_killed_just_before_the_release(mariadb: MariaDB, clients: Clients) -> None:
    """release() on a killed session returns False and does not affect the next holder."""
    url = own_database(mariadb)
    locks = clients.connect(url)
    lease = await locks.lock("x", ttl=60).acquire()
    kill(mariadb, holder_of(mariadb, url, "x"))
    successor = await clients.connect(url).lock("x").acquire(SOON)
    assert await lease.release() is False
    successor.check()
    assert not await is_free(locks, "x")
    assert await successor.release() is True


async def test_killed_while_idle(mariadb: MariaDB, clients: Clients) -> None:
    """Pooled connections whose sessions were killed are replaced without an error."""
    url = own_database(mariadb)
    locks = clients.connect(url)
    token = await take(locks, "x")
    for session in sessions_in(mariadb, url):
        kill(mariadb, session)
    assert await take(locks, "x") > token
    assert (await locks.inspect("x")).holders == ()


@pytest.mark.parametrize("what", ["CONNECTION", "QUERY"])
async def test_killed_while_waiting(mariadb: MariaDB, clients: Clients, what: str) -> None:
    """A waiter whose session or statement is killed does not get the lock; it waits again."""
    url = own_database(mariadb)
    locks, other = clients.connect(url), clients.connect(url)
    lease = await other.lock("x", ttl=30).acquire()
    async with background(locks.lock("x", ttl=30).acquire(60)) as (task,):
        await waiting(other, "x")
        (before,) = waiters_of(mariadb, url, "x")
        kill(mariadb, before, what)

        async def waits_again() -> bool:
            return waiters_of(mariadb, url, "x") not in ([], [before])

        await eventually(waits_again, "it waits again")
        assert not task.done()
        lease.check()
        await lease.release()
        got = await task
        assert got.token > lease.token
        await got.release()
    await wait_until_unclaimed(other, "x")


async def test_every_session_killed_again_and_again(mariadb: MariaDB, clients: Clients) -> None:
    """While sessions are killed at random steps, tokens rise, and nothing is left behind."""
    url = own_database(mariadb)
    entered, last = 0, 0
    stop = asyncio.Event()

    async def work() -> None:
        nonlocal entered, last
        locks = clients.connect(url)
        while not stop.is_set():
            try:
                lease = await locks.lock("x", ttl=5, timeout=5).acquire()
            except (EngineUnavailable, TimeoutError):
                continue
            assert lease.token > last
            entered, last = entered + 1, lease.token
            with suppress(EngineUnavailable):
                await lease.release()

    async with background(*(work() for _ in range(3))) as tasks:
        rounds = 0
        while rounds < 12 or entered <= 10:
            rounds += 1
            await asyncio.sleep(0.1 if rounds <= 12 else 0.5)  # a slow machine needs more time between two rounds
            for session in sessions_in(mariadb, url):
                with suppress(RuntimeError):  # the session has ended
                    kill(mariadb, session)
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON * 2)
    await wait_until_unclaimed(clients.connect(url), "x")


async def test_silent_session_is_ended_by_the_server(mariadb: MariaDB, clients: Clients) -> None:
    """The server ends a session that was silent for its ttl, although its connection is open."""
    url = own_database(mariadb)
    # The engine alone: a client would abandon the expired claim itself.
    grant = await clients.on(url).engine().attempt(Claim("x", 1), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    session = holder_of(mariadb, url, "x")
    async with clients.connect(url).lock("x", timeout=SOON) as successor:
        assert successor.token > grant.token
        assert session not in sessions_in(mariadb, url)


async def test_short_wait_timeout_of_the_server(mariadb: MariaDB, clients: Clients) -> None:
    """A global wait_timeout that is shorter than the ttl does not end a lease: each session sets its own."""
    mariadb.query("SET GLOBAL wait_timeout = 1")
    try:
        locks = clients.connect(own_database(mariadb))
        lease = await locks.lock("x", ttl=9).acquire()
        await asyncio.sleep(1.8)
        lease.check()
        await lease.renew()
        assert await lease.release() is True
    finally:
        mariadb.query("SET GLOBAL wait_timeout = 28800")


async def test_ttl_of_a_pooled_session(mariadb: MariaDB, clients: Clients) -> None:
    """A pooled session that had a long ttl ends after the short ttl of its next lease."""
    url = own_database(mariadb)
    locks = clients.connect(url)
    async with locks.lock("x", ttl=600):
        long = holder_of(mariadb, url, "x")
    short = await locks.lock("x", ttl=1, renew=False).acquire()
    assert holder_of(mariadb, url, "x") == long, "the connection is used again"
    assert await take(clients.connect(url), "x") > short.token


async def test_two_locks_of_one_client_have_two_sessions(mariadb: MariaDB, clients: Clients) -> None:
    """GET_LOCK is reentrant within a session, so each lock of a client has its own session."""
    url = own_database(mariadb)
    locks = clients.connect(url)
    async with locks.lock("x"), locks.lock("y"):
        assert holder_of(mariadb, url, "x") != holder_of(mariadb, url, "y")
        assert not await is_free(locks, "x")


async def test_position_in_queue_is_kept(mariadb: MariaDB, clients: Clients) -> None:
    """Repeated calls of wait() and attempt() keep the same GET_LOCK, and so the position in the queue."""
    url = own_database(mariadb)
    engine, other = clients.on(url).engine(), clients.on(url).engine()
    held = await other.attempt(Claim("x", 30), enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(held, Grant)
    first, second = Claim("x", 9), Claim("x", 9)
    waits = [await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE) for claim in (first, second)]
    before = waiters_of(mariadb, url, "x")
    for _ in range(12):
        for claim, waiter in zip((first, second), waits, strict=True):
            assert isinstance(waiter, Waiting)
            assert await engine.wait(waiter, 0.1) is None
            assert isinstance(await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE), Waiting)
    assert waiters_of(mariadb, url, "x") == before
    assert await other.release(held)
    waiter = waits[0]
    assert isinstance(waiter, Waiting)
    assert await engine.wait(waiter, 3) is None
    got = await engine.attempt(first, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(got, Grant)
    assert await engine.renew([got]) == [Renewal.RENEWED]
    for claim in (first, second):
        await engine.abandon(claim)
    assert sessions_in(mariadb, url)
    assert waiters_of(mariadb, url, "x") == []


async def test_frozen_holder(mariadb: MariaDB, clients: Clients) -> None:
    """A lease whose connection died silently is lost by the client's clock before the server grants the lock to others."""
    direct = own_database(mariadb)
    other = clients.connect(direct)
    async with forwarding(mariadb) as path:
        locks = clients.connect(path.url.removesuffix("/fencelock") + "/" + direct.rpartition("/")[2])
        lease = await locks.lock("x", ttl=3).acquire()
        path.freeze()
        async with other.lock("x", timeout=SOON) as successor:
            assert lease.lost.is_set()
            assert successor.token > lease.token
        await locks.close()


async def test_lost_renewal_finds_a_session_that_the_server_has_ended(mariadb: MariaDB, clients: Clients) -> None:
    """After a renewal without a reply, a lookup over another connection finds whether the session still holds the lock."""
    direct = own_database(mariadb)
    async with forwarding(mariadb) as path:
        engine = clients.on(path.url.removesuffix("/fencelock") + "/" + direct.rpartition("/")[2]).engine()
        claims = [Claim("kept", 60), Claim("ended", 3)]
        grants = [await clients.run(engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE)) for claim in claims]
        held = [grant for grant in grants if isinstance(grant, Grant)]
        assert len(held) == 2
        path.freeze()
        kill(mariadb, holder_of(mariadb, direct, "ended"))
        assert await clients.run(engine.renew(held)) == [Renewal.UNKNOWN, Renewal.UNKNOWN]

        async def lost() -> bool:
            (renewal,) = await clients.run(engine.renew(held[1:]))
            return renewal is Renewal.LOST

        await eventually(lost, "the lookup finds that the session has ended")
        assert await clients.run(engine.release(held[1])) is False
        connection = cast(Any, engine)._sessions[claims[0].id].connection
        assert holder_of(mariadb, direct, "kept") == str(connection.id)
        assert connection.open


async def test_dead_connection_does_not_stop_other_renewals(mariadb: MariaDB, clients: Clients) -> None:
    """A connection that died silently does not stop the renewals of the client's other leases."""
    direct = own_database(mariadb)
    async with forwarding(mariadb) as path:
        locks = clients.connect(path.url.removesuffix("/fencelock") + "/" + direct.rpartition("/")[2])
        stuck = await locks.lock("stuck", ttl=6).acquire()
        path.freeze()
        short = await locks.lock("short", ttl=5).acquire()
        assert await stuck.lost.wait(SOON)
        short.check()
        await short.release()
        await locks.close()


async def test_frozen_waiter(mariadb: MariaDB, clients: Clients) -> None:
    """A waiter whose connection died silently finds by a lookup that its session has ended, and waits again."""
    direct = own_database(mariadb)
    other = clients.connect(direct)
    lease = await other.lock("x", ttl=30).acquire()
    async with forwarding(mariadb) as path:
        locks = clients.connect(path.url.removesuffix("/fencelock") + "/" + direct.rpartition("/")[2])
        async with background(locks.lock("x", ttl=3).acquire(60)) as (task,):
            await waiting(other, "x")
            path.freeze()
            (frozen,) = waiters_of(mariadb, direct, "x")
            kill(mariadb, frozen)

            async def waits_again() -> bool:
                return waiters_of(mariadb, direct, "x") not in ([], [frozen])

            await eventually(waits_again, "it waits again, on another connection")
            await lease.release()
            await (await task).release()
        await locks.close()


async def test_names_that_get_lock_would_confuse(mariadb: MariaDB, clients: Clients) -> None:
    """Names that GET_LOCK would truncate or compare as equal are different locks."""
    locks = clients.connect(own_database(mariadb))
    names = ["n" * 64, "n" * 65, "N" * 65, "n" * 1000, "a", "A", "ä", "a ", "ａ"]
    leases = [await locks.lock(name).acquire(5) for name in names]
    assert [name async for name in locks.names()] == sorted(names)
    for lease in leases:
        assert await lease.release()


NASTY = [
    "'; DROP TABLE fencelock_holders; --",
    '" OR 1=1',
    "\\'",
    "x*/ SELECT 1 /*",
    "%_",
    "`",
    "?",
    ":x",
    "/*!99999 */",
]


async def test_injection(mariadb: MariaDB, clients: Clients) -> None:
    """Names, namespaces and owners are never parsed as SQL."""
    url = own_database(mariadb)
    for nasty in NASTY:
        locks = clients.connect(url, namespace=nasty, owner=nasty)
        lease = await locks.lock(nasty, ttl=30).acquire(5)
        async with background(locks.lock(nasty, ttl=30).acquire(60)) as (task,):
            await waiting(locks, nasty)
            seen = await locks.inspect(nasty)
            assert [seen.holders[0].owner, seen.waiters[0].owner] == [nasty, nasty]
            assert [name async for name in locks.names()] == [nasty]
            await lease.release()
            await (await task).release()


async def test_renewal_on_another_session_is_lost(mariadb: MariaDB, clients: Clients) -> None:
    """A renewal that reaches another session than the holder's (behind a proxy) reports LOST."""
    url = own_database(mariadb)
    engine = clients.on(url).engine()
    grant = await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    cast(Any, engine)._sessions[grant.claim.id].connection.id += 1_000_000  # as if a proxy had opened another session
    assert await engine.renew([grant]) == [Renewal.LOST]


def test_key() -> None:
    """The name of a user-level lock is short, in lower case, and depends on database, namespace and name."""
    keys = [key_of(f"mysql://h/{database}", name) for database in ("a", "b") for name in ("x", "X", "x" * 1024)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) <= 64 and key == key.lower() for key in keys)
