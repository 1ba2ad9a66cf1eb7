"""The SQL fence on connections as callers have set them up for themselves."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences.sql import FenceColumn, SqlFence

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


AUTOCOMMIT: list[dict[str, Any]] = [{"isolation_level": None}]
if sys.version_info >= (3, 12):
    AUTOCOMMIT.append({"autocommit": True})


@pytest.mark.parametrize("options", AUTOCOMMIT, ids=str)
def test_each_way_to_say_autocommit(options: dict[str, Any]) -> None:
    """A connection that commits each statement is refused, in whichever way it was told to, until a transaction is begun."""
    import aiosqlite

    async def use() -> None:
        async with aiosqlite.connect(":memory:", **options) as connection:
            with pytest.raises(FencelockError, match="needs a transaction"):
                await SqlFence().check(connection, "r", NEW)
            await connection.execute("BEGIN IMMEDIATE")
            await SqlFence().check(connection, "r", NEW)
            assert connection.in_transaction

    asyncio.run(use())
    database = sqlite3.connect(":memory:", **options)
    with pytest.raises(FencelockError, match="needs a transaction"):
        SqlFence().check(database, "r", NEW)
    database.close()


@pytest.mark.parametrize("rowcount", [-1, None])
def test_a_count_that_is_not_known_is_no_pass(rowcount: Any) -> None:
    """Where a driver cannot say how many rows an UPDATE found, nobody is let in on that."""
    column = FenceColumn(paramstyle="qmark")
    with pytest.raises(StaleToken):
        column.check(0, "r", NEW)
    column.check(1, "r", NEW)
    with pytest.raises(FencelockError, match="does not say how many rows"):
        column.check(rowcount, "r", NEW)


def test_connection_straight_from_a_pool() -> None:
    """What SQLAlchemy's pools give out stands for the driver's connection in it."""
    import sqlalchemy

    engine = sqlalchemy.create_engine("sqlite://")
    pooled = engine.raw_connection()
    SqlFence().check(pooled, "r", NEW)
    pooled.commit()
    with pytest.raises(StaleToken):
        SqlFence().check(pooled, "r", OLD)
    pooled.close()
    engine.dispose()
