"""Records: a line each in an InnoDB table, by the server's clock; a write is bound to the version that it was decided on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fencelock.core.engine import never_repeated
from fencelock.core.records import Entry, Record, Written
from fencelock.engines.mysql import statements as sql
from fencelock.engines.mysql.links import Links, rows_of
from fencelock.engines.mysql.packets import Ok, ServerError


class MysqlRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, links: Links, names: Callable[[], Awaitable[sql.Names]]) -> None:
        self._links = links
        self._names = names

    async def read(self, key: str) -> Record | None:
        """Look."""
        there, now = await self._find((await self._names()).key(key))
        return None if there is None else there.seen(now)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Look, decide, and write if nobody else has meanwhile; else look again. No lock is held between the two."""
        name = (await self._names()).key(key)
        version = await self._links.mint()
        while True:
            there, now = await self._find(name)
            if there is not None and there.version == version:  # written, and yet the server said that it broke it off
                return Written(True, there.seen(now))
            if expect if there is None else not there.allows(now, token, expect):
                return Written(False, None if there is None else there.seen(now))
            line = sql.Line(name, key, value, token, version, ttl)
            statement = line.insert() if there is None else line.update(there.version, alive=there.ends > now)
            with never_repeated("the write", "Read it", key):
                (answer,) = await self._links.run(statement, check=False, repeat=False)
            if isinstance(answer, ServerError) and answer.code not in sql.INTERRUPTED:
                self._links.check(answer)
            if isinstance(answer, Ok) and answer.affected:
                await self._links.run(sql.FORGET, check=False)
                return Written(True, Entry(value, token, version, now + ttl).seen(now))

    async def _find(self, name: str) -> tuple[Entry | None, float]:
        """Return what there is, and the server's time."""
        (found,) = await self._links.run(sql.find_record(name))
        for now, value, token, version, ends in rows_of(found):
            return Entry(value, int(token or 0), int(version or 0), int(ends or 0) / 1e6), int(now or 0) / 1e6
        return None, 0.0
