"""The tables of `fencelock.lockfree`: made by whoever may, never in the middle of a caller's transaction."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from importlib.resources import files
from typing import Any, overload

from fencelock.errors import FencelockError
from fencelock.fences.sql import schema as fence_schema
from fencelock.lockfree.colour import settled
from fencelock.sqlio import Awaited, Blocking, Link, link, misses_table, run


def schema_text(dialect: str) -> str:
    """Return the statements that make the tables in `postgresql`, `mysql` or `sqlite`, for a migration of yours.

    The SQL fence's table is among them, as the outbox's relay needs it.

    >>> print(schema_text("postgresql").splitlines()[0])
    -- What fencelock.lockfree needs in PostgreSQL. Each statement may be repeated.
    """
    own = files("fencelock.lockfree").joinpath(f"sql/{dialect}.sql").read_text("utf-8")
    fence = "".join(f"{statement};\n" for statement in fence_schema(dialect))
    return f"{own}\n-- The table of SqlFence, which keeps out a relay of the outbox's that was replaced.\n\n{fence}"


@overload
def create_tables(connection: Blocking) -> None:
    """Do it on a connection that blocks."""


@overload
def create_tables(connection: Awaited) -> Coroutine[Any, Any, None]:
    """Do it on a connection of asyncio's, to be awaited."""


def create_tables(connection: Any) -> Any:
    """Make the tables, unless they are there, and commit. Not amid a transaction: MySQL would commit what was done so far.

    >>> import sqlite3
    >>> db = sqlite3.connect(":memory:")
    >>> create_tables(db)
    >>> db.execute("SELECT count(*) FROM fencelock_outbox").fetchone()
    (0,)
    >>> db.close()
    """
    to = link(connection)
    return run(to, _create(to, connection))


async def _create(to: Link, connection: Any) -> None:
    for statement in each_statement(schema_text(to.dialect)):
        await to.execute(statement)
    await settled(connection.commit())


def each_statement(text: str) -> Iterator[str]:
    """Yield the statements one by one, without the comments: drivers take a single one at a time."""
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    yield from filter(None, (statement.strip() for statement in bare.split(";")))


def explain(error: Exception, name: str | None = None) -> None:
    """Raise an error that says how to make the tables, if it is that one is missing."""
    if not isinstance(error, FencelockError) and misses_table(error):
        raise FencelockError(
            "a table of fencelock.lockfree is not there: run `fencelock schema --lockfree --apply --url …` with this "
            "database's URL, or have fencelock.lockfree.schema.create_tables(connection) run once when you deploy",
            name,
        ) from error
