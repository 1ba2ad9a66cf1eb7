"""The SQL fence on connections with the callers' own settings, and the fence in a column."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fencelock import FencelockError, InvalidType, StaleToken
from fencelock.aio.fences import sql as aio_sql
from fencelock.fences.sql import FenceColumn, SqlFence

OLD, NEW = SimpleNamespace(token=33, id="a"), SimpleNamespace(token=34, id="b")


def as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """Return a row as a dict, as in the manual of sqlite3."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


@pytest.mark.parametrize("factory", [None, sqlite3.Row, as_dict, lambda *_: None])
def test_row_factory(factory: Any) -> None:
    """An old token raises StaleToken with every row factory of the caller."""
    database = sqlite3.connect(":memory:")
    database.row_factory = factory
    with database:
        SqlFence().check(database, NEW, "r")
    with pytest.raises(StaleToken, match="it has accepted token 34"), database:
        SqlFence().check(database, OLD, "r")
    database.close()


def test_first_token_after_rebase() -> None:
    """A fence that was rebased accepts that token for one claim, as MemoryFence does."""
    database = sqlite3.connect(":memory:")
    with database:
        SqlFence().check(database, NEW, "r")
        SqlFence().rebase(database, "r", 33, reason="another engine")
    with database:
        SqlFence().check(database, OLD, "r")
    with pytest.raises(StaleToken), database:
        SqlFence().check(database, SimpleNamespace(token=33, id="c"), "r")
    database.close()


AUTOCOMMIT: list[dict[str, Any]] = [{"isolation_level": None}]
if sys.version_info >= (3, 12):
    AUTOCOMMIT.append({"autocommit": True})


@pytest.mark.parametrize("options", AUTOCOMMIT, ids=str)
def test_every_form_of_autocommit_is_refused(options: dict[str, Any]) -> None:
    """A connection in autocommit mode is refused, with each way to set it, until a transaction is begun."""
    import aiosqlite

    async def use() -> None:
        async with aiosqlite.connect(":memory:", **options) as connection:
            with pytest.raises(FencelockError, match="needs a transaction"):
                await aio_sql.SqlFence().check(connection, NEW, "r")
            await connection.execute("BEGIN IMMEDIATE")
            await aio_sql.SqlFence().check(connection, NEW, "r")
            assert connection.in_transaction

    asyncio.run(use())
    database = sqlite3.connect(":memory:", **options)
    with pytest.raises(FencelockError, match="needs a transaction"):
        SqlFence().check(database, NEW, "r")
    database.close()


@pytest.mark.parametrize("rowcount", [-1, None])
def test_unknown_rowcount_is_refused(rowcount: Any) -> None:
    """The token is refused if the driver does not count the rows that an UPDATE found."""
    column = FenceColumn(paramstyle="qmark")
    with pytest.raises(StaleToken):
        column.check(NEW, 0, "r")
    column.check(NEW, 1, "r")
    with pytest.raises(FencelockError, match="does not say how many rows"):
        column.check(NEW, rowcount, "r")


@pytest.mark.parametrize("rowcount", ["0", "1", True, 1.0, [], SimpleNamespace(rowcount=0)], ids=repr)
def test_invalid_rowcount_is_refused(rowcount: Any) -> None:
    """A cursor in place of its count, or anything else but an int, is refused, and the error says what is needed."""
    with pytest.raises(InvalidType, match=r"rowcount.*roll back"):
        FenceColumn(paramstyle="qmark").check(NEW, rowcount, "r")


def test_rowcount_above_one_is_refused() -> None:
    """An UPDATE of several rows is refused: it may have skipped rows that a newer holder has written."""
    with pytest.raises(FencelockError, match=r"found 2 rows of 'r'.*one row"):
        FenceColumn(paramstyle="qmark").check(NEW, 2, "r")


def test_missing_row_is_named_as_a_cause() -> None:
    """If the UPDATE found no row, the error names the possible causes besides a newer holder."""
    with pytest.raises(StaleToken, match=r"found no row.*missing.*FOUND_ROWS"):
        FenceColumn(paramstyle="qmark").check(NEW, 0, "r")


def test_columns_that_were_added_later() -> None:
    """A row whose fence columns are NULL accepts any first token, as a resource without a mark does."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE stock (sku TEXT, fence INTEGER, fence_id TEXT)")
    database.execute("INSERT INTO stock (sku) VALUES ('apple')")
    column = FenceColumn(paramstyle="named")

    def enter(lease: Any) -> None:
        mine = column.clause(lease)
        statement = f"UPDATE stock SET {mine.set} WHERE sku = 'apple' AND {mine.where}"
        column.check(lease, database.execute(statement, mine.named).rowcount, "apple")

    enter(NEW)
    enter(NEW)
    with pytest.raises(StaleToken):
        enter(OLD)
    database.close()


def test_raw_connection_of_an_sqlalchemy_pool() -> None:
    """The fence takes a raw connection from a pool of SQLAlchemy."""
    import sqlalchemy

    engine = sqlalchemy.create_engine("sqlite://")
    pooled = engine.raw_connection()
    SqlFence().check(pooled, NEW, "r")
    pooled.commit()
    with pytest.raises(StaleToken):
        SqlFence().check(pooled, OLD, "r")
    pooled.close()
    engine.dispose()
