"""What whoever only looks is told, by way of the leader, so that what others have done by now is seen; and force."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kazoo.protocol.serialization import Delete, Exists, GetData, Sync

from fencelock.engines.zookeeper import messages
from fencelock.engines.zookeeper.answers import Answer
from fencelock.engines.zookeeper.layout import Node, Paths, said, unescape
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.nodes import PATIENCE, queue_of
from fencelock.engines.zookeeper.sessions import Sessions
from fencelock.model import Admitted, Holder, Mode, Snapshot, Waiter, admit

BATCH = 500
"""Nodes that are asked for at once."""


class Looks:
    """`inspect`, `names` and `force_release` of an engine."""

    def __init__(self, sessions: Sessions, paths: Paths) -> None:
        self._sessions = sessions
        self._paths = paths

    async def inspect(self, name: str) -> Snapshot:
        """Return who holds a name and who waits for it. When a session runs out only the leader knows: their ttl is told."""
        link = (await self._sessions.any()).handle
        parent = self._paths.of(name)
        await self._sessions.settle(link, PATIENCE)
        queue = await queue_of(link, parent)
        holders: list[Holder] = []
        waiters: list[Waiter] = []
        for node, (content, stat) in await self._contents(link, parent, queue):
            ttl, owner = said(content)
            if isinstance(admit(queue, node), Admitted):
                holders.append(
                    Holder(owner, link.layout.token(stat.czxid), ttl, Mode.of(node.shared, node.limit), node.limit)
                )
            else:
                waiters.append(Waiter(owner, ttl, Mode.of(node.shared, node.limit), node.limit))
        return Snapshot(name, tuple(holders), tuple(waiters))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over the names in use. The node of one that nobody uses any more stays for a minute."""
        link = (await self._sessions.any()).handle
        _, found = await link.request(Sync("/"), messages.children(self._paths.locks), patience=PATIENCE)
        names = sorted(
            name for step in ([] if found.missing else found.get()) if (name := unescape(step)).startswith(prefix)
        )
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            answers = await link.request(*(Exists(self._paths.of(name), None) for name in batch), patience=PATIENCE)
            for name, answer in zip(batch, answers, strict=True):
                stat = answer.get()
                if stat is not None and stat.numChildren:
                    yield name

    async def force_release(self, name: str) -> int:
        """Drop the holders. Whoever comes next has a later node, and so a higher token."""
        link = (await self._sessions.any()).handle
        parent = self._paths.of(name)
        queue = await queue_of(link, parent)
        holders = [node for node in queue if isinstance(admit(queue, node), Admitted)]
        if not holders:
            return 0
        answers = await link.request(*(Delete(f"{parent}/{node.name}", -1) for node in holders), patience=PATIENCE)
        return sum(not answer.missing and bool(answer.get()) for answer in answers)

    async def _contents(self, link: Link, parent: str, nodes: list[Node]) -> list[tuple[Node, Any]]:
        found: list[tuple[Node, Answer]] = []
        for start in range(0, len(nodes), BATCH):
            batch = nodes[start : start + BATCH]
            asked = (GetData(f"{parent}/{node.name}", None) for node in batch)
            found += zip(batch, await link.request(*asked, patience=PATIENCE), strict=True)
        return [(node, answer.get()) for node, answer in found if not answer.missing]
