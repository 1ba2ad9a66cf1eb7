"""Idempotency keys in the caller's own transaction, on every database and every kind of connection."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from fencelock import FencelockError, InvalidType, KeyInProgress, KeyReused
from fencelock.aio.lockfree import idempotency as aio_idempotency
from fencelock.lockfree.idempotency import IdempotencyKey, idempotent, prune
from tests.lockfree.apis import api_of, resolve
from tests.lockfree.databases import KINDS, Database
from tests.support.processes import Child

Children = Callable[..., Child]

CHARGE = """
import json
from fencelock.lockfree.idempotency import IdempotencyKey
key, stop = args
with IdempotencyKey(connection, key, payload={"amount": 10}) as run:
    if not run.replayed:
        connection.cursor().execute(f"INSERT INTO charge VALUES ('{key}', 10)")
        run.result = {"charged": 10, "by": __import__("os").getpid()}
        if stop == "inside":
            print(json.dumps("inside"), flush=True)
            sys.stdin.readline()
if stop == "before commit":
    print(json.dumps("before commit"), flush=True)
    sys.stdin.readline()
connection.commit()
print(json.dumps([run.replayed, run.result]), flush=True)
"""


def pay(database: Database, key: str, amount: int = 10, **options: Any) -> tuple[bool, Any]:
    """Do the work of a key once; return whether it was a replay, and the result."""
    with database.transaction() as connection:
        with IdempotencyKey(connection, key, payload={"amount": amount}, **options) as run:
            if not run.replayed:
                database.charge(connection, key, amount)
                run.result = {"charged": amount}
    return run.replayed, run.result


async def test_every_kind_of_connection(database: Database, on: str, kind: str, key: str) -> None:
    """On every kind of connection the first run does the work, a replay gets its result, and another payload is refused."""
    make: Callable[[Database], AbstractAsyncContextManager[Any]] = KINDS[on, kind]
    async with make(database) as connection:
        api = api_of(connection)
        for replayed in (False, True):
            await api.sql.begin()
            async with api.run(connection, key, payload={"n": 1}) as run:
                if not run.replayed:
                    await api.sql.execute("INSERT INTO charge VALUES (:key, 10)", {"key": key})
                    run.result = {"é": [1, None]}
            await api.sql.commit()
            assert (run.replayed, run.result) == (replayed, {"é": [1, None]})
        await api.sql.begin()
        with pytest.raises(KeyReused, match="another payload"):
            async with api.run(connection, key, payload={"n": 2}):
                pass
        await api.sql.rollback()
        await api.sql.begin()
        assert await resolve(api.idempotency.prune(connection)) == 0
        await api.sql.rollback()
    assert database.charges(key) == 1


@pytest.mark.parametrize("on", ["sqlite"])
async def test_the_other_half_refuses_the_connection(database: Database, on: str, key: str) -> None:
    """A connection of asyncio in the blocking API, and the reverse, is an error that names the other module."""
    async with KINDS[on, "aiosqlite"](database) as connection:
        with pytest.raises(InvalidType, match=r"use fencelock\.aio\.lockfree"):
            with IdempotencyKey(connection, key):
                pass
    with database.connected() as connection:
        with pytest.raises(InvalidType, match=r"would block the event loop: use fencelock\.lockfree"):
            async with aio_idempotency.IdempotencyKey(connection, key):
                pass
    with pytest.raises(TypeError, match="a connection or a cursor is needed"):
        with IdempotencyKey(object(), key):
            pass


def test_rolled_back(database: Database, key: str) -> None:
    """An error in the block and a rollback leave nothing: the next run does the work, also with another payload."""
    with pytest.raises(ZeroDivisionError), database.transaction() as connection:
        with IdempotencyKey(connection, key, payload="first"):
            database.charge(connection, key)
            raise ZeroDivisionError
    assert database.charges(key) == 0
    assert pay(database, key) == (False, {"charged": 10})
    assert pay(database, key) == (True, {"charged": 10})


@pytest.mark.parametrize("stop", ["inside", "before commit"])
def test_killed(database: Database, key: str, child: Children, stop: str) -> None:
    """Killed between claim and commit: neither write nor result is stored, and a waiting run does the work."""
    other = child(database, CHARGE, key, stop)
    assert other.read_json() == stop
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pay, database, key)
        other.kill()
        assert waiting.result(60) == (False, {"charged": 10})
    assert database.charges(key) == 1


def test_many_processes_at_once(database: Database, key: str, child: Children) -> None:
    """Of several processes with one key, one does the work, and all have its result."""
    said = [made.read_json() for made in [child(database, CHARGE, key, "") for _ in range(3)]]
    assert sorted(repeated for repeated, _ in said) == [False, True, True]
    assert len({result["by"] for _, result in said}) == 1
    assert database.charges(key) == 1


def test_first_run_fails_while_others_wait(database: Database, key: str) -> None:
    """When the first run rolls back, one of the waiting runs does the work, and none fails with a deadlock."""
    with database.connected() as connection, ThreadPoolExecutor(4) as pool:
        with IdempotencyKey(connection, key, payload={"amount": 10}):
            waiting = [pool.submit(pay, database, key) for _ in range(4)]
        connection.rollback()
        assert sorted(one.result(60)[0] for one in waiting) == [False, True, True, True]
    assert database.charges(key) == 1


@pytest.mark.parametrize("wait", [False, 0.2])
def test_key_in_progress_instead_of_waiting(database: Database, key: str, wait: float | bool) -> None:
    """A run that does not wait gets KeyInProgress in time, and its transaction is still usable."""
    with database.connected() as connection, database.transaction() as impatient:
        if database.name == "sqlite":
            impatient.execute("PRAGMA busy_timeout = 50")
        with IdempotencyKey(connection, key):
            with pytest.raises(KeyInProgress, match="another run"):
                with IdempotencyKey(impatient, key, wait=wait):
                    pytest.fail("both are at it")
            if database.name != "sqlite":  # which has one writer at a time, whatever the key
                with IdempotencyKey(impatient, key + " other", wait=wait) as run:
                    assert not run.replayed
        connection.rollback()
        with IdempotencyKey(impatient, key, wait=wait) as run:
            assert not run.replayed
        if database.name == "sqlite":
            assert impatient.execute("PRAGMA busy_timeout").fetchone() == (50,)


def test_result_within_the_wait(database: Database, key: str) -> None:
    """A run with `wait=60` gets the result if the other run ends within 60 seconds."""
    with database.connected() as connection, ThreadPoolExecutor(1) as pool:
        with IdempotencyKey(connection, key, payload={"amount": 10}) as run:
            waiting = pool.submit(pay, database, key, wait=60)
            run.result = "mine"
        connection.commit()
        assert waiting.result(60) == (True, "mine")


def test_expired_results_are_pruned(database: Database, key: str) -> None:
    """An expired result is ignored, and `prune` removes it."""
    keys = [f"{key}{number}" for number in range(3)]
    for each in keys:
        assert pay(database, each) == (False, {"charged": 10})
    database.ask("UPDATE fencelock_idempotency SET expires_at = 1 WHERE name IN (?, ?)", *_names(database, keys[:2]))
    assert pay(database, keys[0], amount=20) == (False, {"charged": 20})
    with database.transaction() as connection:
        assert prune(connection) >= 1
    left = database.ask("SELECT count(*) FROM fencelock_idempotency WHERE name IN (?, ?, ?)", *_names(database, keys))
    assert left == [(2,)]
    assert pay(database, keys[2]) == (True, {"charged": 10})


def _names(database: Database, keys: list[str]) -> list[Any]:
    return [key.encode() for key in keys] if database.name == "mariadb" else list(keys)


@pytest.mark.parametrize("wait", [True, False])
def test_snapshot_older_than_the_claim(database: Database, key: str, wait: bool) -> None:
    """A transaction that has read before the claim still does not do the work twice."""
    with database.connected() as connection:
        if database.name == "postgresql":
            connection.isolation_level = 3  # repeatable read, as MariaDB has by default
        cursor = connection.cursor()
        if database.name == "sqlite":
            cursor.execute("BEGIN")
        cursor.execute("SELECT count(*) FROM charge")
        cursor.fetchall()
        assert pay(database, key) == (False, {"charged": 10})
        if database.name == "mariadb":
            with IdempotencyKey(connection, key, payload={"amount": 10}, wait=wait) as run:
                assert run.replayed
                assert run.result == {"charged": 10}
        else:
            # The database itself refuses; the transaction has to be done again, as ever at this level.
            with pytest.raises(Exception, match=r"could not serialize|SQLite cannot claim"):
                with IdempotencyKey(connection, key, payload={"amount": 10}, wait=wait):
                    pytest.fail("twice")
        connection.rollback()
    assert database.charges(key) == 1


def test_autocommit_is_refused(database: Database, key: str) -> None:
    """A connection that commits each statement by itself is refused before anything is written."""
    with database.connected() as connection:
        if database.name == "sqlite":
            connection.isolation_level = None
        elif database.name == "mariadb":
            connection.autocommit(True)
        else:
            connection.autocommit = True
        with pytest.raises(FencelockError, match="needs a transaction"):
            with IdempotencyKey(connection, key):
                pass
        connection.cursor().execute("BEGIN")
        with IdempotencyKey(connection, key) as run:
            assert not run.replayed
        connection.rollback()


@pytest.mark.parametrize("on", ["sqlite"])
def test_block_without_a_test_of_replayed_fails(database: Database, key: str) -> None:
    """A block that repeats the work of a replay raises an error, so that it is rolled back."""
    pay(database, key)
    with pytest.raises(FencelockError, match=r"if not run\.replayed"), database.transaction() as connection:
        with IdempotencyKey(connection, key, payload={"amount": 10}) as run:
            database.charge(connection, key)
            run.result = "again"
    assert database.charges(key) == 1


@pytest.mark.parametrize("on", ["sqlite"])
def test_decorator(database: Database, key: str) -> None:
    """A decorated function runs once for a key; other arguments under the same key are refused."""

    @idempotent("{name}:{order.real}")
    def charge(connection: Any, name: str, order: int, amount: int = 10) -> Any:
        database.charge(connection, f"{name}:{order}", amount)
        return (name, amount)

    with database.transaction() as connection:
        assert charge(connection, key, 7) == [key, 10]
        assert charge(connection, key, order=7, amount=10) == [key, 10]
        with pytest.raises(KeyReused):
            charge(connection, key, 7, 11)
    assert database.charges(f"{key}:7") == 1
    with pytest.raises(TypeError, match="no argument 'connection'"):

        @idempotent("x")
        def without(database: Any) -> None: ...


@pytest.mark.parametrize("on", ["sqlite"])
async def test_decorator_awaited(database: Database, on: str, key: str) -> None:
    """The decorator works for `async def`, and raises the function's error."""

    @aio_idempotency.idempotent("{name}", connection="where")
    async def charge(where: Any, name: str) -> int:
        await where.execute("INSERT INTO charge VALUES (?, 10)", (name,))
        if name.endswith("!"):
            raise ZeroDivisionError
        return 10

    async with KINDS[on, "aiosqlite"](database) as connection:
        assert [await charge(connection, key), await charge(connection, key)] == [10, 10]
        await connection.commit()
        with pytest.raises(ZeroDivisionError):
            await charge(connection, key + "!")
        await connection.rollback()
    assert database.charges(key) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"key": ""}, "must not be empty"),
        ({"key": "a\nb"}, "control characters"),
        ({"key": "k" * 1001}, "at most 1000 bytes"),
        ({"ttl": 0}, "ttl must be 1 or more"),
        ({"ttl": float("nan")}, "ttl must be"),
        ({"ttl": 1e30}, "ttl must be 1 or more seconds, and 1000000000 at most"),
        ({"wait": -1}, "wait must be 0 or more"),
        ({"wait": "5"}, "wait must be"),
        ({"payload": object()}, "JSON"),
    ],
)
def test_invalid_arguments(wrong: dict[str, Any], error: str) -> None:
    """Invalid arguments are refused before the first statement."""
    with pytest.raises((ValueError, TypeError), match=error):
        IdempotencyKey(None, **{"key": "k", **wrong})


def test_keys_are_exact(database: Database, key: str) -> None:
    """Keys are compared byte for byte: a blank at the end, another case or an accent makes another key."""
    keys = [f"{key}{end}" for end in ("é", "e", "É", "E", "e ", "%s ?", "{x}:*", "k" * 960)]
    for each in keys:
        assert pay(database, each)[0] is False
    for each in keys:
        assert pay(database, each)[0] is True
