"""Reading queues, through the leader, so that all finished changes of other clients are seen; and forced releases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from kazoo.protocol.serialization import Delete, Exists, GetChildren, GetData, Sync

from fencelock.core.clock import wall_us
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.zookeeper.paths import Paths, QueueNode, decode_claim
from fencelock.engines.zookeeper.protocol import Reply
from fencelock.engines.zookeeper.queue import read_queue
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.engines.zookeeper.session_pool import SessionPool
from fencelock.model import Holder, Snapshot, Waiter, blockers

BATCH = 500
"""Nodes that are read in one round trip."""


class Inspector:
    """`inspect`, `names` and `force_release` of an engine."""

    def __init__(self, sessions: SessionPool, paths: Paths) -> None:
        self._sessions = sessions
        self._paths = paths

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name. Only the leader knows when a session expires: `expires_in` is the ttl."""
        session = await self._sessions.any()
        parent = self._paths.of(name)
        nodes = await read_queue(session, parent, MAX_REPLY_TIMEOUT)
        # A request that arrived late may have created a second node of a claim; its client removes it with the first.
        first = {node.id: node for node in reversed(nodes)}
        queue = [node for node in nodes if first[node.id] is node]
        holders: list[Holder] = []
        waiters: list[Waiter] = []
        now = wall_us()
        for node, (content, stat) in await self._read(session, parent, queue):
            data = decode_claim(content)
            if not blockers(queue, node):
                token = data.token_of(stat.czxid)
                holders.append(
                    Holder(data.owner, token, data.ttl, node.mode, node.limit, data.held_for(now), data.value)
                )
            else:
                waiters.append(Waiter(data.owner, data.ttl, node.mode, node.limit, data.value))
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names in use. ZooKeeper keeps the node of an unused name for about a minute."""
        session = await self._sessions.any()
        _, children = await session.request(Sync("/"), GetChildren(self._paths.locks, None), timeout=MAX_REPLY_TIMEOUT)
        steps = [] if children.no_node else children.get()
        names = sorted(name for name in map(unquote, steps) if name.startswith(prefix))
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            reads = (Exists(self._paths.of(name), None) for name in batch)
            replies = await session.request(*reads, timeout=MAX_REPLY_TIMEOUT)
            for name, reply in zip(batch, replies, strict=True):
                stat = reply.get()
                if stat is not None and stat.numChildren:
                    yield name

    async def force_release(self, name: str) -> int:
        """Delete the holders' nodes. Later claims have later nodes, and so higher tokens."""
        session = await self._sessions.any()
        parent = self._paths.of(name)
        queue = await read_queue(session, parent, MAX_REPLY_TIMEOUT)
        holders = [node for node in queue if not blockers(queue, node)]
        if not holders:
            return 0
        deletes = (Delete(f"{parent}/{node.name}", -1) for node in holders)
        replies = await session.request(*deletes, timeout=MAX_REPLY_TIMEOUT)
        return sum(not reply.no_node and bool(reply.get()) for reply in replies)

    async def _read(
        self, session: ZooKeeperSession, parent: str, nodes: list[QueueNode]
    ) -> list[tuple[QueueNode, Any]]:
        found: list[tuple[QueueNode, Reply]] = []
        for start in range(0, len(nodes), BATCH):
            batch = nodes[start : start + BATCH]
            reads = (GetData(f"{parent}/{node.name}", None) for node in batch)
            found += zip(batch, await session.request(*reads, timeout=MAX_REPLY_TIMEOUT), strict=True)
        return [(node, reply.get()) for node, reply in found if not reply.no_node]
