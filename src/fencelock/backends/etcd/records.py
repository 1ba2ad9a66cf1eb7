"""Records on etcd: one key each, under a lease of its own that ends it, written over only as it was read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import ceil
from os import urandom
from typing import Any

from fencelock.backends.etcd.layout import About, Layout
from fencelock.backends.etcd.messages import (
    EQUAL,
    GRANT,
    RANGE,
    TIME_TO_LIVE,
    TXN,
    created,
    do_put,
    find,
    grant,
    of_lease,
    put,
    read_lease,
    read_range,
    read_txn,
    txn,
    unchanged,
)
from fencelock.core.backend import never_repeated
from fencelock.core.records import Entry, Record, Written
from fencelock.errors import EngineUnavailable

TRIES = 50
"""How often others may be faster before that is taken for a fault."""
FORGOTTEN, KEPT = b"-", b"="


class EtcdRecords:
    """`fencelock.core.records.Records`."""

    def __init__(
        self,
        layout: Layout,
        ask: Callable[[str, bytes], Coroutine[Any, Any, bytes]],
        ask_once: Callable[[str, bytes], Coroutine[Any, Any, bytes]],
        about: Callable[[], Coroutine[Any, Any, About]],
    ) -> None:
        self._layout = layout
        self._ask = ask
        self._ask_once = ask_once
        self._about = about

    async def read(self, key: str) -> Record | None:
        """Look."""
        entry, _ = await self._look(await self._about(), self._layout.record(key))
        return None if entry is None else entry.seen(0)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Look, and write over what was seen; again if somebody else was faster."""
        at = self._layout.record(key)
        content = b"%d " % token + (FORGOTTEN if value is None else KEPT + value)
        for _ in range(TRIES):
            about = await self._about()
            entry, changed = await self._look(about, at)
            if expect if entry is None else not entry.allows(0, token, expect):
                return Written(False, None if entry is None else entry.seen(0))
            lease = int.from_bytes(urandom(8), "big") >> 1 or 1
            _, left = read_lease(await self._ask(GRANT, grant(lease, ceil(ttl))))
            compares = [unchanged(at, changed), created(self._layout.about, EQUAL, about.revision)]
            with never_repeated("the write", "Read it", key):
                answer = read_txn(await self._ask_once(TXN, txn(compares, [do_put(put(at, content, lease))])))
            if answer.succeeded:
                return Written(True, Entry(value, token, about.token(answer.header.revision), float(left)).seen(0))
        raise EngineUnavailable(f"the record {key!r} is written by so many that there is no getting through")

    async def _look(self, about: About, at: bytes) -> tuple[Entry | None, int]:
        """Return what is there, as if it were zero o'clock now, and the revision at which it was written."""
        _, found = read_range(await self._ask(RANGE, find(at)))
        if not found.pairs:
            return None, 0
        (pair,) = found.pairs
        # A lease that is over is there for up to a second more.
        _, left = read_lease(await self._ask(TIME_TO_LIVE, of_lease(pair.lease)))
        token, _, content = pair.value.partition(b" ")
        value = content[1:] if content.startswith(KEPT) else None
        return Entry(value, int(token), about.token(pair.changed), float(left)), pair.changed
