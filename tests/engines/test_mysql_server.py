"""Servers that crash, are empty, full, read-only, hung, or members of a cluster, and logins that fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from fencelock import EngineUnavailable, InvalidURL
from fencelock.core.clock import NO_DEADLINE
from fencelock.engines.mysql.pool import MySQLPool
from fencelock.engines.mysql.url import MySQLUrl, parse
from fencelock.model import Claim, Grant, LossReason, Waiting
from fencelock.runtime.blocking import BlockingRuntime
from tests.contract.runtimes import LeaseView
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.mysql_server import own_database
from tests.servers.mariadb import MariaDB, unpacked
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON


async def test_server_crash_and_restart(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """After a crash and restart, holders learn of their loss, waiters get the lock, and tokens rise."""
    server = own_mariadb()
    locks, other = clients.connect(server.url), clients.connect(server.url)
    lease = await locks.lock("x", ttl=30).acquire()  # long enough for a slow restart of the server
    async with background(other.lock("x", ttl=60).acquire(60)) as (task,):
        await waiting(locks, "x")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        got = await task
        assert got.token > lease.token
        assert await lease.lost.wait(SOON)
        assert lease.reason is LossReason.GONE
        await got.release()
    assert await take(locks, "x") > got.token


async def test_tokens_after_a_crash(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """No token repeats after a crash, even if the clock is behind the tokens: they are reserved on disk."""
    server = own_mariadb()
    last = 0
    for beyond in (8_000_000_000_000_000, 8_100_000_000_000_000):  # far beyond the clock
        locks = clients.connect(server.url)
        await take(locks, "x")
        server.query(f"INSERT INTO fencelock_holders VALUES ({beyond}, 99999999, '', '', '', '', '', 0, NOW(6))")
        for _ in range(5):
            token = await take(locks, "x")
            assert token > max(last, beyond)
            last = token
        server.kill()
        server.start()
        assert await take(clients.connect(server.url), "x") > last


async def test_table_that_was_emptied(mariadb: MariaDB, clients: Clients) -> None:
    """Emptied or dropped tables do not make tokens repeat: the engine refuses, or starts at the clock."""
    url = own_database(mariadb)
    database = url.rpartition("/")[2]
    locks = clients.connect(url)
    last = await take(locks, "x")
    mariadb.query(f"TRUNCATE TABLE {database}.fencelock_holders")
    with pytest.raises(EngineUnavailable, match="emptied fencelock_holders"):
        await take(locks, "x")
    assert await take(clients.connect(url), "x") > last
    mariadb.query(f"DROP TABLE {database}.fencelock_holders; DROP TABLE {database}.fencelock_layout")
    assert await take(clients.connect(url), "x") > last


async def test_promoted_replica(mariadb: MariaDB, clients: Clients) -> None:
    """A promoted replica with old data continues above the clock and above the reserved tokens."""
    url = own_database(mariadb)
    table = f"{url.rpartition('/')[2]}.fencelock_holders"
    locks = clients.connect(url)
    await take(locks, "x")
    ahead = 8_000_000_000_000_000  # far beyond the clock
    mariadb.query(f"INSERT INTO {table} VALUES ({ahead}, 99999999, '', '', '', '', '', 0, NOW(6))")
    last = await take(locks, "x")
    mariadb.query(f"UPDATE {table} SET owner = 'elsewhere' WHERE connection = 0")
    mariadb.query(f"DELETE FROM {table} WHERE connection <> 0; ALTER TABLE {table} AUTO_INCREMENT = 7")
    assert await take(clients.connect(url), "x") > last > ahead


async def test_first_use_by_many(mariadb: MariaDB, clients: Clients) -> None:
    """Several clients can create the tables at the same moment."""
    url = own_database(mariadb)
    tokens = await asyncio.gather(*(take(clients.connect(url), "x") for _ in range(8)))
    assert len(set(tokens)) == 8


async def test_connects_between_grant_and_reserve(mariadb: MariaDB, clients: Clients) -> None:
    """A client that connects between a grant and the check of its token does not make the check fail."""
    url = own_database(mariadb)
    engine: Any = clients.on(url).engine()
    pool, reserve = engine._pool, engine._pool.reserve

    async def late(*args: Any) -> None:
        await take(clients.connect(url), "y")
        pool.put(await pool.connect(30))
        await reserve(*args)

    pool.reserve = late
    grant = await engine.attempt(Claim("x", 30), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(grant, Grant)
    assert await engine.release(grant) is True


async def test_other_layout(mariadb: MariaDB, clients: Clients) -> None:
    """The error for tables of another release names both layouts."""
    url = own_database(mariadb)
    await take(clients.connect(url), "x")
    mariadb.query(f"UPDATE {url.rpartition('/')[2]}.fencelock_layout SET version = 7")
    with pytest.raises(EngineUnavailable, match=r"layout 7, this one has 3"):
        await take(clients.connect(url), "x")


async def test_read_only(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """A read-only server is refused with a hint; leases that exist there can be renewed and released."""
    server = own_mariadb()
    server.query("CREATE USER app IDENTIFIED BY 's3cr3t'; GRANT ALL ON fencelock.* TO app")
    url = server.url.replace("root@", "app:s3cr3t@")
    locks = clients.connect(url)
    lease = await locks.lock("x", ttl=30).acquire()
    await take(locks, "y")
    server.query("SET GLOBAL read_only = 1")
    with pytest.raises(EngineUnavailable, match=r"is read-only.*: connect to the server that takes writes"):
        await take(locks, "y")
    with pytest.raises(EngineUnavailable, match="is read-only"):
        await take(clients.connect(url), "y")
    await lease.renew()
    assert await lease.release() is True
    server.query("SET GLOBAL read_only = 0")
    assert await take(locks, "x") > lease.token


async def test_login_and_privilege_errors(mariadb: MariaDB, clients: Clients) -> None:
    """Errors for a wrong password, a missing database and missing privileges quote the server, never the password."""
    url = own_database(mariadb)
    database = url.rpartition("/")[2]
    mariadb.query(f"CREATE USER r{database} IDENTIFIED BY 's3cr3t'; GRANT SELECT ON {database}.* TO r{database}")
    user = url.replace("root@", f"r{database}:s3cr3t@")
    for wrong, words in {
        user.replace("s3cr3t", "wr0ng"): "Access denied for user",
        user.replace(f"/{database}", "/nosuchdb"): "nosuchdb",
        user: "CREATE command denied.*fencelock schema --apply",
    }.items():
        with pytest.raises(EngineUnavailable, match=words) as caught:
            await take(clients.connect(wrong), "x")
        shown = f"{caught.value!r} {caught.value.__cause__!r} {clients.connect(wrong)!r}"
        assert "wr0ng" not in shown
        assert "s3cr3t" not in shown
    mariadb.query(f"GRANT ALL ON {database}.* TO r{database}")
    assert await take(clients.connect(user), "x")


async def test_force_release_of_another_user(mariadb: MariaDB, clients: Clients) -> None:
    """The error for a missing privilege to kill another user's session names the privilege."""
    url = own_database(mariadb)
    database = url.rpartition("/")[2]
    mariadb.query(f"CREATE USER f{database} IDENTIFIED BY 's3cr3t'; GRANT ALL ON {database}.* TO f{database}")
    root, app = clients.connect(url), clients.connect(url.replace("root@", f"f{database}:s3cr3t@"))
    async with root.lock("x", ttl=30) as lease:
        with pytest.raises(EngineUnavailable, match="CONNECTION ADMIN"):
            await app.force_release("x", reason="test")
        lease.check()
        right = "CONNECTION_ADMIN, SYSTEM_USER" if unpacked() else "CONNECTION ADMIN"
        mariadb.query(f"GRANT {right} ON *.* TO f{database}")
        await lease.renew()
    again = clients.connect(url.replace("root@", f"f{database}:s3cr3t@"))
    lease = await root.lock("x", ttl=30).acquire()
    assert await again.force_release("x", reason="test") == 1
    assert await take(again, "x") > lease.token
    assert await lease.release() is False


async def test_too_many_connections(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """The error for too many connections names the setting to raise; after releases the client works again."""
    server = own_mariadb()
    locks = clients.connect(server.url)
    await take(locks, "x")
    server.query("SET GLOBAL max_connections = 10")
    leases: list[LeaseView] = []
    with pytest.raises(EngineUnavailable, match=r"Too many connections.*raise max_connections"):
        while True:
            leases.append(await locks.lock(f"n{len(leases)}").acquire())
    for lease in leases:
        assert await lease.release() is True
    assert await take(locks, "x")


async def test_full_table_of_holders(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """If the table of holders is full, an acquire is refused; nothing is held without a row."""
    server = own_mariadb(settings={"max-heap-table-size": "16384"})
    locks = clients.connect(server.url)
    leases: list[LeaseView] = []
    with pytest.raises(EngineUnavailable, match=r"is full.*max_heap_table_size"):
        while True:
            leases.append(await locks.lock(f"n{len(leases)}").acquire())
    refused = f"n{len(leases)}"
    await leases.pop().release()
    async with locks.lock(refused, timeout=SOON):
        pass
    for lease in leases:
        await lease.release()


@pytest.mark.engine("mariadb", own=True)
async def test_galera(clients: Clients) -> None:
    """A member of a Galera cluster is refused before any table is created."""
    with MariaDB(settings={"wsrep-on": "ON", "wsrep-cluster-address": "gcomm://", "binlog-format": "ROW"}) as server:
        with pytest.raises(EngineUnavailable, match="Galera"):
            await take(clients.connect(server.url), "x")
        assert server.query("SHOW TABLES") == ""


def test_groups_with_several_primaries() -> None:
    """A group with several primaries is refused, one with a single primary is not: GET_LOCK is local to a member."""
    pool = MySQLPool(BlockingRuntime(), MySQLUrl("h", 1, "u", "p", "d"))
    pool._refuse_clusters({b"group_replication_group_name": b"", b"group_replication_single_primary_mode": b"OFF"})
    pool._refuse_clusters({b"group_replication_group_name": b"g", b"group_replication_single_primary_mode": b"ON"})
    with pytest.raises(EngineUnavailable, match="several primaries"):
        pool._refuse_clusters({b"group_replication_group_name": b"g", b"group_replication_single_primary_mode": b"OFF"})


async def test_warning_about_unsynced_commits(
    own_mariadb: Callable[..., MariaDB], clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """The client warns once about a server that does not sync commits."""
    server = own_mariadb(settings={"innodb-flush-log-at-trx-commit": "2"})
    locks = clients.connect(server.url)
    with caplog.at_level(logging.WARNING, "fencelock"):
        await asyncio.gather(*(take(locks, f"n{number}") for number in range(4)))
    assert len([record for record in caplog.records if "innodb_flush_log_at_trx_commit" in record.getMessage()]) == 1


async def test_lost_reply(mariadb: MariaDB, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """An attempt whose reply was lost is abandoned over another connection; others need not wait for its ttl."""
    direct = own_database(mariadb)
    way = proxy(mariadb)
    near = way.url.removesuffix("/fencelock") + "/" + direct.rpartition("/")[2]
    engine, other = clients.on(near).engine(), clients.on(direct).engine()
    warm = await engine.attempt(Claim("warm", 3), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(warm, Grant)
    await engine.release(warm)
    claim = Claim("x", 3)
    way.drop("to_client")
    with pytest.raises(EngineUnavailable):
        await engine.attempt(claim, enqueue=True, deadline=NO_DEADLINE)
    assert isinstance(await other.attempt(Claim("x", 60), enqueue=False, deadline=NO_DEADLINE), Waiting), (
        "it was granted without a reply"
    )
    way.heal()
    await engine.abandon(claim)
    got = await other.attempt(Claim("x", 60), enqueue=False, deadline=NO_DEADLINE)
    assert isinstance(got, Grant)
    await other.release(got)


async def test_proxy_with_sessions_of_its_own(mariadb: MariaDB, clients: Clients) -> None:
    """A proxy that sends its own greeting (and may share sessions between clients) is refused."""

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        there_reader, there_writer = await asyncio.open_connection(mariadb.host, mariadb.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        greeting = await there_reader.read(65536)
        at = greeting.index(b"\0", 5) + 1
        writer.write(greeting[:at] + b"\1\2\3\4" + greeting[at + 4 :])
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
        await asyncio.gather(writer.wait_closed(), there_writer.wait_closed())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        url = own_database(mariadb).replace(mariadb.address, f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        locks = clients.connect(url)
        with pytest.raises(EngineUnavailable, match=r"is a proxy: it greets as session 67305985"):
            await take(locks, "x")
        await locks.close()
        await asyncio.wait_for(asyncio.gather(*(task for task in serving if task is not None)), SOON)


@pytest.mark.parametrize("url", ["mysql://h", "mysql://h/", "mysql://h/a/b", "mysql://u:p@h/d?x=1", "mysql:///d"])
def test_invalid_urls(url: str) -> None:
    """A URL without a host or a database, or with an unknown option, is refused."""
    with pytest.raises(InvalidURL):
        parse(url)


def test_url() -> None:
    """All parts of a URL are parsed and unescaped; the repr hides the password."""
    url = parse("mariadb://us%40er:p%2Fw@[::1]:3307/app?connect_timeout=2&ssl-mode=required")
    assert url[:5] == ("::1", 3307, "us@er", "p/w", "app")
    assert url.seconds == 2
    assert url.tls is not None
    assert "p/w" not in repr(url)
    assert parse("mysql://u@h/d").port == 3306
