"""The tables of `fencelock.lockfree`, which are never created in the middle of a caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from fencelock.errors import FencelockError
from fencelock.fences.sql import schema as fence_schema
from fencelock.runtime.blocking import run_sync
from fencelock.sqlio import BlockingConnection, ConnectionAdapter, adapt, is_missing_table

__all__ = ["create_tables", "schema_text"]


def schema_text(dialect: str) -> str:
    """Return the statements that create the tables in `postgresql`, `mysql` or `sqlite`, for a migration of yours.

    They include the SQL fence's table, as the outbox's relay needs it.

    >>> print(schema_text("postgresql").splitlines()[0])
    -- The tables of fencelock.lockfree in PostgreSQL. Each statement can be repeated.
    """
    own = files("fencelock.lockfree").joinpath(f"sql/{dialect}.sql").read_text("utf-8")
    fence = "".join(f"{statement};\n" for statement in fence_schema(dialect))
    return f"{own}\n-- The table of SqlFence, which refuses a relay of the outbox that was replaced.\n\n{fence}"


def create_tables(connection: BlockingConnection) -> None:
    """Create the tables that do not exist, and commit. Not inside a transaction: MySQL would commit it.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> create_tables(db)
    >>> db.execute("SELECT count(*) FROM fencelock_outbox").fetchone()
    (0,)
    >>> db.close()
    """
    run_sync(create(adapt(connection, "lockfree", awaited=False)))


async def create(adapter: ConnectionAdapter) -> None:
    """Create the tables, for both APIs."""
    await adapter.begin()
    for statement in each_statement(schema_text(adapter.dialect)):
        await adapter.execute(statement)
    await adapter.commit()


def each_statement(text: str) -> Iterator[str]:
    """Yield the statements without their comments: drivers execute one at a time."""
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    yield from filter(None, (statement.strip() for statement in bare.split(";")))


def explain_missing_table(error: Exception, name: str | None = None) -> None:
    """Raise an error that says how to create the tables, if this error says that one is missing."""
    if not isinstance(error, FencelockError) and is_missing_table(error):
        raise FencelockError(
            "a table of fencelock.lockfree does not exist: run `fencelock schema --lockfree --apply --url …` with this "
            "database's URL, or call fencelock.lockfree.schema.create_tables(connection) once when you deploy",
            name,
        ) from error
