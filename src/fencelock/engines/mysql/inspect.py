"""Administration: the holders and waiters of a name, the names in use, and forced release."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from fencelock.core.runtime import Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.packets import ServerError
from fencelock.engines.mysql.pool import KILL_PAUSES, MySQLPool, decode, rows_of
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Holder, Snapshot, Waiter


class Administration:
    """The methods of the engine for administrators. Sessions of other users are visible only with the PROCESS privilege."""

    _runtime: Runtime
    _pool: MySQLPool

    async def inspect(self, name: str) -> Snapshot:
        """Return the holder of a name, and its waiters in the order of the queue."""
        key, mariadb = (await self._pool.names()).key(name), self._pool.mariadb
        find_holder = sql.lock_holder(key), sql.holders(f"h.lock_key = '{key}'", mariadb=mariadb)
        session, held, waiting = await self._pool.run(*find_holder, sql.waiters(key, mariadb=mariadb))
        holders = [_holder(row) for row in rows_of(held)]
        ((id,),) = rows_of(session)
        if id is not None and not holders:
            # The session was granted the lock just now, or its row was deleted. If the row does not appear, only the
            # session's id is known.
            session, held = await self._pool.run(*find_holder)
            ((id,),) = rows_of(session)
            holders = [_holder(row) for row in rows_of(held)]
            if id is not None and not holders:
                holders = [Holder(f"connection {decode(id)}", 0, 0.0)]
        waiters = [Waiter(label.owner, label.ttl, value=label.value) for label in _labels(rows_of(waiting))]
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that had a holder or a waiter at the time of the call, sorted."""
        space, mariadb = (await self._pool.names()).space, self._pool.mariadb
        held, waiting = await self._pool.run(
            sql.holders(f"h.space = '{space}'", mariadb=mariadb), sql.waiters(None, mariadb=mariadb)
        )
        found = {decode(row[0]) for row in rows_of(held)}
        found |= {label.name for label in _labels(rows_of(waiting)) if label.space == space}
        for name in sorted(found):
            if name.startswith(prefix):
                yield name

    async def force_release(self, name: str) -> int:
        """Kill the session that holds a name. A token is skipped first, so that every later token is greater."""
        key = (await self._pool.names()).key(name)
        *_, found = await self._pool.run(*sql.SKIP_TOKEN, sql.lock_holder(key))
        ((id,),) = rows_of(found)
        if id is None:
            return 0
        # Not repeated: after a restart of the server, the id may belong to another session.
        (value,) = await self._pool.run(sql.kill(int(id)), check=False, repeat=False)
        if isinstance(value, ServerError):
            if value.code == sql.NOT_THE_OWNER:
                raise EngineUnavailable(
                    f"{self._pool.address} refused: {value}; the holder of {name!r} logged in as another user, and ending "
                    "that session takes the right CONNECTION ADMIN, on MySQL CONNECTION_ADMIN and perhaps SYSTEM_USER",
                    name,
                ) from value
            if value.code != sql.NO_SUCH_THREAD:
                self._pool.check(value)
        for pause in KILL_PAUSES:
            await self._runtime.sleep(pause)
            (found,) = await self._pool.run(sql.lock_holder(key))
            if rows_of(found) != [(id,)]:
                return 1
        raise OutcomeUnknown(f"{self._pool.address}: the session that holds {name!r} was killed and does not end", name)


class _Label(NamedTuple):
    """What the comment in a waiter's statement says."""

    space: str
    ttl: float
    name: str
    owner: str
    value: str


def _labels(rows: list[tuple[bytes | None, ...]]) -> list[_Label]:
    """Return the labels of waiters, from the comments in their statements."""
    found = []
    for (info,) in rows:
        words = decode(info).partition("/* ")[2].split()
        if len(words) >= 6 and words[0] == sql.LABEL:
            texts = ["" if word == "-" else bytes.fromhex(word).decode(errors="replace") for word in words[3:6]]
            found.append(_Label(words[1], float(words[2]), *texts))
    return found


def _holder(row: tuple[bytes | None, ...]) -> Holder:
    """Return a row of `statements.holders` as a Holder."""
    _, owner, value, ttl, token, idle, held = row
    left = max(0.0, float(ttl or 0) - float(idle or 0))
    return Holder(decode(owner), int(token or 0), left, held_for=max(0.0, float(held or 0)), value=decode(value))
