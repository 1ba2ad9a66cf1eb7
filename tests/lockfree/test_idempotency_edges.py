"""Idempotency keys at their edges: past the block but before the commit, methods, payloads that are hard to write down."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fencelock import FencelockError, KeyInProgress
from fencelock.lockfree.idempotency import fingerprint, idempotent, idempotent_by
from fencelock.lockfree.schema import create_tables
from tests.lockfree.databases import Database


@pytest.mark.parametrize("wait", [False, 0.2])
def test_told_while_the_first_one_has_yet_to_commit(database: Database, key: str, wait: float | bool) -> None:
    """Between the end of the first one's block and its commit, who does not want to wait is told, too, and goes on."""
    with database.connected() as connection, database.transaction() as impatient, ThreadPoolExecutor(1) as pool:
        if database.name == "sqlite":
            impatient.execute("PRAGMA busy_timeout = 50")
        with idempotent(connection, key) as run:
            run.result = "mine"

        def ask() -> Any:
            with idempotent(impatient, key, wait=wait) as second:
                return second.result

        asked = pool.submit(ask)
        try:
            with pytest.raises(KeyInProgress):
                asked.result(20)
        finally:
            connection.commit()
        assert ask() == "mine"


class Till:
    """Something with methods."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.charged: list[int] = []

    @idempotent_by("pay:{self.name}:{order}")
    def pay(self, connection: Any, order: int, amount: int) -> int:
        """Charge once."""
        self.charged.append(amount)
        return len(self.charged)

    @classmethod
    @idempotent_by("count:{order}")
    def count(cls, connection: Any, order: int) -> str:
        """Say whose it was."""
        return cls.__name__


def test_methods() -> None:
    """The object of a method is not part of the payload; what tells objects apart belongs into the key."""
    database = sqlite3.connect(":memory:")
    create_tables(database)
    one, other = Till("one"), Till("other")
    assert [one.pay(database, 42, 10), one.pay(database, 42, amount=10), other.pay(database, 42, 10)] == [1, 1, 1]
    assert (one.charged, other.charged) == ([10], [10])
    assert (Till.count(database, 1), one.count(database, 1)) == ("Till", "Till")
    database.close()


def test_fingerprints() -> None:
    """Whatever a client can send as JSON has a fingerprint, half a surrogate pair as well; what differs differs."""
    payloads: list[Any] = [None, "", b"", "null", b"null", "\ud800", "\ud801", 1, 1.0, True, "1", [], {}, [1], {"1": 1}]
    assert len({fingerprint(payload) for payload in payloads}) == len(payloads)
    assert fingerprint({"a": [1.5, "é"], "b": None}) == fingerprint({"b": None, "a": (1.5, "é")})


def test_a_key_inside_itself(database: Database, key: str) -> None:
    """A key that is used once more inside its own block is an error of the outer one, and nothing of either is kept."""
    with database.connected() as connection:
        with pytest.raises(FencelockError, match="used once more"), idempotent(connection, key):
            with idempotent(connection, key) as inner:
                assert not inner.repeated
                database.charge(connection, key)
        connection.rollback()
        with idempotent(connection, key) as run:
            assert not run.repeated
        connection.rollback()
    assert database.charges(key) == 0
