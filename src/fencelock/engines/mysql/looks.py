"""Looking at the server: who holds a name, who waits for it, and ending the session of whoever holds it."""

from __future__ import annotations

from collections.abc import Callable

from fencelock.core.runtime import Runtime
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.links import PAUSES, Links, rows_of, sql_words
from fencelock.engines.mysql.packets import ServerError
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.model import Holder, Snapshot, Waiter


class Looks:
    """`inspect`, `names` and `force_release`. What other users' sessions do is seen with the PROCESS right only."""

    def __init__(self, runtime: Runtime, links: Links, names: Callable[[], sql.Names]) -> None:
        self._runtime = runtime
        self._links = links
        self._names = names

    async def inspect(self, name: str) -> Snapshot:
        """Return who holds a name, and who waits for it, in order."""
        await self._links.know()
        key, mariadb = self._names().key(name), self._links.mariadb
        user, held, waiting = await self._links.run(
            sql.is_mine(key),
            sql.holders(f"h.lock_key = '{key}'", mariadb=mariadb),
            sql.waiters(key, mariadb=mariadb),
        )
        holders = [_holder(row) for row in rows_of(held)]
        ((connection,),) = rows_of(user)
        if connection is not None and not holders:
            # It was let in a moment ago, or its row is gone: there is a holder, and that is all that can be said.
            again, held = await self._links.run(sql.is_mine(key), sql.holders(f"h.lock_key = '{key}'", mariadb=mariadb))
            ((connection,),) = rows_of(again)
            holders = [_holder(row) for row in rows_of(held)]
            if connection is not None and not holders:
                holders = [Holder(f"connection {sql_words(connection)}", 0, 0.0)]
        waiters = [Waiter(owner, float(ttl)) for _, ttl, _, owner in self._labels(rows_of(waiting))]
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def names(self, prefix: str) -> list[str]:
        """Return the names in use."""
        await self._links.know()
        space, mariadb = self._names().space, self._links.mariadb
        held, waiting = await self._links.run(
            sql.holders(f"h.space = '{space}'", mariadb=mariadb), sql.waiters(None, mariadb=mariadb)
        )
        found = {sql_words(row[1]) for row in rows_of(held)}
        found |= {name for where, _, name, _ in self._labels(rows_of(waiting)) if where == space}
        return sorted(name for name in found if name.startswith(prefix))

    async def force_release(self, name: str) -> int:
        """End the session that holds a name; a token is used up first, so that every later one is above."""
        await self._links.know()
        key = self._names().key(name)
        *_, found = await self._links.run(*sql.SKIP, sql.is_mine(key))
        ((connection,),) = rows_of(found)
        if connection is None:
            return 0
        # Not repeated: if the server was restarted, the number may belong to another session.
        (answer,) = await self._links.run(sql.kill(int(connection)), check=False, repeat=False)
        if isinstance(answer, ServerError):
            if answer.code == sql.NOT_THE_OWNER:
                raise EngineUnavailable(
                    f"{self._links.address} refused: {answer}; whoever holds {name!r} logged in as another user, and ending "
                    "that session takes the right CONNECTION ADMIN, on MySQL CONNECTION_ADMIN and perhaps SYSTEM_USER",
                    name,
                ) from answer
            if answer.code != sql.NO_SUCH_THREAD:
                self._links.check(answer)
        for pause in PAUSES:
            if pause:
                await self._runtime.sleep(pause)
            (found,) = await self._links.run(sql.is_mine(key))
            if rows_of(found) != [(connection,)]:
                return 1
        raise OutcomeUnknown(
            f"{self._links.address}: the session that holds {name!r} was killed and does not end", name
        )

    @staticmethod
    def _labels(rows: list[tuple[bytes | None, ...]]) -> list[tuple[str, str, str, str]]:
        """Return namespace, ttl, name and owner of those who wait, as their statements have them."""
        found = []
        for (info,) in rows:
            words = sql_words(info).partition("/* ")[2].split()
            if len(words) >= 5 and words[0] == sql.LABEL:
                owner = "" if words[4] == "-" else bytes.fromhex(words[4]).decode(errors="replace")
                found.append((words[1], words[2], bytes.fromhex(words[3]).decode(errors="replace"), owner))
        return found


def _holder(row: tuple[bytes | None, ...]) -> Holder:
    """Return a row of `statements.holders` as a holder."""
    _, _, owner, ttl, token, idle, held = row
    left = max(0.0, float(ttl or 0) - float(idle or 0))
    return Holder(sql_words(owner), int(token or 0), left, held_for=max(0.0, float(held or 0)))
