"""The SQL fence on connections as callers have set them up for themselves."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from fencelock import StaleToken
from fencelock.fences.sql import SqlFence

OLD, NEW = SimpleNamespace(token=33, id="a"), SimpleNamespace(token=34, id="b")


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """Return a row as the many programs want it that have read the manual of sqlite3."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("factory", [None, sqlite3.Row, as_dict, lambda *_: None])
def test_row_factory(factory: Any) -> None:
    """Whatever the caller makes of rows, an old token is a StaleToken."""
    database = sqlite3.connect(":memory:")
    database.row_factory = factory
    with database:
        SqlFence().check(database, "r", NEW)
    with pytest.raises(StaleToken, match="token 34 has been here"), database:
        SqlFence().check(database, "r", OLD)
    database.close()


def test_first_token_after_a_move() -> None:
    """A fence that was moved by hand lets that token in, for one claim, as the fence in memory does."""
    database = sqlite3.connect(":memory:")
    with database:
        SqlFence().check(database, "r", NEW)
        SqlFence().rebase(database, "r", 33, reason="another engine")
    with database:
        SqlFence().check(database, "r", OLD)
    with pytest.raises(StaleToken), database:
        SqlFence().check(database, "r", SimpleNamespace(token=33, id="c"))
    database.close()
