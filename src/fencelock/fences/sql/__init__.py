"""The SQL fence: one statement in the caller's own transaction that refuses a holder whose token is old.

It must be the first statement of the transaction, before the first read that the write depends on: it locks the fence's
row until the commit, so that a newer holder waits for that commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencelock.fences.sql.base import BaseSqlFence, BaseStandaloneSqlFence
from fencelock.fences.sql.column import FenceColumn
from fencelock.fences.sql.statements import schema
from fencelock.runtime.both_apis import BlockingApi
from fencelock.sqlio import BlockingConnection

__all__ = ["FenceColumn", "SqlFence", "StandaloneSqlFence", "schema"]


class SqlFence(BaseSqlFence[BlockingConnection], BlockingApi):
    """Stores, in the caller's own database, the highest token that each resource has accepted.

    For connections and cursors of sqlite3, psycopg, psycopg2, PyMySQL and mysqlclient, SQLAlchemy's Connection and
    Session, and Django's `connection`. `fencelock.aio.fences.sql` has the same class for connections of asyncio.

    `fencelock schema --fence --apply --url …` or `create` makes the table; on SQLite the first check does.

    >>> import sqlite3, types
    >>> old, new = types.SimpleNamespace(token=33, id="a"), types.SimpleNamespace(token=34, id="b")
    >>> db = sqlite3.connect(":memory:")
    >>> with db:                                               # commits at its end
    ...     SqlFence().check(db, new, "order:42")
    >>> with db:
    ...     SqlFence().check(db, old, "order:42")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'order:42' refused token 33: it has accepted token 34. Stop, and acquire the lock again...
    >>> with db:
    ...     SqlFence().rebase(db, "order:42", 5, reason="the locks have moved to another server")
    ...     SqlFence().token(db, "order:42"), SqlFence().prune(db, 1000), SqlFence().token(db, "order:42")
    (5, 1, 1000)
    >>> db.close()
    """


class StandaloneSqlFence(BaseStandaloneSqlFence, BlockingApi):
    """Stores the highest token of each resource in a database, for a resource that is elsewhere.

    `connect` opens a connection of a kind that SqlFence takes, with autocommit off, or a context manager around one: a
    function that calls a driver's `connect`, `pool.connection` or `pool.getconn` of psycopg's pool, SQLAlchemy's
    `engine.connect` or a session factory. After each `enter` it is closed, or given back to its pool. For a pool that
    needs an explicit call for that, such as psycopg2's, write a context manager.

    >>> import sqlite3, tempfile, types
    >>> fence = StandaloneSqlFence(lambda: sqlite3.connect(f"{folder}/fences.db"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fence.enter(types.SimpleNamespace(token=34, id="b"), "printer")
    ...     fence.enter(types.SimpleNamespace(token=33, id="a"), "printer")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'printer' refused token 33: it has accepted token 34. Stop, and acquire the lock again...
    """

    def __init__(self, connect: Callable[[], Any], fence: SqlFence | None = None) -> None:
        super().__init__(connect, fence or SqlFence())
