"""Replays of a finished key return its result at once: they do not wait for each other and never get KeyInProgress."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, KeyInProgress
from fencelock.lockfree.idempotency import IdempotencyKey
from fencelock.lockfree.outbox import Outbox
from fencelock.lockfree.schema import create_tables
from tests.lockfree.databases import Database
from tests.servers.redis import Redis

THREADS, REPLAYS = 8, 20


def finish(connection: Any, key: str) -> None:
    """Do the work of a key; its result is "done"."""
    with IdempotencyKey(connection, key) as run:
        run.result = "done"


def replay(connection: Any, key: str, wait: bool | float = False) -> Any:
    """Return the result of a key that is finished."""
    with IdempotencyKey(connection, key, wait=wait) as run:
        assert run.replayed
    return run.result


@pytest.mark.parametrize("wait", [False, 0.2, True])
def test_replay_does_not_wait_for_a_replay_that_has_not_committed(
    database: Database, key: str, wait: bool | float
) -> None:
    """A replay holds no lock that another one needs, neither inside its block nor until its commit."""
    with database.transaction() as connection:
        finish(connection, key)
    with database.connected() as first, database.connected() as second, ThreadPoolExecutor(1) as pool:
        if database.name == "sqlite":
            second.execute("PRAGMA busy_timeout = 50")
        try:
            with IdempotencyKey(first, key) as run:
                inside = pool.submit(replay, second, key, wait).result(20)
            second.rollback()
            after = pool.submit(replay, second, key, wait).result(20)
        finally:
            first.rollback()
    assert (run.result, inside, after) == ("done", "done", "done")


def test_many_replays_at_once_all_get_the_result(database: Database, key: str) -> None:
    """Under load no replay with wait=False gets KeyInProgress."""
    with database.transaction() as connection:
        finish(connection, key)

    def replays() -> list[Any]:
        with database.connected() as connection:
            if database.name == "sqlite":
                connection.execute("PRAGMA busy_timeout = 50")
            results = []
            for _ in range(REPLAYS):
                results.append(replay(connection, key))
                connection.commit()
            return results

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(replays) for _ in range(THREADS)]
        assert [job.result(60) for job in jobs] == [["done"] * REPLAYS] * THREADS


def test_many_replays_by_locks_at_once_all_get_the_result(redis_node: Redis, key: str) -> None:
    """With a lock client as the store, a replay does not take the lock."""
    with fencelock.connect(redis_node.url) as locks, ThreadPoolExecutor(THREADS) as pool:
        finish(locks, key)
        with locks.lock(f"idempotency:{key}"):
            assert replay(locks, key) == "done"
        jobs = [pool.submit(replay, locks, key) for _ in range(THREADS * REPLAYS)]
        assert [job.result(60) for job in jobs] == ["done"] * THREADS * REPLAYS


# ------------------------------------------------------------------------------------------- SQLite


@contextmanager
def shop(folder: Path, journal: str) -> Iterator[tuple[sqlite3.Connection, sqlite3.Connection]]:
    """Two connections to a new SQLite database; the second one does not wait for locks by itself."""
    path = folder / "shop.db"
    with (
        closing(sqlite3.connect(path)) as first,
        closing(sqlite3.connect(path, timeout=0, check_same_thread=False)) as second,
    ):
        first.execute(f"PRAGMA journal_mode = {journal}")
        create_tables(first)
        yield first, second


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("begin", ["", "BEGIN"])
def test_sqlite_waits_longer_than_the_timeout_of_the_connection(tmp_path: Path, journal: str, begin: str) -> None:
    """`wait=True` waits until the other transaction ends, whatever the connection's own timeout, and restores that."""
    with shop(tmp_path, journal) as (first, second), ThreadPoolExecutor(1) as pool:
        second.execute("PRAGMA busy_timeout = 7")
        if begin:
            second.execute(begin)
        with IdempotencyKey(first, "k") as run:
            waiting = pool.submit(replay, second, "k", True)
            with pytest.raises(TimeoutError):
                waiting.result(0.3)
            run.result = "done"
        first.commit()
        assert waiting.result(60) == "done"
        assert second.execute("PRAGMA busy_timeout").fetchone() == (7,)


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("wait", [True, 5.0])
def test_sqlite_refuses_to_wait_in_a_transaction_that_has_read(
    tmp_path: Path, journal: str, wait: bool | float
) -> None:
    """A transaction that has read and would block another one's commit is refused at once, and the other one commits."""
    with shop(tmp_path, journal) as (first, second):
        second.execute("BEGIN")
        second.execute("SELECT count(*) FROM fencelock_idempotency").fetchall()
        with IdempotencyKey(first, "k") as run:
            run.result = "done"
            with pytest.raises(FencelockError, match=r"has read before .* roll it back") as caught:
                replay(second, "k", wait)
        assert not isinstance(caught.value, KeyInProgress)
        second.rollback()
        first.commit()
        assert replay(second, "k") == "done"


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_sqlite_replays_in_a_transaction_that_the_caller_began(tmp_path: Path, journal: str) -> None:
    """After BEGIN a finished key returns its result while another transaction writes."""
    with shop(tmp_path, journal) as (first, second):
        finish(first, "k")
        first.commit()
        finish(first, "another key")
        second.execute("BEGIN")
        assert replay(second, "k") == "done"
        second.rollback()
        with pytest.raises(KeyInProgress):
            replay(second, "another key")
        second.rollback()
        first.commit()
        assert replay(second, "another key") == "done"


def test_sqlite_can_write_after_a_replay(tmp_path: Path) -> None:
    """A replay leaves no snapshot behind that would refuse a later write of the same transaction."""
    with shop(tmp_path, "WAL") as (first, second):
        finish(first, "k")
        first.commit()
        assert replay(second, "k") == "done"
        finish(first, "another key")
        first.commit()
        finish(second, "a third key")
        second.commit()


# ------------------------------------------------------------------------------------------- databases and schemas


@contextmanager
def elsewhere(database: Database, key: str) -> Iterator[Any]:
    """A connection to the same tables in another database (MariaDB) or schema (PostgreSQL) of the same server."""
    name = f"other_{key}"
    with database.connected() as connection:
        cursor = connection.cursor()
        cursor.execute(f"CREATE {'DATABASE' if database.name == 'mariadb' else 'SCHEMA'} {name}")
        cursor.execute(f"USE {name}" if database.name == "mariadb" else f"SET search_path = {name}")
        create_tables(connection)
        try:
            yield connection
        finally:
            connection.rollback()
            cursor.execute(f"DROP DATABASE {name}" if database.name == "mariadb" else f"DROP SCHEMA {name} CASCADE")
            connection.commit()


SERVERS = [
    pytest.param("postgresql", marks=pytest.mark.engine("postgres")),
    pytest.param("mariadb", marks=pytest.mark.engine("mariadb")),
]


@pytest.mark.parametrize("on", SERVERS)
def test_same_key_in_another_database_or_schema_is_another_key(database: Database, key: str) -> None:
    """A key that is in progress in one database or schema is free in the other."""
    with elsewhere(database, key) as other, database.connected() as here:
        with IdempotencyKey(here, key):
            with IdempotencyKey(other, key, wait=False) as run:
                assert not run.replayed
            with pytest.raises(KeyInProgress), database.connected() as third:
                replay(third, key)
        here.rollback()


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize("on", ["mariadb"])
def test_use_inside_the_block_does_not_leave_the_key_locked(database: Database, key: str) -> None:
    """The block releases the lock that it took, also if the connection uses another database by then."""
    with elsewhere(database, key) as other, database.connected() as here:
        with pytest.raises(ZeroDivisionError), IdempotencyKey(other, key):
            other.cursor().execute(f"USE {database.path().rpartition('/')[2]}")
            raise ZeroDivisionError
        other.rollback()
        here.cursor().execute(f"USE other_{key}")
        with IdempotencyKey(here, key, wait=False) as run:
            assert not run.replayed
        here.rollback()


@pytest.mark.engine("postgres")
@pytest.mark.parametrize("on", ["postgresql"])
def test_same_message_key_in_another_schema_does_not_wait(database: Database, key: str) -> None:
    """Appending to an outbox waits for appends under the same key in the same schema only."""
    with elsewhere(database, key) as other, database.connected() as here:
        Outbox().append(here, key, 1)
        other.cursor().execute("SET lock_timeout = '5s'")
        Outbox().append(other, key, 1)
        here.rollback()
