"""Server settings that administrators change: locks work the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from fencelock import EngineUnavailable, GuaranteeUnavailable
from tests.contract.steps import background, take, waiting
from tests.engines.conftest import Clients
from tests.engines.mysql_server import holder_of, kill, own_database
from tests.servers.mariadb import MariaDB, unpacked
from tests.support.waiting import SOON

HOSTILE = {
    "sql_mode": "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,NO_AUTO_VALUE_ON_ZERO,TRADITIONAL",
    "sql_mode ": "ANSI" if unpacked() else "ORACLE",
    "wait_timeout": 1,
    "interactive_timeout": 1,
    "max_execution_time" if unpacked() else "max_statement_time": 700 if unpacked() else 0.7,
    "autocommit": 0,
    "transaction_isolation" if unpacked() else "tx_isolation": "SERIALIZABLE",
    "character_set_server": "utf32",
    "init_connect": "SET autocommit = 0, sql_mode = 'NO_BACKSLASH_ESCAPES', wait_timeout = 1, sql_safe_updates = 1",
    "time_zone": "-11:30",
    "div_precision_increment": 0,
    "group_concat_max_len": 4,
    "default_storage_engine": "MyISAM",
}


@contextmanager
def set_to(server: MariaDB, name: str, value: object) -> Iterator[None]:
    """Change a setting of the shared server within a block."""
    before = server.query(f"SELECT @@GLOBAL.{name}")
    server.query(f"SET GLOBAL {name} = {value!r}")
    try:
        yield
    finally:
        server.query(f"SET GLOBAL {name} = " + (before if before.replace(".", "").isdigit() else repr(before)))


@pytest.mark.parametrize("name", HOSTILE)
async def test_settings(name: str, mariadb: MariaDB, clients: Clients) -> None:
    """With each setting, an ordinary user can acquire, wait, inspect, renew and release."""
    url = own_database(mariadb)
    database = url.rpartition("/")[2]
    mariadb.query(f"CREATE USER s{database} IDENTIFIED BY 's3cr3t'; GRANT ALL ON {database}.* TO s{database}")
    mariadb.query(f"GRANT PROCESS ON *.* TO s{database}")
    url = url.replace("root@", f"s{database}:s3cr3t@")
    with set_to(mariadb, name, HOSTILE[name]):
        locks, other = clients.connect(url, owner="o_o%"), clients.connect(url, owner="\"it's\\")
        lease = await locks.lock("a_b%\\'\"", ttl=6).acquire()
        async with background(other.lock("a_b%\\'\"", ttl=6).acquire(60)) as (task,):
            await waiting(locks, "a_b%\\'\"")
            await lease.renew()
            seen = await other.inspect("a_b%\\'\"")
            assert (seen.holders[0].owner, seen.waiters[0].owner) == ("o_o%", "\"it's\\")
            assert await lease.release() is True
            got = await task
            assert got.token > lease.token
            assert await got.release() is True


async def test_other_handshake(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """A server that ignores the client's character set and uses statement-based replication works.

    It does not sync its binary log, so a crash could lose a commit: purpose="correctness" is refused.
    """
    more = {} if unpacked() else {"log-bin": "log", "binlog-format": "STATEMENT"}
    server = own_mariadb(
        settings={"skip-character-set-client-handshake": "1", "character-set-server": "cp1251", **more}
    )
    locks = clients.connect(server.url, owner="мы")
    async with locks.lock("имя") as lease:
        (holder,) = (await locks.inspect("имя")).holders
        assert (holder.owner, holder.token) == ("мы", lease.token)
        assert [name async for name in locks.names()] == ["имя"]
    if more:
        with pytest.raises(GuaranteeUnavailable, match="set sync_binlog to 1"):
            locks.lock("имя", purpose="correctness")
        server.query("SET GLOBAL sync_binlog = 1")
        async with clients.connect(server.url).lock("имя", purpose="correctness", timeout=SOON):
            pass


@pytest.mark.parametrize("value", [0, 2])
async def test_correctness_refuses_a_server_that_does_not_flush_commits(
    value: int, mariadb: MariaDB, clients: Clients
) -> None:
    """The first acquire is refused before it changes anything, later locks when they are created; other purposes work."""
    url = own_database(mariadb)
    with set_to(mariadb, "innodb_flush_log_at_trx_commit", value):
        locks = clients.connect(url)
        made = [locks.lock("x", purpose="correctness", reentrant=reentrant) for reentrant in (False, True)]
        for lock in made:
            with pytest.raises(GuaranteeUnavailable, match=f"innodb_flush_log_at_trx_commit is {value}") as caught:
                await lock.acquire(SOON)
            assert caught.value.name == "x"
        assert holder_of(mariadb, url, "x") is None
        with pytest.raises(GuaranteeUnavailable, match="set it to 1"):
            locks.lock("x", purpose="correctness")
        assert await take(locks, "x")
    async with clients.connect(url).lock("x", purpose="correctness", timeout=SOON) as lease:
        lease.check()


async def test_read_only_sessions(mariadb: MariaDB, clients: Clients) -> None:
    """If sessions are read-only by default, an acquire is refused with the server's message."""
    url = own_database(mariadb)
    with set_to(mariadb, "transaction_read_only" if unpacked() else "tx_read_only", 1):
        with pytest.raises(EngineUnavailable, match="READ ONLY transaction"):
            await take(clients.connect(url), "x")


async def test_memory_tables_disabled(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """If MEMORY tables are not allowed, all tables are InnoDB; no token repeats after a crash."""
    setting = {"disabled-storage-engines": "MEMORY,MyISAM"} if unpacked() else {"enforce-storage-engine": "InnoDB"}
    server = own_mariadb(settings=setting)
    last = 0
    for _ in range(2):
        for _ in range(3):
            token = await take(clients.connect(server.url), "x")
            assert token > last
            last = token
        engines = server.query("SELECT DISTINCT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'fencelock'")
        assert engines == "InnoDB"
        server.kill()
        server.start()


async def test_rows_of_killed_holders(mariadb: MariaDB, clients: Clients) -> None:
    """The next client that connects deletes the rows of killed holders, and no others."""
    url = own_database(mariadb)
    table = f"{url.rpartition('/')[2]}.fencelock_holders"
    locks = clients.connect(url)
    kept = await locks.lock("kept", ttl=30).acquire()
    for _ in range(3):
        lease = await locks.lock("x", ttl=9).acquire()
        kill(mariadb, holder_of(mariadb, url, "x"))
        assert await lease.lost.wait(SOON)
    assert mariadb.query(f"SELECT COUNT(*) FROM {table} WHERE connection > 0") == "4"
    assert await take(clients.connect(url), "x")
    assert mariadb.query(f"SELECT token FROM {table} WHERE connection > 0") == str(kept.token)
    assert await kept.release() is True


async def test_table_full_of_stale_rows(own_mariadb: Callable[..., MariaDB], clients: Clients) -> None:
    """An acquire that finds the table full deletes the rows of ended sessions and succeeds."""
    server = own_mariadb(settings={"max-heap-table-size": "16384"})
    locks = clients.connect(server.url)
    await take(locks, "x")
    lines = ", ".join(f"({number}, 'k{number}', '', '', '', '', 0)" for number in range(900000, 900400))
    with pytest.raises(RuntimeError, match="is full"):
        server.query(
            f"INSERT INTO fencelock_holders (connection, lock_key, space, name, owner, value, ttl) VALUES {lines}"
        )
    async with locks.lock("x", timeout=SOON):
        assert server.query("SELECT COUNT(*) FROM fencelock_holders") == "2"
