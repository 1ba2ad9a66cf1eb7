"""The SQL fence, awaited: for psycopg, asyncpg, aiosqlite, and SQLAlchemy's AsyncConnection and AsyncSession."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencelock.fences.sql import FenceColumn, schema
from fencelock.fences.sql.base import BaseSqlFence, BaseStandaloneSqlFence
from fencelock.runtime.both_apis import AsyncioApi
from fencelock.sqlio import AsyncConnection

__all__ = ["FenceColumn", "SqlFence", "StandaloneSqlFence", "schema"]


class SqlFence(BaseSqlFence[AsyncConnection], AsyncioApi):
    """Stores, in the caller's own database, the highest token that each resource has accepted.

    A check that is not awaited checks nothing: Python only warns that a coroutine was never awaited. `fencelock.fences.sql`
    describes the rest.

    >>> import aiosqlite, types
    >>> async def main():
    ...     async with aiosqlite.connect(":memory:") as db:
    ...         await SqlFence().check(db, types.SimpleNamespace(token=34, id="b"), "order:42")  # first
    ...         await db.commit()
    ...         return await SqlFence().token(db, "order:42")
    >>> asyncio.run(main())
    34
    """


class StandaloneSqlFence(BaseStandaloneSqlFence, AsyncioApi):
    """Stores the highest token of each resource in a database, for a resource that is elsewhere.

    `connect` opens a connection of a kind that SqlFence takes, or an asynchronous context manager around one, such as
    `pool.connection` of psycopg, `pool.acquire` of asyncpg or `engine.connect` of SQLAlchemy. `fencelock.fences.sql`
    describes the rest.

    >>> import aiosqlite, tempfile, types
    >>> async def main(folder):
    ...     fence = StandaloneSqlFence(lambda: aiosqlite.connect(f"{folder}/fences.db"))
    ...     await fence.enter(types.SimpleNamespace(token=34, id="b"), "printer")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    """

    def __init__(self, connect: Callable[[], Any], fence: SqlFence | None = None) -> None:
        super().__init__(connect, fence or SqlFence())
