"""Everything in the caller's transaction, over Django's connection and its `atomic` blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections, transaction

from fencelock import FencelockError, VersionConflict
from fencelock.lockfree.idempotency import IdempotencyKey, prune
from fencelock.lockfree.optimistic import SqlRow
from fencelock.lockfree.outbox import Outbox
from tests import django_app
from tests.lockfree.databases import Database

ENGINES = {"sqlite": "sqlite3", "postgresql": "postgresql"}


@pytest.fixture
def connection(database: Database) -> Iterator[Any]:
    """Django's connection, which is in autocommit mode outside of `atomic`."""
    parts = urlsplit(database.url)
    place = {"NAME": parts.path} if database.name == "sqlite" else {"NAME": parts.path[1:], "USER": "postgres"}
    engine = f"django.db.backends.{ENGINES[database.name]}"
    django_app.ready()
    connections.settings[database.name] = {
        "ENGINE": engine, **place, "HOST": parts.hostname or "", "PORT": parts.port or "",
    }  # fmt: skip
    connections.settings = connections.configure_settings(connections.settings)
    yield connections[database.name]
    connections[database.name].close()


@pytest.mark.parametrize("on", ["sqlite", pytest.param("postgresql", marks=pytest.mark.engine("postgres"))])
def test_atomic(database: Database, connection: Any, on: str, key: str) -> None:
    """Keys, messages and versions are part of an `atomic` block, and refused outside of one where they need it."""
    outbox = Outbox(key)
    for repeated in (False, True):
        with transaction.atomic(using=on), IdempotencyKey(connection, key) as run:
            assert run.replayed is repeated
            if not repeated:
                outbox.append(connection, "a", 1)
                run.result = [1]
        assert run.result == [1]
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=on):
        outbox.append(connection, "a", 2)
        raise ZeroDivisionError
    assert outbox.pending(connection) == 1
    with transaction.atomic(using=on):
        assert prune(connection) == 0
    with pytest.raises(FencelockError, match="needs a transaction"):
        with IdempotencyKey(connection, key):
            pass
    with pytest.raises(FencelockError, match="commits each"):
        outbox.append(connection, "a", 3)


@pytest.mark.parametrize("on", ["sqlite", pytest.param("postgresql", marks=pytest.mark.engine("postgres"))])
def test_versions(database: Database, connection: Any, on: str, key: str) -> None:
    """A row is updated outside of `atomic`, and read and written inside."""
    database.ask("CREATE TABLE IF NOT EXISTS account (id varchar(40) PRIMARY KEY, balance integer, version integer)")
    database.ask("INSERT INTO account VALUES (?, 100, 1)", key)
    row = SqlRow(connection, "account", {"id": key}, ["balance"])
    assert row.update(lambda now: {"balance": now["balance"] - 10}) == {"balance": 90}
    with transaction.atomic(using=on):
        seen = row.read()
        row.write({"balance": 80}, seen.version)
        with pytest.raises(VersionConflict):
            row.write({"balance": 70}, seen.version)
        with pytest.raises(FencelockError, match="has an open one"):
            row.update(lambda now: now)
    assert row.read() == ({"balance": 80}, 3)
