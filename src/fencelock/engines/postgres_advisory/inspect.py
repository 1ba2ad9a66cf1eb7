"""Inspecting the server's table of locks, and terminating the sessions of holders."""

from __future__ import annotations

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.model import Holder, Snapshot, Waiter, held_for


class Inspector:
    """`inspect`, `names` and `force_release`."""

    def __init__(self, pool: PostgresPool, namespace: str) -> None:
        self._pool = pool
        self._namespace = namespace

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        rows = await self._pool.run(sql.INSPECT, (sql.key(self._namespace, name),), MAX_REPLY_TIMEOUT)
        return Snapshot(
            name,
            tuple(
                Holder(
                    _text(owner),
                    int(token),
                    float(left or 0),
                    shared == b"t",
                    held_for=held_for(int(token), float(clock or 0)),
                )
                for owner, token, left, shared, clock in rows
                if token is not None
            ),
            tuple(
                Waiter(_text(owner), float(left or 0), shared == b"t")
                for owner, token, left, shared, _ in rows
                if token is None
            ),
        )

    async def names(self, prefix: str) -> list[str]:
        """Return the names in use."""
        rows = await self._pool.run(sql.NAMES, (self._namespace, prefix), MAX_REPLY_TIMEOUT)
        return [_text(name) for (name,) in rows]

    async def force_release(self, name: str) -> int:
        """Terminate the sessions of the holders. It runs once: a second run would terminate the next holder."""
        key = sql.key(self._namespace, name)
        _, ((dropped,),) = await self._pool.run_once(sql.TERMINATE_HOLDERS, (key,), 2 * MAX_REPLY_TIMEOUT)
        return int(dropped or 0)


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
