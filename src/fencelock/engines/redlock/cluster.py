"""The nodes of a Redlock. Every request goes to all of them at once; the nodes do not know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector, ServerError
from fencelock.engines.redlock.commands import Call
from fencelock.engines.redlock.node import CONNECT_TIMEOUT, Node
from fencelock.errors import EngineUnavailable, InvalidURL, OutcomeUnknown

MIN_TIMEOUT, MAX_TIMEOUT = 0.2, CONNECT_TIMEOUT
"""Seconds that a node has for its reply: a fifth of the ttl, within these bounds."""
STRAGGLER_TIMEOUT = 0.1
"""Seconds that a node has to connect once a majority is connected."""
POLL_INTERVAL = 0.002

Connections = list[RedisConnection | None]
"""One for each node; None for a node that cannot be reached or is not to be asked."""
Enough = Callable[[Sequence[Any]], bool]
"""Returns whether more replies would change nothing."""


class Cluster:
    """All nodes, and what a majority of them is."""

    def __init__(self, runtime: Runtime, connectors: Sequence[RedisConnector], prefix: str) -> None:
        self._runtime = runtime
        self._nodes = [Node(runtime, connector, prefix) for connector in connectors]
        self.majority = len(connectors) // 2 + 1
        self.started = False
        """Whether this client has tried to connect to the nodes."""
        self._run_ids: list[bytes | None] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    # ------------------------------------------------------------------ connections

    async def get(self, timeout: float, deadline: Deadline = NO_DEADLINE) -> Connections:
        """Return a connection to every node that can be reached, even if that is no majority. The caller puts them back."""
        connections: Connections = [None] * len(self._nodes)
        try:
            await self._fill(connections, timeout, deadline)
        except BaseException:
            self.put_back(connections)
            raise
        return connections

    async def replace_broken(self, connections: Connections, timeout: float, deadline: Deadline) -> None:
        """Replace the connections that do not work any more, and add those that are missing, in place."""
        for place, (node, connection) in enumerate(zip(self._nodes, connections, strict=True)):
            if connection is not None and not node.pool.usable(connection, timeout):
                connections[place] = None
                node.pool.discard(connection)
                node.pool.put_back(connection)  # as it is closed, the pool checks its other idle ones, too
        await self._fill(connections, timeout, deadline)

    async def _fill(self, connections: Connections, timeout: float, deadline: Deadline) -> None:
        """Get a connection for each node that has none.

        All missing connections are opened at the same time, in the background: a node that hangs delays no other. Without a
        majority, wait for as long as one may still come; with one, wait only for nodes that have just begun to connect.
        """
        now = self._runtime.now
        started = now()
        connect_timeout = CONNECT_TIMEOUT if self.started else FIRST_CONNECT_TIMEOUT + STRAGGLER_TIMEOUT
        until = started + deadline.at_most(connect_timeout)
        has_majority = False
        while missing := await self._get_missing(connections, timeout):
            if not has_majority and len(connections) - len(missing) >= self.majority:
                has_majority, until = True, min(until, now() + STRAGGLER_TIMEOUT)
            awaited = [node for node in missing if node.error is None] if has_majority else missing
            awaited_since = started - STRAGGLER_TIMEOUT if has_majority else -inf
            if now() >= until or not any(node.may_connect_soon(awaited_since) for node in awaited):
                break
            await self._runtime.sleep(POLL_INTERVAL)
        self.started = True
        self._refuse_duplicates()

    async def _get_missing(self, connections: Connections, timeout: float) -> list[Node]:
        """Get the connections that are ready; return the nodes that still have none."""
        missing = []
        for place, node in enumerate(self._nodes):
            if connections[place] is None:
                connection = connections[place] = node.get(timeout)
                if connection is None:
                    missing.append(node)
                else:
                    await node.send_pending_undos(connection)
        return missing

    def _refuse_duplicates(self) -> None:
        """Refuse a server that has two addresses in the URL: it would count as two nodes of a majority."""
        run_ids = [node.pool.run_id for node in self._nodes]
        if run_ids == self._run_ids:
            return
        seen: dict[bytes, Node] = {}
        for node, run_id in zip(self._nodes, run_ids, strict=True):
            if run_id is not None and (other := seen.setdefault(run_id, node)) is not node:
                raise InvalidURL(
                    f"{other.pool.address} and {node.pool.address} are the same Redis server; Redlock needs nodes that "
                    "fail on their own"
                )
        self._run_ids = run_ids

    def put_back(self, connections: Sequence[RedisConnection | None]) -> None:
        """Return connections to their nodes' pools."""
        for node, connection in zip(self._nodes, connections, strict=False):
            if connection is not None:
                node.pool.put_back(connection)

    # ------------------------------------------------------------------ requests

    async def run(
        self,
        calls: Sequence[Call],
        connections: Connections,
        timeout: float,
        enough: Enough,
        *,
        repeat: bool = True,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Any]:
        """Make a call on every node that has a connection. Return one reply for each node.

        If connections turn out to be broken (servers close idle ones), replace them in `connections` and repeat all calls;
        not without `repeat`.
        """
        replies = await self._run_once(calls, connections, timeout, enough)
        if repeat and not enough(replies) and any(conn is not None and not conn.raw.open for conn in connections):
            # Connect for no longer than a reply may take: a lease may expire meanwhile.
            await self.replace_broken(connections, timeout, Deadline(self._runtime.now, deadline.at_most(timeout)))
            replies = await self._run_once(calls, connections, timeout, enough)
        for node, connection, reply in zip(self._nodes, connections, replies, strict=True):
            if connection is not None and type(reply) is ServerError:
                node.close_if_replaced(connection, reply)
        return replies

    async def _run_once(
        self, calls: Sequence[Call], connections: Connections, timeout: float, enough: Enough
    ) -> list[Any]:
        asked = [
            (place, connection.raw, call)
            for place, (connection, call) in enumerate(zip(connections, calls, strict=True))
            if connection is not None
        ]
        # If nobody waits for replies, NOSCRIPT would come too late to send the text.
        requests = [(raw, call.with_text() if enough is at_once else call.packed) for _, raw, call in asked]
        replies: list[Any] = [NO_REPLY] * len(connections)
        found = await self._runtime.request_all(requests, timeout, enough)
        unknown = []
        for request, reply in zip(asked, found, strict=True):
            replies[request[0]] = reply
            if type(reply) is ServerError and reply.kind == "NOSCRIPT":
                unknown.append(request)
        if unknown:
            with_text = [(raw, call.with_text()) for _, raw, call in unknown]
            found = await self._runtime.request_all(with_text, timeout, never)
            for (place, _, _), reply in zip(unknown, found, strict=True):
                replies[place] = reply
        return replies

    async def request_majority(
        self,
        call: Call,
        timeout: float,
        enough: Enough | None = None,
        *,
        is_undo: bool = False,
        repeat: bool = True,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Any]:
        """Make a call on all nodes and return their replies as soon as they are `enough`. The deadline is for connecting.

        Raise OutcomeUnknown unless a majority replied. Then the nodes that missed an undo get it later.
        """
        connections = await self.get(timeout, deadline)
        try:
            calls = [call] * len(connections)
            replies = await self.run(calls, connections, timeout, enough or never, repeat=repeat, deadline=deadline)
            if sum(map(is_reply, replies)) < self.majority:
                raise self.too_few(replies, OutcomeUnknown)
            if is_undo:
                self._note_unconfirmed(call, connections, replies)
        finally:
            self.put_back(connections)
        return replies

    async def send_undo(self, undo: Call, calls: Sequence[Call], connections: Connections, timeout: float) -> None:
        """Send calls that undo a proposal, without waiting for replies. Nodes that do not confirm theirs get `undo` later."""
        replies = await self.run(calls, connections, timeout, at_once)
        self._note_unconfirmed(undo, connections, replies)

    def _note_unconfirmed(self, undo: Call, connections: Connections, replies: Sequence[Any]) -> None:
        packed = undo.with_text()
        for node, connection, reply in zip(self._nodes, connections, replies, strict=True):
            if reply is NO_REPLY and connection is not None and connection.raw.open:
                node.sent_undo(connection, packed)
            elif not is_reply(reply):
                node.pending_undos.append(packed)

    def too_few(self, replies: Sequence[Any], kind: type[EngineUnavailable] = EngineUnavailable) -> EngineUnavailable:
        """Return the error that lists the nodes without a reply, and why."""
        reasons = []
        for node, reply in zip(self._nodes, replies, strict=True):
            if type(reply) is ServerError:
                reasons.append(f"{node.pool.address}: {reply}")
            elif reply is NO_REPLY:
                reasons.append(str(node.error or f"{node.pool.address}: no answer"))
        replied = len(replies) - len(reasons)
        return kind(
            f"{replied} of {len(replies)} Redlock nodes answered, and {self.majority} are needed: {'; '.join(reasons)}"
        )

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes:
            node.pool.close()

    def detach_after_fork(self) -> None:
        """Start again without connections in a forked child."""
        self.started = False
        for node in self._nodes:
            node.detach_after_fork()


def is_reply(reply: Any) -> bool:
    """Return whether a node did what it was asked, rather than not reply or refuse."""
    return reply is not NO_REPLY and type(reply) is not ServerError


def reply_timeout(ttl: float) -> float:
    """Return how long to wait for a reply."""
    return min(MAX_TIMEOUT, max(MIN_TIMEOUT, ttl / 5))


def at_once(_: Sequence[Any]) -> bool:
    """Wait for no reply."""
    return True


def never(_: Sequence[Any]) -> bool:
    """Wait for all replies."""
    return False
