"""Records on ZooKeeper: one node each, written over only in the version that was read.

A record's end is a time on the wall clock of whoever wrote it: ZooKeeper as it comes has neither a clock to ask nor nodes
that end by themselves. A record that ran out is gone for readers; its node is removed when somebody next sees it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode

from kazoo.exceptions import BadVersionError
from kazoo.protocol.serialization import Create2, Delete, GetData, SetData, Sync

from fencelock.core.clock import wall_us
from fencelock.core.engine import never_repeated
from fencelock.core.records import Entry, Record, Written
from fencelock.engines.zookeeper.layout import Paths, escape
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.sessions import Sessions
from fencelock.errors import EngineUnavailable

PATIENCE = 5.0
TRIES = 50
"""How often others may be faster before that is taken for a fault."""


class ZooKeeperRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, sessions: Sessions, paths: Paths) -> None:
        self._sessions = sessions
        self._folder = f"{paths.root}/records"
        self._layout = paths.layout

    async def read(self, key: str) -> Record | None:
        """Look, by way of the leader."""
        link = (await self._sessions.any()).handle
        entry, _ = await self._look(link, f"{self._folder}/{escape(key)}")
        return None if entry is None else entry.seen(_now())

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Look, and write over what was seen; again if somebody else was faster."""
        link = (await self._sessions.any()).handle
        path = f"{self._folder}/{escape(key)}"
        for _ in range(TRIES):
            entry, version = await self._look(link, path)
            now = _now()
            if not (not expect if entry is None else entry.allows(now, token, expect)):
                return Written(False, None if entry is None else entry.seen(now))
            text = None if value is None else b64encode(value).decode()
            content = json.dumps([text, token, now + ttl]).encode()
            if version is None:
                with never_repeated("the write", "Read it", key):
                    (answer,) = await link.request(Create2(path, content, link.acl, 0), patience=PATIENCE)
                if answer.missing:
                    (made,) = await link.request(Create2(self._folder, b"", link.acl, 0), patience=PATIENCE)
                    if made.missing:
                        await self._sessions.settle(link, PATIENCE)
                    elif not made.existed:
                        made.get()
                    continue
            else:
                with never_repeated("the write", "Read it", key):
                    (answer,) = await link.request(SetData(path, content, version), patience=PATIENCE)
            if answer.existed or answer.missing or isinstance(answer.error, BadVersionError):
                continue
            stat = answer.get()[1] if version is None else answer.get()
            return Written(True, Entry(value, token, link.layout.token(stat.mzxid), now + ttl).seen(now))
        raise EngineUnavailable(f"the record {key!r} is written by so many that there is no getting through")

    async def _look(self, link: Link, path: str) -> tuple[Entry | None, int | None]:
        """Return what is there and the node's version; None and None if there is no node."""
        asked = Sync(path), GetData(path, None), GetData(self._layout, None)
        _, found, under = await link.request(*asked, patience=PATIENCE)
        if found.missing:
            return None, None
        content, stat = found.get()
        if not link.is_under(under, stat.mzxid):
            await self._sessions.settle(link, PATIENCE)
        text, token, ends = json.loads(content)
        entry = Entry(None if text is None else b64decode(text), token, link.layout.token(stat.mzxid), ends)
        if entry.ends <= _now():
            (gone,) = await link.request(Delete(path, stat.version), patience=PATIENCE)
            if gone.error is None:
                return entry, None
        return entry, stat.version


def _now() -> float:
    return wall_us() / 1e6
