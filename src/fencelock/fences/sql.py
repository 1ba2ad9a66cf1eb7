"""The SQL fence: one statement in the caller's own transaction that refuses a holder whose token is old.

It has to be the first statement of the transaction, before the first read that the write depends on: it takes the lock on
the fence's row until commit, so that a newer holder waits for that commit instead of interleaving with it. This release
knows SQLite; there, a holder that is stopped inside its transaction blocks the others until it goes on or dies.
"""

from __future__ import annotations

import sqlite3

from fencelock.errors import FencelockError, StaleToken
from fencelock.fences import Fenced, check_lease, check_resource

SCHEMA = """CREATE TABLE IF NOT EXISTS fencelock_fence (
    resource TEXT PRIMARY KEY,
    token    INTEGER NOT NULL,  -- the highest that was let through
    id       TEXT NOT NULL      -- whose it was: an equal token of another claim is refused; '' after a move by hand
) STRICT, WITHOUT ROWID"""

CHECK = """INSERT INTO fencelock_fence VALUES (?, ?, ?)
ON CONFLICT (resource) DO UPDATE SET token = excluded.token, id = excluded.id
WHERE excluded.token > token OR (excluded.token = token AND id IN (excluded.id, ''))"""


class SqlFence:
    """Keeps, in the caller's own database, the highest token that was let through for each resource.

    >>> import sqlite3, types
    >>> old, new = types.SimpleNamespace(token=33, id="a"), types.SimpleNamespace(token=34, id="b")
    >>> db = sqlite3.connect(":memory:")
    >>> with db:
    ...     SqlFence().check(db, "order:42", new)
    >>> with db:
    ...     SqlFence().check(db, "order:42", old)
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'order:42' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    >>> db.close()
    """

    def check(self, connection: sqlite3.Connection, resource: str, lease: Fenced) -> None:
        """Raise StaleToken unless the lease is the newest that this resource has seen.

        Call it first in a transaction, before anything is read. On a connection that commits every statement by itself it
        is refused, as the lock on the fence would be gone before the write.

        The fence compares tokens and knows nothing of locks. It notices a holder that comes after a newer one was here, for
        whatever reason. It does not notice that a lease has run out or was released as long as nobody newer has been here:
        then nobody is harmed either, and the next one's token closes the door. It does not notice two resources mixed up,
        writes that go past it, or reads before it: `lease.check()` and the order of statements are the caller's.
        """
        _check_connection(connection)
        check_resource(resource)
        check_lease(lease)
        if not connection.in_transaction and _autocommits(connection):
            raise FencelockError(
                f"the fence of {resource!r} needs a transaction, and this connection commits each statement by itself: "
                "execute BEGIN IMMEDIATE first",
                resource,
            )
        if self._execute(connection, CHECK, (resource, lease.token, lease.id)).rowcount:
            return
        (seen,) = self._execute(
            connection, "SELECT token FROM fencelock_fence WHERE resource = ?", (resource,)
        ).fetchone()
        raise StaleToken(
            f"{resource!r} refused token {lease.token}: a holder with token {seen} has been here. Stop, and acquire anew",
            resource,
        )

    def rebase(self, connection: sqlite3.Connection, resource: str, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up, in the caller's transaction: every token from this one on is let in.

        Logged, with the reason.
        """
        import logging

        _check_connection(connection)
        check_resource(resource)
        if not reason.strip():
            raise ValueError(f"moving the fence of {resource!r} needs a reason that others can read later")
        self._execute(connection, "INSERT OR REPLACE INTO fencelock_fence VALUES (?, ?, '')", (resource, token))
        logging.getLogger("fencelock").warning("the fence of %r was moved to token %d: %s", resource, token, reason)

    def _execute(self, connection: sqlite3.Connection, statement: str, args: tuple[object, ...]) -> sqlite3.Cursor:
        cursor = connection.cursor()
        cursor.row_factory = None  # the caller's own, dicts for example, is not for us
        try:
            return cursor.execute(statement, args)
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
        cursor.execute(SCHEMA)
        return cursor.execute(statement, args)


def _check_connection(connection: object) -> None:
    if not isinstance(connection, sqlite3.Connection):
        raise TypeError(f"SqlFence takes a sqlite3.Connection in this release, not {_kind(connection)}")


def _kind(thing: object) -> str:
    kind = type(thing)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _autocommits(connection: sqlite3.Connection) -> bool:
    # Python 3.12 has an attribute for it; -1 stands for the older rule, by isolation_level.
    autocommit = getattr(connection, "autocommit", -1)
    return connection.isolation_level is None if autocommit == -1 else bool(autocommit)
