"""Records on etcd: one key each, under a lease of its own that ends it, written over only as it was read."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import ceil
from os import urandom
from typing import TYPE_CHECKING, Any

from fencelock.core.records import Entry, Record, Written
from fencelock.engines.etcd.layout import About, Layout
from fencelock.engines.etcd.messages import (
    EQUAL,
    GRANT,
    RANGE,
    REVOKE,
    TIME_TO_LIVE,
    TXN,
    created,
    do_put,
    do_range,
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
from fencelock.errors import EngineUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.engines.etcd.asking import Asking

TRIES = 50
"""How often others may be faster before that is taken for a fault."""
FORGOTTEN, KEPT = b"-", b"="


class EtcdRecords:
    """`fencelock.core.records.Records`."""

    def __init__(
        self,
        layout: Layout,
        asking: Asking,
        about: Callable[[], Coroutine[Any, Any, About]],
    ) -> None:
        self._layout = layout
        self._asking = asking
        self._ask = asking.request
        self._about = about

    async def read(self, key: str) -> Record | None:
        """Look."""
        entry, _, _ = await self._look(await self._about(), self._layout.record(key))
        return None if entry is None else entry.seen(0)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Look, and write over what was seen; again if somebody else was faster."""
        at = self._layout.record(key)
        content = b"%d " % token + (FORGOTTEN if value is None else KEPT + value)
        for _ in range(TRIES):
            about = await self._about()
            entry, changed, replaced = await self._look(about, at)
            if expect if entry is None else not entry.allows(0, token, expect):
                return Written(False, None if entry is None else entry.seen(0))
            lease = int.from_bytes(urandom(8), "big") >> 1 or 1
            _, left = read_lease(await self._ask(GRANT, grant(lease, ceil(ttl))))
            compares = [unchanged(at, changed), created(self._layout.about, EQUAL, about.revision)]
            body = txn(compares, [do_put(put(at, content, lease))], [do_range(find(at))])
            said, tries = await self._asking.ask_counted(TXN, body)
            answer = read_txn(said)
            revision = answer.header.revision if answer.succeeded else 0
            if not revision and tries > 1:  # an earlier try may have been carried out: it has a lease of its own
                found = answer.found(0)
                if not found or found[0].lease != lease:
                    raise OutcomeUnknown(
                        f"no reply to a write of the record {key!r}, which has changed since: it may have been written in "
                        "between; read it again",
                        key,
                    )
                revision = found[0].changed
            await self._revoke(replaced if revision else lease)
            if revision:
                return Written(True, Entry(value, token, about.token(revision), float(left)).seen(0))
        raise EngineUnavailable(f"the record {key!r} is written by so many that there is no getting through")

    async def _revoke(self, lease: int) -> None:
        """Revoke a lease without a key: it would exist for the rest of its ttl, which may be years."""
        if lease:
            with suppress(EngineUnavailable):
                await self._ask(REVOKE, of_lease(lease))

    async def _look(self, about: About, at: bytes) -> tuple[Entry | None, int, int]:
        """Return what is there, as if it were zero o'clock now, the revision at which it was written, and its lease."""
        seen = 0
        while True:
            _, found = read_range(await self._ask(RANGE, find(at)))
            if not found.pairs:
                return None, 0, 0
            (pair,) = found.pairs
            # A lease that is over is there for up to a second more.
            _, left = read_lease(await self._ask(TIME_TO_LIVE, of_lease(pair.lease)))
            if left > 0 or pair.changed == seen:
                break
            seen = (
                pair.changed
            )  # another writer may have replaced the record and revoked its lease meanwhile: look again
        token, _, content = pair.value.partition(b" ")
        value = content[1:] if content.startswith(KEPT) else None
        return Entry(value, int(token), about.token(pair.changed), float(left)), pair.changed, pair.lease
