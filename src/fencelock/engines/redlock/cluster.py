"""The nodes of a Redlock. Every request goes to all of them at once; the nodes do not know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector, ServerError
from fencelock.engines.redis.scripts import Script
from fencelock.engines.redlock.node import CONNECT_TIMEOUT, Node
from fencelock.errors import EngineUnavailable, InvalidURL, OutcomeUnknown

MIN_TIMEOUT = 0.2
"""Seconds that a node has for its reply at least, also when the caller's time is over."""
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
            await self._fill(connections, range(len(connections)), timeout, deadline)
        except BaseException:
            self.put_back(connections)
            raise
        return connections

    async def replace_broken(self, connections: Connections, timeout: float, deadline: Deadline) -> None:
        """Replace the connections that do not work any more, and add those that were missing, in place."""
        for place, (node, connection) in enumerate(zip(self._nodes, connections, strict=True)):
            if connection is not None and not node.pool.usable(connection, timeout):
                connections[place] = None
                node.pool.discard(connection)
        await self._fill(connections, range(len(connections)), timeout, deadline)

    async def _fill(self, connections: Connections, places: Sequence[int], timeout: float, deadline: Deadline) -> None:
        """Get a connection for each of these places that has none.

        All missing connections are opened at the same time, in the background: a node that hangs delays no other. Without a
        majority, wait for as long as one may still come; with one, wait only for nodes that have just begun to connect.
        """
        now = self._runtime.now
        started, until, has_majority = now(), 0.0, False
        while missing := await self._get_missing(connections, places, timeout):
            if not until:
                connect_timeout = CONNECT_TIMEOUT if self.started else FIRST_CONNECT_TIMEOUT + STRAGGLER_TIMEOUT
                until = started + deadline.at_most(connect_timeout)
            if len(connections) - connections.count(None) < self.majority:
                for node in missing:
                    node.reconnect_now(timeout)
                awaited = any(node.error is None or node.connecting_since is not None for node in missing)
            else:
                if not has_majority:
                    has_majority, until = True, min(until, now() + STRAGGLER_TIMEOUT)
                awaited = any(
                    node.error is None
                    and (node.connecting_since is None or node.connecting_since > started - STRAGGLER_TIMEOUT)
                    for node in missing
                )
            if not awaited or now() >= until:
                break
            await self._runtime.sleep(POLL_INTERVAL)
        self.started = True
        self._refuse_duplicates()

    async def _get_missing(self, connections: Connections, places: Sequence[int], timeout: float) -> list[Node]:
        """Get the connections that are ready; return the nodes of those places that still have none."""
        missing = []
        for place in places:
            if connections[place] is None:
                node = self._nodes[place]
                connection = connections[place] = node.get(timeout)
                if connection is None:
                    missing.append(node)
                elif node.pending_undos:
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
        script: Script,
        calls: Sequence[bytes],
        connections: Connections,
        timeout: float,
        enough: Enough,
        undo: bytes | None = None,
        repeated_zero_counts: bool = True,
        repeat: bool = True,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Any]:
        """Run a script on every node that has a connection, with a call for each. Return one reply for each node.

        Where a connection turns out to be broken (servers close idle ones), run it again over a new one, which takes the
        broken one's place in `connections`; not without `repeat`. Unless `repeated_zero_counts`, a 0 from a node asked
        twice counts as no reply: the first run may have done it. A node that does not confirm this call gets `undo` later.
        """
        replies = await self._run_once(script, calls, connections, timeout, enough)
        if repeat and not enough(replies):
            broken = [
                place
                for place, connection in enumerate(connections)
                if connection is not None and replies[place] is NO_REPLY and not connection.raw.open
            ]
            if broken and any(again := await self._replace(connections, broken, timeout, deadline)):
                second = await self._run_once(script, calls, again, timeout, lambda more: enough([*replies, *more]))
                replies = [
                    old if new is NO_REPLY or (new == 0 and not repeated_zero_counts) else new
                    for old, new in zip(replies, second, strict=True)
                ]
        if undo is not None and not all(map(is_reply, replies)):
            self._note_unconfirmed(script.as_eval(undo), connections, replies)
        for place, (node, connection, reply) in enumerate(zip(self._nodes, connections, replies, strict=True)):
            if reply is not NO_REPLY and connection is not None and not node.replied(reply, connection):
                connections[place] = None
        return replies

    async def _replace(
        self, connections: Connections, broken: Sequence[int], timeout: float, deadline: Deadline
    ) -> Connections:
        """Replace the broken connections in place; return only the new ones."""
        for place in broken:
            if (connection := connections[place]) is not None:
                connections[place] = None
                self._nodes[place].pool.put_back(connection)  # closes it, and has the other idle ones checked
        # No longer than for a reply: a lease may expire meanwhile.
        await self._fill(connections, broken, timeout, Deadline(self._runtime.now, deadline.at_most(timeout)))
        return [connection if place in broken else None for place, connection in enumerate(connections)]

    def _note_unconfirmed(self, undo: bytes, connections: Connections, replies: Sequence[Any]) -> None:
        for node, connection, reply in zip(self._nodes, connections, replies, strict=True):
            if reply is NO_REPLY and connection is not None and connection.raw.open:
                node.sent_undo(connection, undo)
            elif not is_reply(reply) and undo not in node.pending_undos:  # the core repeats a failed abandon
                node.pending_undos.append(undo)

    async def _run_once(
        self, script: Script, calls: Sequence[bytes], connections: Connections, timeout: float, enough: Enough
    ) -> list[Any]:
        if enough is at_once:  # the reply NOSCRIPT would come too late to send the text
            calls = [script.as_eval(call) for call in calls]
        requests = [
            (connection.raw, call)
            for connection, call in zip(connections, calls, strict=True)
            if connection is not None
        ]
        replies = await self._runtime.request_all(requests, timeout, enough)
        unknown = [at for at, reply in enumerate(replies) if type(reply) is ServerError and reply.kind == "NOSCRIPT"]
        if unknown:
            with_text = [(raw, script.as_eval(call)) for raw, call in (requests[at] for at in unknown)]
            second = await self._runtime.request_all(with_text, timeout, never)
            for at, reply in zip(unknown, second, strict=True):
                replies[at] = reply
        if len(requests) == len(connections):
            return replies
        found = iter(replies)
        return [NO_REPLY if connection is None else next(found) for connection in connections]

    async def request_majority(
        self,
        script: Script,
        call: bytes,
        timeout: float,
        enough: Enough | None = None,
        *,
        is_undo: bool = False,
        repeated_zero_counts: bool = True,
        repeat: bool = True,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Any]:
        """Run a script on all nodes and return their replies as soon as they are `enough`. The deadline is for connecting.

        Raise OutcomeUnknown unless a majority replied.
        """
        connections = await self.get(timeout, deadline)
        try:
            calls, undo = [call] * len(connections), call if is_undo else None
            replies = await self.run(
                script, calls, connections, timeout, enough or never, undo, repeated_zero_counts, repeat, deadline
            )
        finally:
            self.put_back(connections)
        replied = sum(map(is_reply, replies))
        if replied < self.majority:
            raise self.too_few(replied, replies, sent=True)
        return replies

    def too_few(self, replied: int, replies: Sequence[Any] = (), *, sent: bool = False) -> EngineUnavailable:
        """Return the error that lists the nodes without a reply, and why."""
        reasons = []
        for place, node in enumerate(self._nodes):
            reply = replies[place] if replies else NO_REPLY
            if isinstance(reply, ServerError):
                reasons.append(f"{node.pool.address}: {reply}")
            elif not is_reply(reply):
                reasons.append(str(node.error) if node.error is not None else f"{node.pool.address}: no answer")
        kind = OutcomeUnknown if sent else EngineUnavailable
        return kind(
            f"{replied} of {len(self._nodes)} Redlock nodes answered, and {self.majority} are needed: {'; '.join(reasons)}"
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


def reply_timeout(deadline: Deadline, timeout: float) -> float:
    """Return how long to wait for replies. A slow connect must not leave the nodes without time to reply."""
    return max(deadline.at_most(timeout), min(timeout, MIN_TIMEOUT))


def at_once(_: Sequence[Any]) -> bool:
    """Wait for no reply."""
    return True


def never(_: Sequence[Any]) -> bool:
    """Wait for all replies."""
    return False
