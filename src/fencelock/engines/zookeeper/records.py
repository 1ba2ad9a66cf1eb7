"""Records on ZooKeeper: one node each, replaced only in the version that was read.

A record expires by the wall clock of its writer: ZooKeeper's defaults offer neither a clock to read nor nodes that expire. An
expired record is gone for readers; the next client that sees its node removes it. The version of a record is the transaction
that wrote it, counted from the origin in the layout: the origin never changes, unlike the base of tokens.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode

from kazoo.protocol.serialization import Create2, Delete, GetData, SetData, Sync

from fencelock.core.clock import wall_us
from fencelock.core.engine import MAX_REPLY_TIMEOUT, never_repeated
from fencelock.core.records import Record, StoredRecord, Written
from fencelock.engines.zookeeper.namespace import Namespace, read_origin
from fencelock.engines.zookeeper.paths import escape
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.engines.zookeeper.session_pool import SessionPool
from fencelock.errors import EngineUnavailable

ATTEMPTS = 50
"""How often other writers may be faster before that counts as a fault."""


class ZooKeeperRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, sessions: SessionPool, namespace: Namespace) -> None:
        self._sessions = sessions
        self._namespace = namespace
        self._folder = namespace.paths.records
        self._layout = namespace.paths.layout

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, read through the leader, or None."""
        session = await self._sessions.any()
        entry, _, _ = await self._look(session, f"{self._folder}/{escape(key)}")
        return None if entry is None else entry.seen(_now())

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Read the record and replace it; repeat if another writer was faster."""
        session = await self._sessions.any()
        path = f"{self._folder}/{escape(key)}"
        for _ in range(ATTEMPTS):
            entry, node_version, origin = await self._look(session, path)
            now = _now()
            if not (not expect if entry is None else entry.allows(now, token, expect)):
                return Written(False, None if entry is None else entry.seen(now))
            text = None if value is None else b64encode(value).decode()
            content = json.dumps([text, token, now + ttl]).encode()
            request = (
                Create2(path, content, session.acl, 0) if node_version is None else SetData(path, content, node_version)
            )
            with never_repeated("the write", "Read it", key):
                (reply,) = await session.request(request, timeout=MAX_REPLY_TIMEOUT)
            if reply.no_node and node_version is None:
                await self._namespace.load(session, MAX_REPLY_TIMEOUT)
            elif not reply.node_exists and not reply.no_node and not reply.bad_version:
                stat = reply.get()[1] if node_version is None else reply.get()
                return Written(True, StoredRecord(value, token, origin + stat.mzxid, now + ttl).seen(now))
        raise EngineUnavailable(f"the record {key!r} has too many writers at the same time")

    async def clock(self) -> int:
        """Return the leader's wall clock in µs, which a write shows: rate limits use it, so clients' clocks may differ."""
        session = await self._sessions.any()
        for _ in range(ATTEMPTS):
            (reply,) = await session.request(SetData(self._folder, b"", -1), timeout=MAX_REPLY_TIMEOUT)
            if not reply.no_node:
                return int(reply.get().mtime) * 1000
            await self._namespace.load(session, MAX_REPLY_TIMEOUT)
        raise EngineUnavailable(f"{self._folder} cannot be used: another client keeps removing it")

    async def _look(self, session: ZooKeeperSession, path: str) -> tuple[StoredRecord | None, int | None, int]:
        """Return the record, its node's version (None without a node), and the origin of record versions."""
        reads = Sync(path), GetData(path, None), GetData(self._layout, None)
        _, found, layout = await session.request(*reads, timeout=MAX_REPLY_TIMEOUT)
        if layout.no_node:
            await self._namespace.load(session, MAX_REPLY_TIMEOUT)
            (layout,) = await session.request(GetData(self._layout, None), timeout=MAX_REPLY_TIMEOUT)
        origin = read_origin(layout.get()[0], self._layout)
        if found.no_node:
            return None, None, origin
        content, stat = found.get()
        text, token, ends = json.loads(content)
        entry = StoredRecord(None if text is None else b64decode(text), token, origin + stat.mzxid, ends)
        if entry.ends <= _now():
            (removed,) = await session.request(Delete(path, stat.version), timeout=MAX_REPLY_TIMEOUT)
            if removed.error is None:
                return entry, None, origin
        return entry, stat.version, origin


def _now() -> float:
    return wall_us() / 1e6
