"""Records on etcd: one key each, attached to a lease of its own that ends it; a write compares the version that it read."""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING

from fencelock.core.clock import wall_us
from fencelock.core.records import Record, StoredRecord, Written
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.keyspace import Keyspace, Numbering, read_numbering
from fencelock.engines.etcd.session import new_lease_id
from fencelock.errors import EngineUnavailable, OutcomeUnknown

if TYPE_CHECKING:
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.token_base import TokenBase

MAX_TRIES = 50
"""How often other writers may be faster before a write fails."""
DELETED, STORED = b"-", b"="
LONG_LEASE = 86400.0
"""Seconds. A longer lease that is no longer needed is revoked: etcd would keep it for years. A shorter one runs out."""


class EtcdRecords:
    """`fencelock.core.records.Records`. A version is the namespace's fixed origin plus the record's mod revision."""

    def __init__(self, client: EtcdClient, keyspace: Keyspace, token_base: TokenBase) -> None:
        self._client = client
        self._keyspace = keyspace
        self._token_base = token_base

    @staticmethod
    async def clock() -> int:
        """Return the time in µs, for rate limits. It is this client's: etcd has no clock that clients can read."""
        return wall_us()

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, or None."""
        _, pair, entry = await self._read(self._keyspace.record(key))
        return None if pair is None or entry is None else entry.seen(0)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Read the record and replace it if it is unchanged; again if another writer was faster."""
        record = self._keyspace.record(key)
        content = b"%d " % token + (DELETED if value is None else STORED + value)
        for _ in range(MAX_TRIES):
            numbering, pair, entry = await self._read(record)
            if expect if entry is None else not entry.allows(0, token, expect):
                return Written(False, None if entry is None else entry.seen(0))
            lease = new_lease_id()
            _, left = m.read_lease(await self._client.request(m.GRANT, m.grant_lease(lease, ceil(ttl))))
            compares = [
                m.is_modified_at(record, 0 if pair is None else pair.mod_revision),
                m.is_modified_at(self._keyspace.about, numbering.mod_revision),
            ]
            body = m.txn(compares, [m.do_put(record, content, lease)], [m.do_range(m.get_key(record))])
            data, sent = await self._client.request_counted(m.TXN, body)
            reply = m.read_txn(data)
            revision = reply.header.revision if reply.succeeded else 0
            if not revision and sent > 1:  # the first request may have written it: its lease shows that
                found = reply.pairs(0)
                if not found or found[0].lease != lease:
                    raise OutcomeUnknown(
                        f"no reply to a write of the record {key!r}, which has changed since: it may have been written in "
                        "between; read it again",
                        key,
                    )
                revision = found[0].mod_revision
            if revision:
                if pair is not None and entry is not None and entry.ends > LONG_LEASE:
                    await self._revoke(pair.lease)
                return Written(True, StoredRecord(value, token, numbering.origin + revision, float(left)).seen(0))
            if ttl > LONG_LEASE:
                await self._revoke(lease)
        raise EngineUnavailable(f"the record {key!r} is written by too many others at the same time")

    async def _revoke(self, lease: int) -> None:
        with suppress(EngineUnavailable):
            await self._client.request(m.REVOKE, m.lease_request(lease))

    async def _read(self, record: bytes) -> tuple[Numbering, m.KeyValue | None, StoredRecord | None]:
        """Return the content of the key `about`, the stored key, and its entry as if the time were 0 now."""
        seen = 0
        while True:
            steps = [m.do_range(m.get_key(self._keyspace.about)), m.do_range(m.get_key(record))]
            reply = m.read_txn(await self._client.request(m.TXN, m.txn([], steps)))
            numbering = read_numbering(reply.pairs(0), self._client.address)
            if numbering is None:
                await self._token_base.read()  # creates it
                continue
            if not (pairs := reply.pairs(1)):
                return numbering, None, None
            (pair,) = pairs
            # A lease that has expired may exist for another second.
            _, left = m.read_lease(await self._client.request(m.TIME_TO_LIVE, m.lease_request(pair.lease)))
            if left > 0 or pair.mod_revision == seen:
                break
            seen = pair.mod_revision  # read again: another writer may have replaced the record and revoked its lease
        token, _, content = pair.value.partition(b" ")
        value = content[1:] if content.startswith(STORED) else None
        return numbering, pair, StoredRecord(value, int(token), numbering.origin + pair.mod_revision, float(left))
