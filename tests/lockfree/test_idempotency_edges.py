"""Idempotency keys between block and commit, with savepoints, with methods, and with unusual payloads."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from decimal import Decimal
from typing import Any

import pytest

from fencelock import FencelockError, InvalidName, KeyInProgress, KeyReused
from fencelock.lockfree.idempotency import IdempotencyKey, fingerprint, idempotent
from fencelock.lockfree.outbox import Outbox
from fencelock.lockfree.schema import create_tables
from tests.lockfree.apis import api_of
from tests.lockfree.databases import KINDS, Database
from tests.support.processes import Child

COMMITS = """
import json
from fencelock.lockfree.idempotency import IdempotencyKey
with IdempotencyKey(connection, args[0]) as run:
    connection.cursor().execute(f"INSERT INTO charge VALUES ('{args[0]}', 10)")
    connection.commit()
    print(json.dumps("committed"), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("wait", [False, 0.2])
def test_key_in_progress_before_the_first_commit(database: Database, key: str, wait: float | bool) -> None:
    """Between the end of the first block and its commit, a run that does not wait gets KeyInProgress, too."""
    with database.connected() as connection, database.transaction() as impatient, ThreadPoolExecutor(1) as pool:
        if database.name == "sqlite":
            impatient.execute("PRAGMA busy_timeout = 50")
        with IdempotencyKey(connection, key) as run:
            run.result = "mine"

        def ask() -> Any:
            with IdempotencyKey(impatient, key, wait=wait) as second:
                return second.result

        asked = pool.submit(ask)
        try:
            with pytest.raises(KeyInProgress):
                asked.result(20)
        finally:
            connection.commit()
        assert ask() == "mine"


@pytest.mark.parametrize("how", ["commit", "rollback", "commit and begin again"])
async def test_transaction_ended_inside_the_block(database: Database, on: str, kind: str, key: str, how: str) -> None:
    """A transaction that ends inside the block is an error at its end, also if another one was begun."""
    make: Callable[[Database], AbstractAsyncContextManager[Any]] = KINDS[on, kind]
    async with make(database) as connection:
        api = api_of(connection)
        sql = api.sql
        await sql.begin()
        with pytest.raises(FencelockError, match="was ended inside the block") as caught:
            async with api.run(connection, key) as run:
                await sql.execute("INSERT INTO charge VALUES (:key, 10)", {"key": key})
                await (sql.rollback() if how == "rollback" else sql.commit())
                if how == "commit and begin again":
                    await sql.begin()
                    await sql.execute("INSERT INTO charge VALUES (:key, 10)", {"key": key})
                run.result = 1
        assert caught.value.name == key
        if not await sql.is_autocommit():  # asyncpg is, after the commit
            await sql.rollback()
    assert database.charges(key) == (how != "rollback")


def test_savepoints_inside(database: Database, key: str) -> None:
    """Savepoints of the caller around and inside the block do not count as the end of the transaction."""
    with database.transaction() as connection:
        cursor = connection.cursor()
        database.charge(connection, key)
        cursor.execute("SAVEPOINT around")
        with IdempotencyKey(connection, key) as run:
            cursor.execute("SAVEPOINT inside")
            database.charge(connection, key)
            cursor.execute("ROLLBACK TO SAVEPOINT inside")
            cursor.execute("RELEASE SAVEPOINT inside")
            run.result = 1
            with IdempotencyKey(connection, key + " inner") as inner:
                inner.result = 2
        cursor.execute("RELEASE SAVEPOINT around")
    with database.transaction() as connection:
        with IdempotencyKey(connection, key) as run, IdempotencyKey(connection, key + " inner") as inner:
            assert (run.result, inner.result) == (1, 2)
    assert database.charges(key) == 1


def test_same_key_inside(database: Database, key: str) -> None:
    """A key that is used again inside its own block is refused before its work is done twice."""
    with database.connected() as connection:
        with pytest.raises(FencelockError, match="or this is inside that block"):
            with IdempotencyKey(connection, key):
                with IdempotencyKey(connection, key):
                    pytest.fail("twice")
        connection.rollback()
        with IdempotencyKey(connection, key) as run:
            assert not run.replayed


@pytest.mark.parametrize("wait", [True, False])
def test_killed_after_a_commit_inside(database: Database, key: str, wait: bool, child: Callable[..., Child]) -> None:
    """After a commit inside the block and a crash, the next run raises an error, and does not repeat the work."""
    other = child(database, COMMITS, key)
    assert other.read_json() == "committed"
    for dead in (False, True):
        if dead:
            other.kill()
        with database.connected() as connection, pytest.raises(FencelockError, match="was begun and has no result"):
            with IdempotencyKey(connection, key, wait=wait if dead else False):
                pytest.fail("twice")
    assert database.charges(key) == 1
    database.ask(
        "DELETE FROM fencelock_idempotency WHERE name = ?", key.encode() if database.name == "mariadb" else key
    )
    with database.connected() as connection, IdempotencyKey(connection, key) as run:
        assert not run.replayed


def test_committed_after_an_error(database: Database, key: str) -> None:
    """A caller that catches the error of its block and commits leaves no claim: the next run does the work."""
    for _ in range(2):
        with database.transaction() as connection:
            with suppress(ZeroDivisionError), IdempotencyKey(connection, key) as run:
                assert not run.replayed
                raise ZeroDivisionError
            database.charge(connection, key)
    assert database.charges(key) == 2
    with database.connected() as connection:
        with suppress(ZeroDivisionError), IdempotencyKey(connection, key) as run:
            connection.commit()
            raise ZeroDivisionError
        connection.commit()
    with database.connected() as connection, pytest.raises(FencelockError, match="was begun and has no result"):
        with IdempotencyKey(connection, key):
            pytest.fail("the block has begun, although the work may be half done")


class Till:
    """Something with methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.charged: list[int] = []

    @idempotent("pay:{self.name}:{order}")
    def pay(self, connection: Any, order: int, amount: int) -> int:
        """Charge once."""
        self.charged.append(amount)
        return len(self.charged)

    @classmethod
    @idempotent("count:{order}")
    def count(cls, connection: Any, order: int) -> str:
        """Return the name of the shop."""
        return cls.__name__


def test_methods() -> None:
    """The object of a method is not part of the payload; the key can distinguish objects."""
    database = sqlite3.connect(":memory:")
    create_tables(database)
    one, other = Till("one"), Till("other")
    assert [one.pay(database, 42, 10), one.pay(database, 42, amount=10), other.pay(database, 42, 10)] == [1, 1, 1]
    assert (one.charged, other.charged) == ([10], [10])
    assert (Till.count(database, 1), one.count(database, 1)) == ("Till", "Till")
    database.close()


class Shop:
    """A service whose arguments JSON cannot carry."""

    @idempotent("shop:{order}", payload=lambda self, connection, order, amount, mailer=None: [order, str(amount)])
    def pay(self, connection: Any, order: int, amount: Decimal, mailer: Any = None) -> list[str]:
        """Charge once."""
        return [str(amount)]

    @idempotent("plain:{order}")
    def plain(self, connection: Any, order: int, amount: Decimal) -> None:
        """Use the arguments as the payload."""


def test_payload_of_a_decorated_function() -> None:
    """The function `payload=` makes the payload from the arguments; without it, the error says how to pass one."""
    database = sqlite3.connect(":memory:")
    create_tables(database)
    shop = Shop()
    assert [shop.pay(database, 7, Decimal("1.5"), mailer) for mailer in (None, object())] == [["1.5"], ["1.5"]]
    with pytest.raises(KeyReused):
        shop.pay(database, 7, Decimal("1.6"))
    with pytest.raises(TypeError, match=r"'plain:7' is the arguments of Shop\.plain, and .*JSON.* pass payload=lambda"):
        shop.plain(database, 7, Decimal("1.5"))
    database.close()


def test_result_goes_through_json() -> None:
    """After the block the first run has exactly the result that a replay gets."""
    database = sqlite3.connect(":memory:")
    create_tables(database)
    for repeated in (False, True):
        with database, IdempotencyKey(database, "k") as run:
            if not run.replayed:
                run.result = (1, {1: 2})
                assert run.result == (1, {1: 2})
        assert (run.replayed, run.result) == (repeated, [1, {"1": 2}])
    database.close()


@pytest.mark.parametrize("result", [Decimal(1), object(), float("nan"), {(1, 2): 3}])
def test_result_that_json_cannot_represent(result: Any) -> None:
    """The error for a result that JSON cannot represent names the key, and nothing is stored."""
    database = sqlite3.connect(":memory:")
    create_tables(database)

    @idempotent("k")
    def give(connection: Any) -> Any:
        return result

    with pytest.raises(TypeError, match=r"the result of 'k' cannot be written as JSON: .*; it is "), database:
        give(database)
    with pytest.raises(TypeError, match=r"the payload of a message of 'a' cannot be written as JSON"), database:
        Outbox().append(database, "a", result)
    assert database.execute("SELECT count(*) FROM fencelock_idempotency").fetchone() == (0,)
    database.close()


def test_names_that_are_too_long() -> None:
    """A key or an outbox's name that is too long raises InvalidName."""
    with pytest.raises(InvalidName, match="1000 bytes"):
        IdempotencyKey(None, "k" * 1001)
    with pytest.raises(InvalidName, match="255 bytes"):
        Outbox("o" * 256)


def test_fingerprints() -> None:
    """Every JSON value has a fingerprint, also with a lone surrogate; different values have different fingerprints."""
    payloads: list[Any] = [None, "", b"", "null", b"null", "\ud800", "\ud801", 1, 1.0, True, "1", [], {}, [1], {"1": 1}]
    assert len({fingerprint(payload) for payload in payloads}) == len(payloads)
    assert fingerprint({"a": [1.5, "é"], "b": None}) == fingerprint({"b": None, "a": (1.5, "é")})
