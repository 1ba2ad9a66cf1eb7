"""inspect, names and force_release: the claims of a name, for people."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fencelock.core.clock import wall_us
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.keyspace import Keyspace, queue_of, read_numbering
from fencelock.engines.etcd.release import BATCH
from fencelock.errors import OutcomeUnknown
from fencelock.model import Holder, Snapshot, Waiter, blockers, held_for

if TYPE_CHECKING:
    from fencelock.engines.etcd.client import EtcdClient
    from fencelock.engines.etcd.grpc import EtcdConnection

PAGE = 1000
"""Keys that one request reads."""


class Inspection:
    """Reads the claims of all clients."""

    def __init__(self, client: EtcdClient, keyspace: Keyspace) -> None:
        self._client = client
        self._keyspace = keyspace

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        steps = [m.do_range(m.get_key(self._keyspace.about)), m.do_range(m.get_prefix(self._keyspace.queue(name)))]
        reply = m.read_txn(await self._client.request(m.TXN, m.txn([], steps)))
        read_numbering(reply.pairs(0), self._client.address)  # refuses the layout of another release
        queue = queue_of(reply.pairs(1))
        left = await self._seconds_left({entry.lease for entry in queue}) if queue else {}
        now = wall_us()
        holders, waiters = [], []
        for entry in queue:
            data, seconds = entry.data, left[entry.lease]
            if not blockers(queue, entry):
                held = held_for(data.granted or data.created, now)
                holders.append(Holder(data.owner, entry.token, seconds, data.mode, data.limit, held, data.value))
            else:
                waiters.append(Waiter(data.owner, seconds, data.mode, data.limit, data.value))
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def _seconds_left(self, leases: set[int]) -> dict[int, float]:
        """Return how many seconds each session has left, 0 if it has ended; all requests are sent together."""

        async def work(connection: EtcdConnection, timeout: float) -> dict[int, float]:
            calls = {lease: connection.start(m.TIME_TO_LIVE, m.lease_request(lease)) for lease in leases}
            return {
                lease: float(max(0, m.read_lease(await connection.finish(*call, timeout))[1]))
                for lease, call in calls.items()
            }

        return (await self._client.run(work, MAX_REPLY_TIMEOUT))[0]

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that have claims, in order. A name that changes meanwhile may or may not be there."""
        start = root = self._keyspace.names_from(prefix)
        found: set[str] = set()
        while True:
            request = m.get_prefix(root, limit=PAGE, keys_only=True, start=start)
            _, page = m.read_range(await self._client.request(m.RANGE, request))
            found.update(self._keyspace.name_of(pair.key) for pair in page.pairs)
            if not page.more or not page.pairs:
                break
            start = page.pairs[-1].key + b"\0"
        for name in sorted(found):
            if name.startswith(prefix):
                yield name

    async def force_release(self, name: str) -> int:
        """Delete the holders' claims; the claims behind them were created later, and so have higher tokens.

        Raises OutcomeUnknown if the request was sent twice and the second one found other holders: the first one may have
        removed them, and a repetition would remove the next holder.
        """
        while True:
            request = m.get_prefix(self._keyspace.queue(name))
            _, found = m.read_range(await self._client.request(m.RANGE, request))
            queue = queue_of(found.pairs)
            holders = [entry for entry in queue if not blockers(queue, entry)][:BATCH]
            if not holders:
                return 0
            body = m.txn(
                [m.is_created_at(entry.key, entry.create_revision) for entry in holders],
                [m.do_delete(entry.key) for entry in holders],
            )
            data, sent = await self._client.request_counted(m.TXN, body)
            if m.read_txn(data).succeeded:
                return len(holders)
            if sent > 1:
                raise OutcomeUnknown(
                    f"etcd at {self._client.address}: no reply to a request that may have released {name!r} by force",
                    name,
                )
