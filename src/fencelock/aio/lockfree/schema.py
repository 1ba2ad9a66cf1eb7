"""The tables of `fencelock.lockfree`, awaited."""

from __future__ import annotations

from fencelock.lockfree.schema import create, schema_text
from fencelock.sqlio import AsyncConnection, adapt

__all__ = ["create_tables", "schema_text"]


async def create_tables(connection: AsyncConnection) -> None:
    """Create the tables that do not exist, and commit. Not inside a transaction: MySQL would commit it.

    >>> import aiosqlite
    >>> async def main():
    ...     async with aiosqlite.connect(":memory:") as db:
    ...         await create_tables(db)
    >>> asyncio.run(main())
    """
    await create(adapt(connection, "lockfree", awaited=True))
