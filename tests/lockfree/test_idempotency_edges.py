"""Idempotency keys at their edges: past the block but before the commit, methods, payloads that are hard to write down."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fencelock import KeyInProgress
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
