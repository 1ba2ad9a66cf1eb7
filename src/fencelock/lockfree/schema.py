"""The tables of `fencelock.lockfree`: made by whoever may, never in the middle of a caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from fencelock.lockfree.colour import awaiting, straight
from fencelock.lockfree.statements import Dialect, Statements, statements


def schema_text(dialect: Dialect) -> str:
    """Return the statements that make the tables, for a migration of yours.

    >>> print(schema_text("postgresql").splitlines()[0])
    -- What fencelock.lockfree needs in PostgreSQL. Each statement may be repeated.
    """
    return files("fencelock.lockfree").joinpath(f"sql/{dialect}.sql").read_text("utf-8")


def create_tables(connection: Any) -> None:
    """Make the tables, unless they are there, and commit. Not amid a transaction: MySQL would commit what was done so far.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> create_tables(db)
    >>> db.execute("SELECT count(*) FROM fencelock_outbox").fetchone()
    (0,)
    >>> db.close()
    """
    on = statements(connection)
    straight(_create(on), connection, awaited=on.awaited, instead="await acreate_tables(…)")


async def acreate_tables(connection: Any) -> None:
    """Make the tables, unless they are there, and commit; for asyncio. See `create_tables`."""
    on = statements(connection)
    await awaiting(_create(on), connection, awaited=on.awaited, instead="create_tables(…)")


async def _create(on: Statements) -> None:
    for statement in each_statement(schema_text(on.dialect)):
        await on.run(statement)
    await on.commit()


def each_statement(text: str) -> Iterator[str]:
    """Yield the statements one by one, without the comments: drivers take a single one at a time."""
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    yield from filter(None, (statement.strip() for statement in bare.split(";")))
