"""Optimistic versions when the change itself fails, the row has no version, or the connection is gone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, StaleToken, VersionConflict
from fencelock.fences import TokenPair
from fencelock.lockfree.optimistic import RecordKey, SqlRow
from tests.lockfree.databases import Database


@pytest.fixture
def account() -> Iterator[SqlRow]:
    """A row with a version."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE account (id INTEGER, balance INTEGER, version INTEGER)")
    database.execute("INSERT INTO account VALUES (7, 100, 1), (8, 100, NULL)")
    database.commit()
    yield SqlRow(database, "account", {"id": 7}, ["balance"])
    database.close()


@pytest.mark.parametrize(
    "error", [KeyError(1213), LookupError(1205), OSError("the other database is locked")], ids=repr
)
def test_error_of_the_users_function(account: SqlRow, error: Exception) -> None:
    """An error of the user's function is raised at once, also if it looks like a collision in the database."""
    calls = 0

    def change(row: Any) -> Any:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)) as caught:
        account.update(change, timeout=2)
    assert caught.value is error
    assert calls == 1
    assert account.read().value == {"balance": 100}


def test_no_version(account: SqlRow) -> None:
    """A row whose version is NULL is refused at once."""
    row = SqlRow(account._connection, "account", {"id": 8}, ["balance"])
    for work in (row.read, lambda: row.update(lambda value: value)):
        with pytest.raises(FencelockError, match="is NULL"):
            work()


def test_attempts(account: SqlRow) -> None:
    """At least one attempt is made, also with a timeout of 0; a number of attempts below 1 is refused."""

    def raced(row: Any) -> Any:
        account._connection.execute("UPDATE account SET version = version + 1 WHERE id = 7")
        return row

    with pytest.raises(VersionConflict, match="each of 1 attempts"):
        account.update(raced, attempts=1)
    with pytest.raises(VersionConflict, match="each of 1 attempts"):
        account.update(raced, timeout=0)
    for attempts in (0, -1):
        with pytest.raises(ValueError, match="attempts"):
            account.update(raced, attempts=attempts)


def test_row_deleted_meanwhile(database: Database, key: str) -> None:
    """A row that is deleted between read and write is reported, and not created again."""
    database.ask("CREATE TABLE IF NOT EXISTS piece (name varchar(64), n integer, version integer)")
    database.ask("INSERT INTO piece VALUES (?, 1, 1)", key)
    with database.connected() as connection:
        row = SqlRow(connection, "piece", {"name": key}, ["n"])

        def change(value: Any) -> Any:
            if database.name != "sqlite":
                database.ask("DELETE FROM piece WHERE name = ?", key)
            else:
                connection.execute("DELETE FROM piece WHERE name = ?", (key,))
                connection.commit()
            return {"n": 2}

        with pytest.raises(FencelockError, match="is 0 rows"):
            row.update(change)


def test_first_error_is_raised(database: Database) -> None:
    """If the connection is lost, the first error is raised, and not the error of the rollback."""
    error = RuntimeError("mine")
    database.ask("CREATE TABLE IF NOT EXISTS piece (name varchar(64), n integer, version integer)")
    database.ask("INSERT INTO piece VALUES ('lost', 1, 1)")
    connection = database.connect()
    row = SqlRow(connection, "piece", {"name": "lost"}, ["n"])

    def change(value: Any) -> Any:
        connection.close()
        raise error

    try:
        with pytest.raises(RuntimeError, match="mine"):
            row.update(change)
    finally:
        database.ask("DELETE FROM piece WHERE name = 'lost'")


def test_record_under_an_old_lease() -> None:
    """An earlier holder of the lock, or a writer without one, gets StaleToken at once, without retries."""
    calls = 0

    def plus_one(value: bytes | None) -> bytes:
        nonlocal calls
        calls += 1
        return b"%d" % (int(value or 0) + 1)

    with fencelock.connect("memory://old-lease") as locks:
        with locks.lock("counter") as lease:
            old = TokenPair(lease.token, lease.id)  # as from a holder that is stopped after its last look at the clock
        with locks.lock("counter") as new:
            assert RecordKey(locks, "counter", lease=old).update(plus_one) == b"1"
            assert RecordKey(locks, "counter", lease=new).update(plus_one) == b"2"
            for stale in (old, None):
                with pytest.raises(StaleToken) as caught:
                    RecordKey(locks, "counter", lease=stale).update(plus_one)
                assert caught.value.seen == new.token
            assert RecordKey(locks, "counter").read().value == b"2"
    assert calls == 4
