"""What both of PostgreSQL's engines do: the schema, what they refuse, lost sessions, forks, injection."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

import psycopg
import pytest

import fencelock
from fencelock import EngineUnavailable, InvalidURL, LeaseLost, LossReason
from fencelock.core.clock import NO_DEADLINE
from fencelock.core.urls import open_engine
from fencelock.engines.postgres.schema import LAYOUT
from fencelock.model import Claim, Grant
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from tests.contract.steps import background, renewed, take, wait_until_unclaimed, waiting
from tests.engines.conftest import Clients
from tests.engines.postgres_server import advisory, any_alive, ask, connected, empty, fill, kill_sessions, sessions
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Postgres
from tests.support.waiting import SOON, eventually


@pytest.fixture
def pg(postgres: Postgres) -> Postgres:
    """The PostgreSQL that all tests share, empty."""
    return empty(postgres)


@pytest.fixture(params=["rows", "advisory"])
def url(request: pytest.FixtureRequest, pg: Postgres) -> str:
    """Either engine."""
    return pg.url if request.param == "rows" else advisory(pg)


# ---------------------------------------------------------------------------- the schema


def test_first_use_by_many_at_once(pg: Postgres, url: str) -> None:
    """Twenty clients that find no schema make it together, and each gets its lock."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(20)

    def work(number: int) -> None:
        try:
            with fencelock.connect(url) as locks:
                barrier.wait()
                with locks.lock(f"n{number}"):
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ask(pg, "SELECT version FROM fencelock.layout") == [(LAYOUT,)]


def test_other_layout(pg: Postgres, url: str) -> None:
    """A schema of another release is refused, and left as it is."""
    with fencelock.connect(url) as locks, locks.lock("x"):
        pass
    ask(pg, "UPDATE fencelock.layout SET version = 1")
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match=r"layout 1.*has 2"):
        locks.lock("x").acquire()
    ask(pg, "DROP FUNCTION fencelock.handshake()")
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match=r"layout 1.*has 2"):
        locks.lock("x").acquire()


@pytest.fixture
def user(pg: Postgres) -> Any:
    """A user who may do nothing, and the URL with which it logs in."""
    ask(pg, "DROP ROLE IF EXISTS app")
    ask(pg, "CREATE ROLE app LOGIN PASSWORD 's3cret'")
    yield pg.url.replace("postgres@", "app:s3cret@")
    ask(pg, "DROP SCHEMA IF EXISTS fencelock CASCADE")
    ask(pg, "DROP ROLE app")


GRANTS = """
GRANT USAGE ON SCHEMA fencelock TO app;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencelock TO app;
GRANT SELECT, USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA fencelock TO app;
"""


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+advisory"])
def test_user_who_may_not_create(pg: Postgres, user: str, scheme: str) -> None:
    """Who may not make the schema is told which command does; with the documented rights it then works."""
    url = user.replace("postgresql", scheme, 1)
    with fencelock.connect(url) as locks:
        with pytest.raises(EngineUnavailable, match="fencelock schema --apply") as caught:
            locks.lock("x").acquire()
        assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r} {locks!r}"
        with fencelock.connect(pg.url) as owner, owner.lock("x"):
            pass
        with pytest.raises(EngineUnavailable, match=r"the schema is there .* run the GRANTs"):
            locks.lock("x").acquire()
        ask(pg, GRANTS)
        with locks.lock("x") as lease:
            assert [holder.token for holder in locks.inspect("x").holders] == [lease.token]
            assert list(locks.names()) == ["x"]


def test_force_release_of_another_role(pg: Postgres, user: str) -> None:
    """Ending another role's session takes a right of its own, which the error names; its lease is shown all the same."""
    with fencelock.connect(advisory(pg)) as owner, fencelock.connect(user.replace("sql", "sql+advisory", 1)) as locks:
        lease = owner.lock("x", ttl=30).acquire()
        ask(pg, GRANTS)
        assert [(holder.token, holder.expires_in) for holder in locks.inspect("x").holders] == [(lease.token, 30.0)]
        with pytest.raises(EngineUnavailable, match="superuser") as caught:
            locks.force_release("x", reason="test")
        assert "pg_signal_backend" in str(caught.value)
        assert "schema --apply" not in str(caught.value)
        assert lease.release() is True


# ---------------------------------------------------------------------------- what is refused, and said


@pytest.mark.parametrize(
    "bad",
    ["postgresql:x", "postgresql://h/db?nonsense=1", "postgresql://u:s3cret@h:99x/db"],
)
def test_bad_url(bad: str) -> None:
    """What libpq does not understand is refused at once, without its password."""
    with pytest.raises(InvalidURL) as caught:
        fencelock.connect(bad)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("postgresql://u:s3cret@h/db?sslmod=require", "no parameter 'sslmod'"),
        ("postgresql://u:s3cret/b#c@h/db", "%2F.*%23"),
    ],
)
def test_mistakes_in_a_url(bad: str, words: str) -> None:
    """The error names an unknown parameter, and says how to escape a password without showing it."""
    with pytest.raises(InvalidURL, match=words) as caught:
        fencelock.connect(bad)
    assert "s3cret" not in str(caught.value)


def test_unreachable_server_is_named() -> None:
    """The error names the address of a server that does not listen, and not the password."""
    with fencelock.connect("postgresql://app:s3cret@127.0.0.1:1/db") as locks:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1/db") as caught:
            locks.lock("x").try_acquire()
        assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"


def test_first_host_is_dead(pg: Postgres) -> None:
    """Of several hosts, the next is asked when one is dead."""
    with (
        fencelock.connect(f"postgresql://postgres@127.0.0.1:1,{pg.address}/postgres") as locks,
        locks.lock("x") as lease,
    ):
        lease.check()


def test_connection_of_the_application(pg: Postgres, user: str) -> None:
    """A psycopg connection says where the locks are; it is not used itself, and its password is not shown."""
    with fencelock.connect(pg.url) as owner, owner.lock("x"):
        pass
    ask(pg, GRANTS)
    with psycopg.connect(user) as connection, fencelock.connect(cast(Any, connection)) as locks:
        assert "s3cret" not in repr(locks)
        with locks.lock("x"):
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            assert ask(pg, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'")[0][0] >= 2


def test_read_only(pg: Postgres, url: str) -> None:
    """A server that takes no writes is named as such, in its own words."""
    with fencelock.connect(url) as locks, locks.lock("x"):
        pass
    with fencelock.connect(f"{url}?options=-c%20default_transaction_read_only%3Don") as locks:
        with pytest.raises(EngineUnavailable, match="read-only"):
            locks.lock("x").acquire()


def test_isolation_of_the_role(pg: Postgres, url: str) -> None:
    """Whatever isolation a role has by default, twenty contenders exclude each other."""
    inside, most = 0, 0
    address = f"{url}?options=-c%20default_transaction_isolation%3Dserializable"

    def work() -> None:
        nonlocal inside, most
        with fencelock.connect(address) as locks:
            for _ in range(5):
                with locks.lock("x", timeout=SOON):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+advisory"])
def test_asynchronous_commit_by_default(own_postgres: Callable[..., Postgres], scheme: str) -> None:
    """Where commits are not waited for by default, a token is: none comes again after a crash."""
    server = own_postgres(settings={"synchronous_commit": "off", "wal_writer_delay": "10s"})
    with fencelock.connect(server.url.replace("postgresql", scheme, 1)) as locks:
        tokens: list[int] = []
        for _ in range(40):  # more than a sequence logs at a time
            with locks.lock("x") as lease:
                tokens.append(lease.token)
        server.kill()
        server.start()
        with locks.lock("y", timeout=SOON) as second:
            assert second.token > max(tokens)


NASTY = [
    "'; DROP SCHEMA fencelock CASCADE; --",
    "$1",
    "%s",
    'a"b',
    "\\'",
    "{a,b}",
    "x:y:z",
    "E'\\\\x00'",
    "fencelock.claim",
]


def test_injection(pg: Postgres, url: str) -> None:
    """Names, namespaces, owners and prefixes are never read as SQL."""
    for word in NASTY:
        with fencelock.connect(url, namespace=word, owner=word) as locks:
            lease = locks.lock(word).acquire()
            assert [holder.owner for holder in locks.inspect(word).holders] == [word]
            assert list(locks.names(word)) == [word]
            assert locks.lock(word).try_acquire() is None
            assert locks.force_release(word, reason=word) == 1
            with pytest.raises(LeaseLost):
                lease.renew()
            assert locks.inspect(word).holders == ()
    assert ask(pg, "SELECT version FROM fencelock.layout") == [(LAYOUT,)]


# ---------------------------------------------------------------------------- sessions that end


async def test_ended_while_idle(pg: Postgres, url: str, clients: Clients) -> None:
    """Sessions that were ended between two locks are replaced, and nobody notices."""
    locks = clients.connect(url)
    first = await take(locks, "x")
    assert kill_sessions(pg) > 0
    assert await take(locks, "x") > first


async def test_ended_while_waiting(pg: Postgres, url: str, clients: Clients) -> None:
    """A waiter whose sessions were all terminated enqueues again and gets the lock."""
    holder, waiter = clients.connect(pg.url, namespace="a"), clients.connect(url)
    other = clients.connect(url, ttl=9)
    await take(holder, "warm")
    lease = await other.lock("x").acquire()
    theirs = sessions(pg)
    async with background(waiter.lock("x", ttl=9).acquire()) as (task,):
        await waiting(other, "x")
        mine = ",".join(map(str, sessions(pg) - theirs))
        kill_sessions(pg, f"pid IN ({mine})")
        await waiting(other, "x")
        await lease.release()
        second = await asyncio.wait_for(task, SOON)
        assert second.token > lease.token
        await second.release()


async def test_ended_while_releasing(pg: Postgres, clients: Clients) -> None:
    """A release over a session that was ended goes over another one; the lock is free at once."""
    locks = clients.connect(pg.url)
    lease = await locks.lock("x", ttl=60).acquire()
    kill_sessions(pg)
    assert await lease.release() is True
    await wait_until_unclaimed(clients.connect(pg.url), "x")


async def test_rows_outlive_their_sessions(pg: Postgres, clients: Clients) -> None:
    """A lease in rows does not hang on a session: it is renewed over the next."""
    locks = clients.connect(pg.url)
    lease = await locks.lock("x", ttl=6).acquire()
    for _ in range(2):
        kill_sessions(pg)
        await renewed(lease)
    assert await lease.release() is True


async def test_advisory_ends_with_its_session(pg: Postgres, clients: Clients) -> None:
    """A lease whose session was ended is lost, which its holder is told within the ttl; the next has a higher token."""
    locks, other = clients.connect(advisory(pg)), clients.connect(advisory(pg))
    lease = await locks.lock("x", ttl=6).acquire()
    kill_sessions(pg)
    assert await lease.lost.wait(SOON)
    assert lease.reason is LossReason.GONE
    assert await lease.release() is False
    assert await take(other, "x") > lease.token


async def test_restart_with_its_data(own_postgres: Callable[..., Postgres], clients: Clients) -> None:
    """After a kill -9 and a restart tokens go on rising, and a lease in rows that lasts is still held."""
    server = own_postgres()
    locks, other = clients.connect(server.url), clients.connect(advisory(server))
    lease = await locks.lock("x", ttl=60).acquire()
    second = await other.lock("x", ttl=3).acquire()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    assert await second.lost.wait(SOON)
    await lease.renew()
    assert await take(other, "y") > max(lease.token, second.token)
    assert await locks.lock("x").try_acquire() is None
    assert await lease.release() is True
    assert await second.release() is False


async def test_restored_from_a_backup(pg: Postgres, url: str, clients: Clients) -> None:
    """A sequence that fell behind, as in a restored database, is moved past the clock before it gives a token."""
    last = await take(clients.connect(url), "x")
    ask(pg, "SELECT setval('fencelock.token', 1000000)")
    assert await take(clients.connect(url), "x") > last
    ask(pg, "SELECT setval('fencelock.token', 1000000)")
    assert await take(clients.connect(url), "x") > last


async def test_idle_timeout_of_the_role(pg: Postgres, url: str, clients: Clients) -> None:
    """Where idle sessions are ended early by default, leases last and the next lock is had all the same."""
    locks = clients.connect(f"{url}?options=-c%20idle_session_timeout%3D300")
    lease = await locks.lock("x", ttl=6).acquire()
    await renewed(lease)
    assert await lease.release() is True
    await asyncio.sleep(0.6)
    assert await take(locks, "x") > lease.token


async def test_statement_timeout_of_the_role(pg: Postgres, clients: Clients) -> None:
    """Where statements are ended early by default, an advisory waiter waits for as long as it was asked to."""
    locks = clients.connect(f"{advisory(pg)}?options=-c%20statement_timeout%3D200%20-c%20lock_timeout%3D200")
    lease = await locks.lock("x").acquire()
    async with background(locks.lock("x", timeout=SOON).acquire()) as (task,):
        await waiting(locks, "x")
        await asyncio.sleep(0.6)
        assert not task.done()
        await lease.release()
        await (await asyncio.wait_for(task, SOON)).release()


async def test_too_many_connections(own_postgres: Callable[..., Postgres], clients: Clients) -> None:
    """A server that has no connection left is named as such, in its own words."""
    server = own_postgres(settings={"max_connections": "8", "superuser_reserved_connections": "0"})
    locks = clients.connect(server.url)
    held = fill(server)
    assert len(held) == 8
    processes = [connection.info.backend_pid for connection in held]
    try:
        with pytest.raises(EngineUnavailable, match="too many clients"):
            await locks.lock("x").try_acquire()
    finally:
        for connection in held:
            connection.close()

    async def ended() -> bool:
        return not any_alive(processes)

    await eventually(ended, "the server let go of the connections")
    assert await take(locks, "x")


# ---------------------------------------------------------------------------- forks, stopped processes


@pytest.mark.runtime_name("aio")
async def test_cancelled_release_on_a_slow_session(pg: Postgres, clients: Clients) -> None:
    """When a release that was cancelled is over, so is the session: nobody is kept from the lock by one that is slow."""
    other = clients.connect(advisory(pg))
    assert await take(other, "y")
    theirs = sessions(pg)
    locks = clients.connect(advisory(pg))
    lease = await locks.lock("x", ttl=30).acquire()
    mine = sessions(pg) - theirs

    def tell(number: signal.Signals) -> None:
        for pid in mine:
            os.kill(pid, number)

    tell(signal.SIGSTOP)
    go_on = threading.Timer(0.3, tell, [signal.SIGCONT])
    go_on.start()
    task = asyncio.ensure_future(lease.release())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await take(other, "x", timeout=0)
    go_on.join()


CHILD = """
import gc

async def child():
    one = await locks.lock('other', ttl=5).acquire()
    busy = await locks.lock('x').try_acquire()
    answer = [lease.lost.is_set(), busy is None, await one.release(), await lease.release()]
    await locks.close()
    gc.collect()
    return answer
result = forked(child)
"""


async def test_fork(pg: Postgres, url: str, clients: Clients) -> None:
    """A child never speaks on its parent's sessions: they are all there afterwards, and serve the parent."""
    worker = await clients.on(url).worker()
    token = await worker.acquire("x", ttl=60)
    before = sessions(pg)
    assert before
    assert await worker.do(CHILD) == [True, True, True, False]
    assert before <= sessions(pg)
    assert await worker.do("lease.check(); await lease.renew(); result = lease.token") == token
    assert await worker.do("result = await lease.release()") is True


# ---------------------------------------------------------------------------- poolers


@pytest.fixture
def pooler(pg: Postgres, own_pgbouncer: Callable[..., PgBouncer]) -> PgBouncer:
    """A PgBouncer in transaction mode."""
    return own_pgbouncer(pg)


async def test_rows_behind_a_pooler(pooler: PgBouncer, clients: Clients) -> None:
    """Rows work behind PgBouncer in transaction mode: waiting, renewing, handing over, in order."""
    locks, other = clients.connect(pooler.url, ttl=6), clients.connect(pooler.url, ttl=6)
    served: list[int] = []

    async def work(number: int) -> None:
        async with other.lock("x", timeout=SOON) as lease:
            served.append(number)
            lease.check()

    async with locks.lock("x") as lease, background() as _:
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(work(number)))
            await waiting(locks, "x", number + 1)
        await renewed(lease)
    await asyncio.gather(*tasks)
    assert served == list(range(5))
    await wait_until_unclaimed(locks, "x")


async def test_advisory_behind_a_pooler(pooler: PgBouncer, clients: Clients) -> None:
    """Advisory locks are refused behind a pooler, with what to do instead."""
    with pytest.raises(EngineUnavailable, match=r"pooler.*postgresql://"):
        await clients.connect(advisory(pooler)).lock("x").try_acquire()


# ---------------------------------------------------------------------------- waiting


async def test_one_notification_for_each_grant(pg: Postgres, clients: Clients) -> None:
    """A hundred waiters: each release calls one of them, who needs no further round trip."""
    locks = clients.connect(pg.url, ttl=60)
    with connected(pg) as connection:
        first = await locks.lock("x").acquire()

        async def work() -> None:
            async with locks.lock("x", timeout=60):
                pass

        async with background(*(work() for _ in range(100))) as tasks:
            await waiting(locks, "x", 100)

            async def all_can_be_called() -> bool:
                ((seated,),) = connection.execute(
                    "SELECT count(*) FROM fencelock.claim WHERE token IS NULL AND channel <> ''"
                )
                return bool(seated == 100)

            await eventually(all_can_be_called, "all waiters can be called")
            await first.release()
            await asyncio.gather(*tasks)
    assert len(sessions(pg)) <= 12


async def test_listener_is_ended(pg: Postgres, clients: Clients) -> None:
    """A client whose listening session was ended hears of its turn all the same."""
    locks, other = clients.connect(pg.url, ttl=60), clients.connect(pg.url, ttl=60)
    lease = await other.lock("x").acquire()
    async with background(locks.lock("x", timeout=SOON).acquire()) as (task,):
        await waiting(other, "x")

        async def seated() -> bool:
            return ask(pg, "SELECT channel <> '' FROM fencelock.claim WHERE token IS NULL") == [(True,)]

        await eventually(seated, "the waiter can be called")
        assert kill_sessions(pg, "query LIKE 'LISTEN%'") == 1
        await asyncio.sleep(0.1)
        await eventually(seated, "the waiter can be called")
        await lease.release()
        await (await asyncio.wait_for(task, SOON)).release()


# ---------------------------------------------------------------------------- advisory keys


def test_collision_is_noticed(pg: Postgres) -> None:
    """Two names with one key never share a lock: the second is told."""
    with fencelock.connect(advisory(pg)) as locks, locks.lock("x"):
        pass
    ask(pg, "UPDATE fencelock.name SET name = 'y'")
    with fencelock.connect(advisory(pg)) as locks:
        with pytest.raises(fencelock.InvalidName, match="cannot be told apart") as caught:
            locks.lock("x").acquire()
        assert caught.value.name == "x"


def test_handshake_locks_no_name(pg: Postgres) -> None:
    """The handshake of a new connection locks no name, not even for a moment: another client would find it held."""
    with fencelock.connect(advisory(pg)) as locks:
        for name in ("free", "long-held", "long-unused"):
            with locks.lock(name):
                pass
        ask(pg, "UPDATE fencelock.name SET seen = current_date - 8 WHERE name LIKE 'long-%'")
        with connected(pg) as connection, locks.lock("new"), locks.lock("long-held"):
            ask(pg, "UPDATE fencelock.name SET seen = current_date - 8 WHERE name = 'long-held'")
            with connection.transaction():
                connection.execute("SELECT fencelock.handshake()")
                taken = connection.execute(
                    "SELECT name FROM fencelock.advisory_locks() JOIN fencelock.name USING (key) WHERE pid = pg_backend_pid()"
                )
                assert taken.fetchall() == []
        assert {name for (name,) in ask(pg, "SELECT name FROM fencelock.name")} == {"free", "new", "long-held"}


def test_session_is_clean_when_it_is_used_again(pg: Postgres) -> None:
    """A session that goes back to the pool holds nothing and has no ttl left."""
    with fencelock.connect(advisory(pg)) as locks:
        with locks.lock("x", ttl=3):
            assert ask(pg, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(1,)]
        before = sessions(pg)
        assert ask(pg, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
        threading.Event().wait(3.3)
        assert sessions(pg) == before


def test_two_leases_of_one_client(pg: Postgres) -> None:
    """Advisory locks are re-entrant in a session, so that two of one client must not share one."""
    runtime = BlockingRuntime()
    engine = open_engine(runtime, advisory(pg), "n")
    first = run_sync(engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE))
    assert isinstance(first, Grant)
    assert not isinstance(run_sync(engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)), Grant)
    run_sync(engine.close())
