"""What happens to a PostgreSQL, and to those who use it: deadlocks, full disks, failovers, restored backups, odd roles."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import fencelock
from fencelock import EngineUnavailable, GuaranteeUnavailable, LeaseLost
from fencelock.core.clock import NO_DEADLINE
from fencelock.core.urls import open_engine
from fencelock.engines.postgres.connection import PostgresConnection, Statement
from fencelock.engines.postgres.schema import LAYOUT
from fencelock.model import Claim
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, take, wait_until_unclaimed, waiting
from tests.engines.conftest import Clients
from tests.engines.postgres_server import OURS, advisory, ask, connected, empty, fill, kill_sessions, sessions
from tests.servers import packages, template
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Postgres, PostgresSmallDisk, PostgresStandby
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually

SCHEMES = pytest.mark.parametrize("scheme", ["postgresql", "postgresql+advisory"])
TURN = "SELECT pg_advisory_xact_lock(hashtextextended('x', hashtextextended('fencelock', 7306372540837290870)))"
GREETING = "SELECT pg_advisory_xact_lock(7306372540837290869)"


@pytest.fixture
def pg(postgres: Postgres) -> Postgres:
    """The PostgreSQL that all tests share, empty."""
    return empty(postgres)


@pytest.fixture(params=["rows", "advisory"])
def url(request: pytest.FixtureRequest, pg: Postgres) -> str:
    """Either engine."""
    return pg.url if request.param == "rows" else advisory(pg)


async def blocked(pg: Postgres) -> None:
    """Wait until a session of ours waits for a lock of the server's."""

    async def is_so() -> bool:
        return bool(ask(pg, f"SELECT pid FROM pg_stat_activity WHERE {OURS} AND wait_event_type = 'Lock'"))

    await eventually(is_so, "a session of ours waits")


# ---------------------------------------------------------------------------- steps that have to be repeated


async def test_deadlock(pg: Postgres, clients: Clients) -> None:
    """A step that the server ends to break a deadlock is repeated, and its caller does not notice."""
    locks = clients.connect(pg.url)
    lease = await locks.lock("x", ttl=60).acquire()
    with connected(pg) as connection:
        before = deadlocks(connection)
        connection.execute("SET deadlock_timeout = '1min'")  # let ours be the one that is ended
        connection.execute("BEGIN")
        connection.execute("SELECT FROM fencelock.claim FOR UPDATE")
        release = asyncio.ensure_future(lease.release())
        await blocked(pg)
        await asyncio.to_thread(connection.execute, TURN.encode())
        connection.execute("COMMIT")
        assert await asyncio.wait_for(release, SOON) is True

        async def counted() -> bool:
            return deadlocks(connection) == before + 1

        await eventually(counted, "the server has counted a deadlock")
    await wait_until_unclaimed(locks, "x")


def deadlocks(connection: psycopg.Connection[Any]) -> int:
    """How many there were."""
    ((number,),) = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'").fetchall()
    return int(number)


async def test_serialization_failure(pg: Postgres, url: str, clients: Clients) -> None:
    """A greeting that fails as others have written meanwhile, where the role's isolation is serializable, is repeated."""
    await take(clients.connect(pg.url), "x")
    ask(
        pg,
        "INSERT INTO fencelock.claim (namespace, name, id, seconds, expires, shared, channel, owner, value) "
        "VALUES ('old', 'old', 'old', 1, '2000-01-01', false, '', '', '')",
    )
    locks = clients.connect(f"{url}?options=-c%20default_transaction_isolation%3Dserializable")
    with connected(pg) as connection:
        connection.execute("BEGIN")
        connection.execute(GREETING.encode())
        task = asyncio.ensure_future(locks.lock("y").acquire(timeout=SOON))
        await blocked(pg)
        connection.execute("UPDATE fencelock.claim SET owner = 'changed' WHERE id = 'old'")
        connection.execute("COMMIT")
    lease = await asyncio.wait_for(task, SOON)
    assert await lease.release() is True
    assert "could not serialize access" in pg._log()


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"])
async def test_limits_of_the_role(pg: Postgres, url: str, setting: str, clients: Clients) -> None:
    """Whatever a role allows its statements, thirty contenders each get the lock."""
    locks = clients.connect(f"{url}?options=-c%20{setting}%3D{'400' if setting == 'statement_timeout' else '20'}")
    assert len({await task for task in [asyncio.ensure_future(take(locks, "x", 3 * SOON)) for _ in range(30)]}) == 30
    await wait_until_unclaimed(locks, "x")


async def test_statement_cancelled(pg: Postgres, clients: Clients) -> None:
    """A statement that an administrator cancels was not carried out: it is repeated."""
    locks = clients.connect(pg.url)
    await take(locks, "warm")
    with connected(pg) as connection:
        connection.execute("BEGIN")
        connection.execute(TURN.encode())
        task = asyncio.ensure_future(locks.lock("x").acquire(timeout=SOON))
        await blocked(pg)
        ask(pg, "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        connection.execute("COMMIT")
    assert await (await asyncio.wait_for(task, SOON)).release() is True


# ---------------------------------------------------------------------------- odd roles and words

SHADOWS = """
CREATE SCHEMA evil;
CREATE FUNCTION evil.pg_try_advisory_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION evil.pg_advisory_lock(bigint) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION evil.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION evil.nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint';
CREATE FUNCTION evil.nextval(text) RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint';
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2000-01-01''::timestamptz';
CREATE FUNCTION evil.pg_backend_pid() RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION evil.never(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.never);
CREATE TABLE evil.claim (); CREATE TABLE evil.layout ();
"""


def test_search_path(pg: Postgres, url: str) -> None:
    """A search_path on which others' functions and operators come first changes nothing, not even in making the schema."""
    ask(pg, "DROP SCHEMA IF EXISTS evil CASCADE")
    ask(pg, SHADOWS)
    try:
        path = f"{url}?options=-c%20search_path%3Devil,public,pg_catalog"
        with fencelock.connect(path) as locks, fencelock.connect(path) as other:
            lease = locks.lock("x").acquire()
            assert lease.token > 10**15
            assert other.lock("x").try_acquire() is None
            assert [holder.token for holder in other.inspect("x").holders] == [lease.token]
            assert list(other.names()) == ["x"]
            lease.renew()
            assert lease.release() is True
            second = other.lock("x").acquire(timeout=SOON)
            assert second.token > lease.token
            assert other.force_release("x", reason="test") == 1
            with pytest.raises(LeaseLost):
                second.renew()
    finally:
        ask(pg, "DROP SCHEMA evil CASCADE")


@pytest.mark.parametrize("word", ["'; DROP SCHEMA fencelock CASCADE; --", 'a"b', "x y", "$$", "\\", "ünï"])
def test_injection_through_urls(pg: Postgres, url: str, word: str) -> None:
    """What stands in a URL is never read as SQL, nor as another parameter of libpq's."""
    from urllib.parse import quote

    with fencelock.connect(f"{url}?application_name={quote(word, safe='')}") as locks, locks.lock("x") as lease:
        assert lease.token
    with fencelock.connect(url.replace("/postgres", f"/{quote(word + ' host=127.0.0.2', safe='')}")) as locks:
        with pytest.raises(EngineUnavailable, match="does not exist"):
            locks.lock("x").try_acquire()
    assert ask(pg, "SELECT version FROM fencelock.layout") == [(LAYOUT,)]


@pytest.mark.parametrize("output", ["hex", "escape"])
def test_bytea_output_of_the_role(pg: Postgres, output: str) -> None:
    """Values of records and of claims come back unchanged, whatever format the role has for bytes."""
    engine: Any = open_engine(BlockingRuntime(), f"{pg.url}?options=-c%20bytea_output%3D{output}", "bytes")
    assert run_sync(engine.records.write("k", b"\0\xff'\\", token=1, ttl=60)).done
    assert run_sync(engine.records.read("k")).value == b"\0\xff'\\"
    run_sync(engine.attempt(Claim("x", 30, value="\0é'"), enqueue=False, deadline=NO_DEADLINE))
    assert [holder.value for holder in run_sync(engine.inspect("x")).holders] == ["\0é'"]
    run_sync(engine.close())


def test_injection_through_records(pg: Postgres) -> None:
    """Keys and values of records are never read as SQL."""

    words = ["'; DROP SCHEMA fencelock CASCADE; --", "\\x00", "E'\\\\x00'", "{a,b}"]
    for word in words:
        records = open_engine(BlockingRuntime(), pg.url, word).records  # type: ignore[attr-defined]
        assert run_sync(records.write(word, word.encode(), token=1, ttl=60)).done
        assert run_sync(records.read(word)).value == word.encode()
    assert ask(pg, "SELECT count(*) FROM fencelock.record") == [(len(words),)]


@SCHEMES
def test_no_connection_left(own_postgres: Callable[..., Postgres], scheme: str) -> None:
    """A server that has no connection left for one more waiter says so; who holds a lock goes on holding it."""
    server = own_postgres(settings={"max_connections": "8", "superuser_reserved_connections": "0"})
    with fencelock.connect(server.url.replace("postgresql", scheme, 1), ttl=6) as locks:
        lease = locks.lock("x").acquire()
        with ExitStack() as stack:
            for connection in fill(server):
                stack.enter_context(connection)
            others = stack.enter_context(fencelock.connect(server.url.replace("postgresql", scheme, 1)))
            with pytest.raises(EngineUnavailable, match=r"too many.*max_connections"):
                others.lock("x").acquire(timeout=0.5)
            first = lease.deadline
            while lease.deadline == first:  # until it is renewed
                lease.check()
                threading.Event().wait(0.05)
        assert lease.release() is True


# ---------------------------------------------------------------------------- the disk


@SCHEMES
def test_full_disk(scheme: str, own_small_disk: PostgresSmallDisk) -> None:
    """On a full disk a lock is refused in the server's words, and nothing of it is there; what is held can be given back."""
    server = own_small_disk
    with fencelock.connect(server.url.replace("postgresql", scheme, 1)) as locks:
        leases = [locks.lock("first").acquire()]
        with connected(server) as connection:
            connection.execute("CREATE TABLE filler (a text) TABLESPACE small")
            with pytest.raises(psycopg.errors.DiskFull):
                while True:
                    connection.execute("INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 50)")
        names = iter(range(100_000))
        with pytest.raises(EngineUnavailable, match="disk is full") as caught:
            while True:
                leases.append(locks.lock(f"{next(names)}").acquire())
                if scheme != "postgresql":
                    leases.pop().release()  # its rows are one for each name
        name = caught.value.name
        assert name is not None
        assert locks.inspect(name).holders == ()
        for lease in leases:
            lease.check()
            assert lease.release() is True
        ask(server, "DROP TABLE filler")
        with locks.lock(name, timeout=SOON):
            pass


@pytest.fixture
def own_small_disk() -> Iterator[PostgresSmallDisk]:
    """A server whose tables are on a small disk."""
    with PostgresSmallDisk() as server:
        ask(server, f"CREATE TABLESPACE small LOCATION '{server.disk}'")
        ask(server, "ALTER DATABASE postgres SET default_tablespace = 'small'")
        yield server


async def test_correctness_refuses_a_server_that_does_not_flush_commits(
    own_postgres: Callable[..., Postgres], clients: Clients
) -> None:
    """The first acquire refuses it before it takes anything, later locks are refused when made; other purposes work.

    With fsync on, synchronous_commit and full_page_writes do not matter: a grant waits for its token to be on disk, and a
    sequence is restored as a whole.
    """
    server = own_postgres(settings={"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"})
    for url in (server.url, advisory(server)):
        locks = clients.connect(url)
        made = locks.lock("x", purpose="correctness")
        with pytest.raises(GuaranteeUnavailable, match="fsync is off; set it to on") as caught:
            await made.acquire(SOON)
        assert caught.value.name == "x"
        assert (await locks.inspect("x")).holders == ()
        with pytest.raises(GuaranteeUnavailable, match="fsync"):
            locks.lock("x", purpose="correctness")
        assert await take(locks, "x")
        await locks.close()
    server.stop()
    server.settings["fsync"] = "on"
    server.start()
    for url in (server.url, advisory(server)):
        async with clients.connect(url).lock("x", purpose="correctness", timeout=SOON) as lease:
            lease.check()


# ---------------------------------------------------------------------------- other servers


def standby_of(primary: Postgres, stack: ExitStack) -> PostgresStandby:
    """A standby that follows."""
    return stack.enter_context(PostgresStandby(primary))


def caught_up(primary: Postgres, standby: Postgres) -> None:
    """Wait until the standby has all that the primary has."""
    ((place,),) = ask(primary, "SELECT pg_current_wal_lsn()::text")
    end = threading.Event()
    for _ in range(1000):
        if ask(standby, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", place) == [(True,)]:
            return
        end.wait(0.02)
    raise AssertionError("the standby never caught up")


def cut_off(standby: Postgres) -> None:
    """Have the standby follow no longer: what it has when this returns is what it has for good."""
    ask(standby, "ALTER SYSTEM SET primary_conninfo = ''")
    ask(standby, "SELECT pg_reload_conf()")
    end = threading.Event()
    for _ in range(1000):
        if ask(standby, "SELECT 1 FROM pg_stat_wal_receiver") == []:
            return
        end.wait(0.02)
    raise AssertionError("the standby still follows")


@SCHEMES
def test_standby(own_postgres: Callable[..., Postgres], scheme: str) -> None:
    """A hot standby is refused with its own words; named among several hosts it is passed over."""
    primary = own_postgres()
    with ExitStack() as stack:
        with fencelock.connect(primary.url) as locks, locks.lock("x"):
            pass
        standby = standby_of(primary, stack)
        with fencelock.connect(standby.url.replace("postgresql", scheme, 1)) as locks:
            with pytest.raises(EngineUnavailable, match=r"connect to the primary"):
                locks.lock("x").try_acquire()
        both = f"{scheme}://postgres@{standby.address},{primary.address}/postgres"
        with fencelock.connect(both) as locks, locks.lock("x") as lease:
            assert lease.token


@SCHEMES
def test_failover_to_a_replica_that_lagged(own_postgres: Callable[..., Postgres], scheme: str) -> None:
    """After a failover that lost grants, tokens are above all that were given, also those that the replica never saw."""
    primary = own_postgres()
    with ExitStack() as stack:
        both = f"{scheme}://postgres@{primary.address}"
        with fencelock.connect(f"{both}/postgres") as locks, locks.lock("x"):
            pass
        standby = standby_of(primary, stack)
        locks = stack.enter_context(fencelock.connect(f"{both},{standby.address}/postgres", ttl=6))
        with locks.lock("x"):
            pass
        caught_up(primary, standby)
        cut_off(standby)
        tokens: list[int] = []
        for _ in range(100):  # more than a sequence writes down at a time
            with locks.lock("x") as lease:
                tokens.append(lease.token)
        held = locks.lock("held").acquire()
        primary.kill()
        assert ask(standby, "SELECT pg_promote()") == [(True,)]
        with locks.lock("x", timeout=SOON) as lease:
            assert lease.token > max(*tokens, held.token)
        assert held.lost.wait(SOON)  # nobody has heard of it there
        with pytest.raises(LeaseLost):
            held.check()


async def test_failover_behind_a_pooler(
    own_postgres: Callable[..., Postgres], own_pgbouncer: Callable[..., PgBouncer], clients: Clients
) -> None:
    """A pooler that hides a failover from its clients does not make them give a token twice."""
    primary = own_postgres()
    with ExitStack() as stack:
        pooler = own_pgbouncer(primary, settings={"server_login_retry": "1"})
        locks = clients.connect(pooler.url, ttl=6)
        await take(locks, "x")
        standby = standby_of(primary, stack)
        caught_up(primary, standby)
        cut_off(standby)
        tokens = [await take(locks, "x") for _ in range(100)]
        primary.kill()
        assert ask(standby, "SELECT pg_promote()") == [(True,)]
        pooler.behind = standby
        pooler._prepare()
        signal.pidfd_send_signal(pidfd(stack, pooler.pid), signal.SIGHUP)
        assert await take(locks, "x") > max(tokens)


def pidfd(stack: ExitStack, pid: int) -> int:
    """A descriptor of a process of ours."""
    import os

    descriptor = os.pidfd_open(pid)
    stack.callback(os.close, descriptor)
    return descriptor


async def test_dump_restored_under_its_clients(pg: Postgres, url: str, clients: Clients) -> None:
    """A backup that is restored while clients are connected: their tokens still rise."""
    locks = clients.connect(url)
    await take(locks, "x")
    tool = packages.find("postgres", "pg_dump")
    script = template.run(tool, "--clean", "--schema=fencelock", "-d", pg.url, folder=pg.folder)
    await asyncio.sleep(1.5)
    kill_sessions(pg)
    tokens = [await take(locks, "x") for _ in range(50)]
    await asyncio.sleep(1.1)
    words = ("-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", pg.url, "-f", "-")
    template.run(packages.find("postgres", "psql"), *words, folder=pg.folder, feed=script)
    assert sessions(pg)
    assert await take(locks, "x") > max(tokens)


# ---------------------------------------------------------------------------- networks and stopped processes


async def test_answers_are_lost(pg: Postgres, url: str, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """Granted, and the answer never came: there is one grant in the end, and its release frees the name."""
    between = proxy(pg)
    locks, other = clients.connect(url.replace(pg.address, between.address), ttl=6), clients.connect(url)
    await take(locks, "x")
    between.drop("to_client")
    task = asyncio.ensure_future(locks.lock("x").acquire(timeout=SOON))
    await asyncio.sleep(1.5)
    between.heal()
    lease = await asyncio.wait_for(task, SOON)
    assert [holder.token for holder in (await other.inspect("x")).holders] == [lease.token]
    assert await lease.release() is True
    await wait_until_unclaimed(other, "x")


async def test_stopped_waiter(pg: Postgres, url: str, clients: Clients) -> None:
    """A waiter that is stopped is passed over after its ttl, and does not believe to hold what it was handed."""
    worker = await clients.on(url).worker()
    locks = clients.connect(url)
    lease = await locks.lock("x").acquire()
    async with background(worker.do("lease = await locks.lock('x', ttl=1).acquire(); result = lease.token")) as (task,):
        await waiting(locks, "x")
        worker.stop()
        try:
            await lease.release()
            second = await locks.lock("x", timeout=SOON).acquire()
        finally:
            worker.resume()
        await asyncio.sleep(0.5)
        assert not task.done()
        second.check()
        assert await second.release() is True
        assert await asyncio.wait_for(task, SOON) > second.token


async def test_stopped_while_a_statement_is_prepared(
    pg: Postgres, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped between two requests leaves the server time to answer the second."""
    prepare = PostgresConnection.prepare
    engine: Any = clients.on(pg.url).engine()
    connection: PostgresConnection = await engine._pool.connect()

    async def stopped(
        connection: PostgresConnection, statement: Statement, timeout: float, *, keep: bool = False
    ) -> None:
        await prepare(connection, statement, timeout, keep=keep)
        await connection._runtime.sleep(timeout + 0.1)

    monkeypatch.setattr(PostgresConnection, "prepare", stopped)
    assert await connection.request(Statement("fl_test", "SELECT pg_sleep(0.1), 1"), (), 0.3) == [(b"", b"1")]
    connection.close()


# ---------------------------------------------------------------------------- waking


async def test_exactly_one_is_called(pg: Postgres, clients: Clients) -> None:
    """Of a hundred waiters of five clients a release calls one, once, and makes nobody else ask."""
    holder, *others = [clients.connect(pg.url, ttl=300) for _ in range(6)]
    lease = await holder.lock("x").acquire()
    let_go = asyncio.Event()
    served: list[int] = []

    async def work(locks: LocksView) -> None:
        async with locks.lock("x", timeout=4 * SOON) as mine:
            served.append(mine.token)
            await let_go.wait()

    tasks = [asyncio.ensure_future(work(other)) for other in others for _ in range(20)]
    with connected(pg) as connection:

        async def seated() -> bool:
            ((number,),) = connection.execute(
                "SELECT count(*) FROM fencelock.claim WHERE token IS NULL AND channel <> ''"
            )
            return bool(number == 100)

        await eventually(seated, "all can be called", 4 * SOON)
        await asyncio.sleep(0.5)
        before = connection.execute("SELECT id, channel, expires FROM fencelock.claim WHERE token IS NULL").fetchall()
        for channel in {notify.partition(":")[0] for _, notify, _ in before}:
            connection.execute(f'LISTEN "{channel}"'.encode())
        await lease.release()

        async def one() -> bool:
            return bool(served)

        await eventually(one, "one is served")
        await asyncio.sleep(0.5)
        calls = list(connection.notifies(timeout=1))
        assert [int(call.payload.split(":")[1]) for call in calls] == served
        assert len(served) == 1
        after = connection.execute("SELECT id, channel, expires FROM fencelock.claim WHERE token IS NULL").fetchall()
        assert set(after) < set(before)  # a repeated attempt would have restarted its ttl
        assert len(after) == 99
    let_go.set()
    await asyncio.gather(*tasks)
    assert served == sorted(set(served))
