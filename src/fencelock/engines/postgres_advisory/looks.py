"""Looking at the server's table of locks, and ending the sessions of whoever holds one."""

from __future__ import annotations

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.postgres.links import Links
from fencelock.engines.postgres_advisory import statements as sql
from fencelock.model import Holder, Snapshot, Waiter, held_for


class Looks:
    """`inspect`, `names` and `force_release`."""

    def __init__(self, links: Links, namespace: str) -> None:
        self._links = links
        self._namespace = namespace

    async def inspect(self, name: str) -> Snapshot:
        """Return who holds a name, and who waits for it."""
        rows = await self._links.run(sql.INSPECT, (sql.key(self._namespace, name),), MAX_REPLY_TIMEOUT)
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
        return [
            _text(name) for (name,) in await self._links.run(sql.NAMES, (self._namespace, prefix), MAX_REPLY_TIMEOUT)
        ]

    async def force_release(self, name: str) -> int:
        """End the sessions of the holders. Never twice: the second time it would be whoever was let in by the first."""
        _, ((dropped,),) = await self._links.timed(sql.EVICT, (sql.key(self._namespace, name),), 2 * MAX_REPLY_TIMEOUT)
        return int(dropped or 0)


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="replace")
