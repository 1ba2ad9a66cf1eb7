"""The SQL fence: one statement in the caller's own transaction that refuses a holder whose token is old.

It has to be the first statement of the transaction, before the first read that the write depends on: it takes the lock on
the fence's row until commit, so that a newer holder waits for that commit instead of interleaving with it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, overload

from fencelock.errors import FencelockError, InvalidArgument
from fencelock.fences import Fenced
from fencelock.fences.core import (
    Credentials,
    Mark,
    bearer,
    check_reason,
    check_resource,
    check_token,
    refusal,
    resource_of,
    tell_collected,
    tell_moved,
    token_of,
)
from fencelock.fences.sql.column import FenceColumn
from fencelock.fences.sql.statements import schema, statements
from fencelock.sqlio import MYSQL, POSTGRESQL, SQLITE, Answer, Awaited, Blocking, Link, link, misses_table, run
from fencelock.sqlio.promised import Promised

__all__ = ["FenceColumn", "SqlFence", "schema"]

DEFAULT_IDLE = 30.0
"""Seconds that any transaction may be idle; one under a lease of more than half of that, twice the lease's ttl."""

SHORTEST_IDLE, LONGEST_IDLE = 0.1, 2 * 86400.0
"""What a caller may choose. The longest is twice the longest ttl of a lease; servers do not take every number."""

NOWHERE = Mark(0, "")
"""A floor that keeps nobody out, as every new table has it on MySQL."""


class SqlFence:
    """Keeps, in the caller's own database, the highest token that was let through for each resource.

    Connections and cursors of sqlite3, psycopg, psycopg2, PyMySQL and mysqlclient; SQLAlchemy's Connection and Session;
    Django's `connection`. On psycopg's AsyncConnection, on aiosqlite's, and on SQLAlchemy's AsyncConnection and
    AsyncSession every method is to be awaited.

    The table is made by `fencelock schema --fence --apply --url …`, or by `create`; on SQLite by the first check.

    >>> import sqlite3, types
    >>> old, new = types.SimpleNamespace(token=33, id="a"), types.SimpleNamespace(token=34, id="b")
    >>> db = sqlite3.connect(":memory:")
    >>> with db:
    ...     SqlFence().check(db, new, "order:42")
    >>> with db:
    ...     SqlFence().check(db, old, "order:42")
    Traceback (most recent call last):
    fencelock.errors.StaleToken: 'order:42' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    >>> db.close()
    """

    def __init__(self, *, bound_idle: bool | float = True) -> None:
        if not isinstance(bound_idle, bool) and not SHORTEST_IDLE <= bound_idle <= LONGEST_IDLE:
            raise InvalidArgument(
                f"bound_idle is True, False, or for how many seconds a transaction may be idle, {SHORTEST_IDLE} to "
                f"{LONGEST_IDLE:.0f}; not {bound_idle!r}"
            )
        self._bound_idle = bound_idle

    @overload
    def check(self, connection: Blocking, lease: Fenced, resource: str | None = None) -> None: ...
    @overload
    def check(self, connection: Awaited, lease: Fenced, resource: str | None = None) -> Coroutine[Any, Any, None]: ...

    def check(self, connection: Any, lease: Fenced, resource: str | None = None) -> Any:
        """Raise StaleToken unless the lease is the newest that this resource has seen; without one, its lock's name is it.

        Call it first in a transaction, before anything is read. On a connection that commits every statement by itself it
        is refused, as the lock on the fence would be gone before the write.

        A holder that is stopped inside its transaction holds up the next one. PostgreSQL and MariaDB therefore end a
        transaction, and its connection, once it has been idle for 30 seconds or twice the lease's ttl, whichever is more:
        the driver raises its own error at the next statement (docs/fences/sql.md shows them). `SqlFence(bound_idle=5)` makes
        that 5 seconds; `bound_idle=False` leaves transactions alone. On MySQL and SQLite the next one waits.

        The fence compares tokens and knows nothing of locks. It notices a holder that comes after a newer one was here, for
        whatever reason. It does not notice that a lease has run out or was released as long as nobody newer has been here:
        then nobody is harmed either, and the next one's token closes the door. It does not notice two resources mixed up,
        writes that go past it, or reads before it: `lease.check()` and the order of statements are the caller's.
        """
        to, mine = link(connection), bearer(lease)
        name = resource_of(mine, resource)
        work = _check(to, name, mine, self._idle(lease))
        return Promised(work, to, f"the check of {name!r}") if to.awaited else run(to, work)

    @overload
    def token(self, connection: Blocking, resource: str) -> int | None: ...
    @overload
    def token(self, connection: Awaited, resource: str) -> Coroutine[Any, Any, int | None]: ...

    def token(self, connection: Any, resource: str) -> Any:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None.

        >>> import sqlite3
        >>> SqlFence().token(sqlite3.connect(":memory:"), "order:42")
        """
        to = link(connection)
        return run(to, _token(to, check_resource(resource)))

    @overload
    def rebase(self, connection: Blocking, resource: str, token: int, *, reason: str) -> None: ...
    @overload
    def rebase(self, connection: Awaited, resource: str, token: int, *, reason: str) -> Coroutine[Any, Any, None]: ...

    def rebase(self, connection: Any, resource: str, token: int, *, reason: str) -> Any:
        """Move the fence on purpose, down or up, in the caller's transaction: every token from this one on is let in.

        Logged, with the reason. For when tokens start anew, as after a move to an engine whose clock is behind. Whoever still
        holds an older lease could get in as well: make sure that nobody does.

        >>> import sqlite3, types
        >>> with sqlite3.connect(":memory:") as db:
        ...     SqlFence().rebase(db, "order:42", 5, reason="the locks have moved to another server")
        ...     SqlFence().check(db, types.SimpleNamespace(token=5, id="new"), "order:42")
        """
        to = link(connection)
        return run(to, _rebase(to, check_resource(resource), check_token(token), check_reason(resource, reason)))

    @overload
    def collect(self, connection: Blocking, floor: int) -> int: ...
    @overload
    def collect(self, connection: Awaited, floor: int) -> Coroutine[Any, Any, int]: ...

    def collect(self, connection: Any, floor: int) -> Any:
        """Forget every resource whose token is below the floor, in the caller's transaction; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on, so that nothing
        stale comes in because its mark was collected. Choose a floor below every token that may still be at work. Tokens
        count on the scale of the clock: one of a day ago is `int((time.time() - 86400) * 1e6)`.

        One call forgets them all: there is nothing to repeat. It waits for the transactions that have checked, and every
        check waits for its commit, on SQLite every other writer: commit at once, also if it returns 0.

        >>> import sqlite3, types
        >>> with sqlite3.connect(":memory:") as db:  # commits at its end
        ...     SqlFence().check(db, types.SimpleNamespace(token=34, id="a"), "order:42")
        ...     SqlFence().collect(db, floor=1000)
        1
        """
        to = link(connection)
        return run(to, _collect(to, check_token(floor)))

    @overload
    def create(self, connection: Blocking) -> None: ...
    @overload
    def create(self, connection: Awaited) -> Coroutine[Any, Any, None]: ...

    def create(self, connection: Any) -> Any:
        """Make the table, unless it is there. On MySQL that commits whatever transaction is open: do it at deployment.

        >>> import sqlite3
        >>> SqlFence().create(sqlite3.connect(":memory:"))
        """
        to = link(connection)
        return run(to, _create(to))

    @overload
    def restore(self, connection: Blocking) -> None: ...
    @overload
    def restore(self, connection: Awaited) -> Coroutine[Any, Any, None]: ...

    def restore(self, connection: Any) -> Any:
        """Put back, on MariaDB, what checks have set on this connection to bound idle transactions; elsewhere do nothing.

        PostgreSQL forgets the bound with the transaction; MariaDB can only set it for the connection, where it stays until
        the next check, or until this. Call it after the commit when the connection goes back to others.

        >>> import sqlite3
        >>> SqlFence().restore(sqlite3.connect(":memory:"))
        """
        to = link(connection)
        return run(to, _restore(to))

    def _idle(self, lease: object) -> float | None:
        """Return for how many seconds a transaction under this lease may be idle, or None for no bound.

        Not what is left of the lease: it may be renewed meanwhile, and then its transaction must not be ended.
        """
        if self._bound_idle is False:
            return None
        if self._bound_idle is not True:
            return self._bound_idle
        ttl = getattr(lease, "ttl", None)  # credentials have none, and another service's lease may have anything there
        if not isinstance(ttl, int | float) or ttl != ttl:
            return DEFAULT_IDLE
        return min(max(DEFAULT_IDLE, 2 * ttl), LONGEST_IDLE)


async def _check(to: Link, resource: str, mine: Credentials, idle: float | None) -> None:
    await _need_transaction(to, f"the fence of {resource!r}", resource)
    named = {"resource": resource, "token": mine.token, "id": mine.id}
    if to.dialect == POSTGRESQL:
        named["idle"] = 0 if idle is None else int(idle * 1000)
        passed = (await _ask(to, "check", resource, named)).rows[0][0] == 1
    elif to.dialect == MYSQL:
        # MariaDB counts whole seconds, and 0 is for ever.
        named["idle"] = 0 if idle is None else max(1, int(idle))
        touched = (await _ask(to, "unbounded" if idle is None else "check", resource, named)).touched
        if touched == 2:
            return
        # A new mark is 1; a refusal is 0, or 1 where the driver counts what was found rather than what was changed.
        mark = await _seen(to, resource)
        passed = mark is not None and mark == (mine.token, mine.id)
    else:
        passed = (await _ask(to, "check", resource, named)).touched == 1
    if not passed:
        raise refusal(resource, mine, await _seen(to, resource))


async def _need_transaction(to: Link, what: str, resource: str | None) -> None:
    if await to.commits_each():
        raise FencelockError(
            f"{what} needs a transaction, and this connection commits each statement by itself: {to.begin}",
            resource,
        )


async def _token(to: Link, resource: str) -> int | None:
    return token_of(await _seen(to, resource))


async def _rebase(to: Link, resource: str, token: int, reason: str) -> None:
    before = await _seen(to, resource)
    await _ask(to, "move", resource, {"resource": resource, "token": token})
    tell_moved(resource, token_of(before), token, reason)


async def _collect(to: Link, floor: int) -> int:
    await _need_transaction(to, "the collection of marks", None)
    if to.dialect == POSTGRESQL:
        await _ask(to, "hold", "", {})
    # In this order: on MySQL it waits for the checks that are under way, and they for it.
    await _ask(to, "raise", "", {"token": floor})
    count = (await _ask(to, "collect", "", {"token": floor})).touched
    in_force = await _seen(to, "")
    tell_collected(count, floor if in_force is None else in_force.token)
    return count


async def _create(to: Link) -> None:
    for statement in schema(to.dialect):
        await to.execute(statement)


async def _restore(to: Link) -> None:
    if to.dialect == MYSQL:
        await to.execute(statements(MYSQL)["restore"])


async def _seen(to: Link, resource: str) -> Mark | None:
    rows = (await _ask(to, "seen", resource, {"resource": resource})).rows
    mark = Mark(int(rows[0][0]), str(rows[0][1])) if rows else NOWHERE
    return None if mark == NOWHERE else mark


async def _ask(to: Link, name: str, resource: str, named: dict[str, Any]) -> Answer:
    statement = statements(to.dialect)[name]
    try:
        return await to.execute(statement, named)
    except Exception as error:
        if not misses_table(error):
            raise
        if to.dialect != SQLITE:
            # Made here, it would end the caller's transaction on MySQL, and race with others on PostgreSQL.
            raise FencelockError(
                "the table fencelock_fence is not there: run `fencelock schema --fence --apply --url …`, with the URL of "
                "this database, or have SqlFence().create(connection) run once when you deploy",
                resource or None,
            ) from error
    await _create(to)
    return await to.execute(statement, named)
