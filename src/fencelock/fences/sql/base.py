"""What the SQL fences of both APIs share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from fencelock.errors import FencelockError, InvalidArgument
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark, TokenPair
from fencelock.fences.sql.statements import schema, statements
from fencelock.runtime.both_apis import Api, both_apis
from fencelock.sqlio import (
    MYSQL,
    POSTGRESQL,
    SQLITE,
    ConnectionAdapter,
    Result,
    adapt,
    is_missing_table,
    require_transaction,
)
from fencelock.sqlio.borrowed import borrowed_connection, check_connect

DEFAULT_IDLE = 30.0
"""Seconds that a transaction may be idle; under a lease with a ttl above 15 s, twice the ttl."""

MIN_IDLE, MAX_IDLE = 0.1, 2 * 86400.0
"""What a caller may choose. The maximum is twice the longest ttl of a lease."""

NO_MARK = HighWaterMark(0, "")
"""The row of min_token in a new table on MySQL: it refuses nothing."""

C = TypeVar("C", contravariant=True)


class BaseSqlFence(Api, Generic[C]):
    """What both APIs share."""

    def __init__(self, *, idle_timeout: bool | float = True) -> None:
        if not isinstance(idle_timeout, bool) and not MIN_IDLE <= idle_timeout <= MAX_IDLE:
            raise InvalidArgument(
                f"idle_timeout is True, False, or the seconds for which a transaction may be idle, {MIN_IDLE} to "
                f"{MAX_IDLE:.0f}; not {idle_timeout!r}"
            )
        self._idle_timeout = idle_timeout

    @both_apis
    async def check(self, connection: C, lease: Fenced, resource: str | None = None) -> None:
        """Raise StaleToken unless the lease is the newest that this resource has accepted, and LeaseLost if it has ended.

        Without a resource, it is the lock's name. Call it first in a transaction, before the first read. It refuses a
        connection that commits every statement by itself, as the lock on the fence's row would end before the write.

        A holder that is stopped inside its transaction delays the next one. PostgreSQL and MariaDB therefore end a
        transaction, and its connection, once it has been idle for 30 seconds or twice the lease's ttl, whichever is more:
        the driver raises its own error at the next statement (docs/fences/sql.md shows them). `SqlFence(idle_timeout=5)` sets
        5 seconds; `idle_timeout=False` sets no limit. On MySQL and SQLite the next holder waits.

        A TokenPair has no clock: as long as no newer holder has come, it is accepted even if its lease has ended. The fence
        does not notice two resources mixed up, writes without a check, or reads before it.
        """
        pair, name = core.named_credentials(lease, resource)
        adapter = self._adapt(connection)
        await require_transaction(adapter, f"the fence of {name!r}", name)
        if not await _advance(adapter, name, pair, self._idle_seconds(lease)):
            raise core.refusal(name, pair, await _get_mark(adapter, name))

    @both_apis
    async def token(self, connection: C, resource: str) -> int | None:
        """Return the lowest token that the resource accepts: the highest one so far, or `min_token`, or None."""
        return core.token_of(await _get_mark(self._adapt(connection), core.check_resource(resource)))

    @both_apis
    async def rebase(self, connection: C, resource: str, token: int, *, reason: str) -> None:
        """Move the fence of a resource on purpose, down or up, in the caller's transaction. Logs the reason.

        It accepts every token from this one on. For locks that moved to an engine whose clock is behind. A holder of an older
        lease is accepted, too: make sure that there is none.
        """
        adapter, to, why = self._adapt(connection), core.check_token(token), core.check_reason(reason)
        before = await _get_mark(adapter, core.check_resource(resource))
        await _execute(adapter, "set_mark", resource, {"resource": resource, "token": to})
        core.log_rebase(resource, core.token_of(before), to, why)

    @both_apis
    async def rebase_all(self, connection: C, token: int, *, reason: str) -> int:
        """Move the fences of all resources, and `min_token`, to one token, in the caller's transaction. Logs the reason.

        Return the number of resources.
        """
        adapter, to, why = self._adapt(connection), core.check_token(token), core.check_reason(reason)
        await _execute(adapter, "set_all_marks", "", {"token": to})
        count = int((await _execute(adapter, "count_marks", "", {})).rows[0][0])
        core.log_rebase_all(count, to, why)
        return count

    @both_apis
    async def prune(self, connection: C, min_token: int) -> int:
        """Remove the marks below `min_token`, in the caller's transaction; return their number.

        From then on, a resource without a mark refuses tokens below `min_token`. Choose one below every token that may still
        be in use: the token of a day ago is `int((time.time() - 86400) * 1e6)`.

        One call removes them all. It waits for the transactions that have checked, and every check waits for its commit (on
        SQLite every other writer does): commit at once, also if it returns 0.
        """
        adapter = self._adapt(connection)
        token = {"token": core.check_token(min_token)}
        await require_transaction(adapter, "prune")
        if adapter.dialect == POSTGRESQL:
            await _execute(adapter, "lock_table", "", {})
        # In this order: on MySQL the first statement waits for the checks in progress, and new checks wait for it.
        await _execute(adapter, "raise_min_token", "", token)
        count = (await _execute(adapter, "prune", "", token)).rowcount
        core.log_prune(count, core.token_of(await _get_mark(adapter, "")) or min_token)
        return count

    @both_apis
    async def create(self, connection: C) -> None:
        """Create the table unless it exists. On MySQL that commits an open transaction: do it at deployment."""
        await _create_table(self._adapt(connection))

    @both_apis
    async def restore(self, connection: C) -> None:
        """On MariaDB, reset the limit on idle transactions that checks have set on this connection; elsewhere do nothing.

        In PostgreSQL the limit ends with the transaction. MariaDB can set it only for the connection, where it stays until
        the next check. Call this after the commit when the connection goes back to a pool.
        """
        adapter = self._adapt(connection)
        if adapter.dialect == MYSQL:
            await adapter.execute(statements(MYSQL)["restore"])

    def _adapt(self, connection: C) -> ConnectionAdapter:
        return adapt(connection, "fences", awaited=self._awaited)

    def _idle_seconds(self, lease: object) -> float | None:
        """Return the seconds for which a transaction under this lease may be idle, or None for no limit.

        This does not depend on the lease's remaining time: a renewal must not end its transaction.
        """
        if self._idle_timeout is False:
            return None
        if self._idle_timeout is not True:
            return self._idle_timeout
        ttl = getattr(lease, "ttl", None)  # a TokenPair has none, and another service's lease may have anything there
        if not isinstance(ttl, int | float) or ttl != ttl:
            return DEFAULT_IDLE
        return min(max(DEFAULT_IDLE, 2 * ttl), MAX_IDLE)


class BaseStandaloneSqlFence(Api):
    """What both APIs share."""

    def __init__(self, connect: Callable[[], Any], fence: BaseSqlFence[Any]) -> None:
        self._connect = check_connect(connect, "StandaloneSqlFence")
        self._fence = fence

    @both_apis
    async def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost."""
        core.named_credentials(lease, resource)  # errors come before a connection is opened
        async with borrowed_connection(self._connect, "fences", awaited=self._awaited) as connection:
            adapter = adapt(connection, "fences", awaited=self._awaited)
            try:
                await adapter.begin()
                await self._call(self._fence.check, connection, lease, resource)
                await adapter.commit()
            except BaseException:
                with suppress(Exception):  # the connection may be what failed
                    await adapter.rollback()
                raise
            finally:
                with suppress(Exception):
                    await self._call(self._fence.restore, connection)  # it may go back to a pool


async def _advance(adapter: ConnectionAdapter, resource: str, pair: TokenPair, idle: float | None) -> bool:
    """Set the mark to this claim and lock its row; return False if the mark does not admit the token."""
    args: dict[str, Any] = {"resource": resource, "token": pair.token, "id": pair.id}
    if adapter.dialect == POSTGRESQL:
        args["idle"] = 0 if idle is None else int(idle * 1000)
        return bool((await _execute(adapter, "check", resource, args)).rows[0][0] == 1)
    if adapter.dialect == SQLITE:
        return (await _execute(adapter, "check", resource, args)).rowcount == 1
    # MariaDB counts in whole seconds, and 0 is no limit.
    args["idle"] = 0 if idle is None else max(1, int(idle))
    statement = "check_without_timeout" if idle is None else "check"
    if (await _execute(adapter, statement, resource, args)).rowcount == 2:
        return True
    # 1 is a new mark; a refusal is 0, or 1 if the driver counts the rows that were found instead of changed.
    return await _get_mark(adapter, resource) == (pair.token, pair.id)


async def _create_table(adapter: ConnectionAdapter) -> None:
    for statement in schema(adapter.dialect):
        await adapter.execute(statement)


async def _get_mark(adapter: ConnectionAdapter, resource: str) -> HighWaterMark | None:
    rows = (await _execute(adapter, "get_mark", resource, {"resource": resource})).rows
    mark = HighWaterMark(int(rows[0][0]), str(rows[0][1])) if rows else NO_MARK
    return None if mark == NO_MARK else mark


async def _execute(adapter: ConnectionAdapter, name: str, resource: str, args: dict[str, Any]) -> Result:
    """Run a statement. If the table is missing, create it on SQLite; elsewhere raise an error that says how to create it."""
    statement = statements(adapter.dialect)[name]
    try:
        return await adapter.execute(statement, args)
    except Exception as error:
        if not is_missing_table(error):
            raise
        if adapter.dialect != SQLITE:
            # Creating it here would commit the caller's transaction on MySQL, and race with others on PostgreSQL.
            raise FencelockError(
                "the table fencelock_fence does not exist: run `fencelock schema --fence --apply --url …`, with the URL of "
                "this database, or call SqlFence().create(connection) once when you deploy",
                resource or None,
            ) from error
    await _create_table(adapter)
    return await adapter.execute(statement, args)
