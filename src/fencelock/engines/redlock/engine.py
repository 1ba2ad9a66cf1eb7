"""Fenced Redlock: several Redis nodes that do not know of each other. A claim that has a majority of them holds the lock.

One round: the client proposes a token; each node accepts it only if it is free and has not seen a proposal as high. A
majority of acknowledgements of one proposal is a grant, and the proposal is its token. Two majorities share a node, and there
the later proposal is higher: tokens are unique and rise strictly, whatever clocks and delays do. `tests/redlock` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fencelock.core.clock import Deadline, wall_us
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import NO_REPLY, Command, Event, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector
from fencelock.engines.redis.pool import escape_pattern
from fencelock.engines.redis.scripts import load, ttl_ms
from fencelock.engines.redlock.cluster import Cluster, Connections, at_once, is_reply, never, reply_timeout
from fencelock.engines.redlock.node import CONNECT_TIMEOUT
from fencelock.errors import (
    ClientClosed,
    EngineUnavailable,
    GuaranteeUnavailable,
    OutcomeUnknown,
)
from fencelock.model import (
    TOKEN_MAX,
    Claim,
    Grant,
    Holder,
    Renewal,
    Snapshot,
    TokenGuarantee,
    Traits,
    Waiter,
    Waiting,
    held_for,
)

TRAITS = Traits(
    engine="redlock",
    guarantee=TokenGuarantee.QUORUM,
    fair=False,
    loss_pushed=False,
    readers=False,
    permits=False,
)

MIN_TIMEOUT, MAX_TIMEOUT = 0.2, CONNECT_TIMEOUT
"""Seconds that a node has for its reply: a fifth of the ttl, within these bounds."""
FIRST_PAUSE, MAX_PAUSE = 0.02, 2.0
"""Seconds between the attempts of a waiter: a random part of a pause that doubles. A notification of the nodes ends it."""
ABANDON_CONNECT_TIMEOUT = 0.5
MAX_ROUNDS = 4
"""Proposals in a row, each above what the nodes have seen."""
BATCH = 500
MAX_CLAIMS = 10_000
ACKNOWLEDGED = [1]
"""The reply of a node that accepts a proposal."""

CLAIM, UNDO, RENEW, HEAL, INSPECT, FORCE = (
    load(f"redlock/{name}") for name in ("claim", "undo", "renew", "heal", "inspect", "force")
)


@dataclass(slots=True)
class WaitingClaim:
    """What is kept for a claim that waits: the connections over which the nodes notify it, and its place in the queue.

    A caller that takes it out of the engine's table uses it and its connections alone.
    """

    connections: Connections
    event: Event
    """Set at each notification, and at the end of each connection."""
    ticket: int
    """Its place in the queue, the same on all nodes."""
    attempts: int = 0

    def notified(self, id: str) -> int:
        """Return how many nodes have notified the claim, or closed its connection."""
        return sum(conn is not None and (id in conn.notifications or not conn.raw.open) for conn in self.connections)

    def clear(self, id: str) -> None:
        """Forget all notifications."""
        for connection in self.connections:
            if connection is not None:
                connection.notifications.pop(id, None)


class RedlockEngine:
    """`fencelock.core.engine.Engine` on a majority of Redis nodes."""

    traits = TRAITS
    url: str | None = None

    def __init__(
        self, runtime: Runtime, connectors: Sequence[RedisConnector], namespace: str, wall: Callable[[], int] = wall_us
    ) -> None:
        self._runtime = runtime
        self._wall = wall
        self._prefix = f"{quote(namespace, safe='')}:redlock"
        self._keys = (self._prefix,)
        self._cluster = Cluster(runtime, connectors, self._prefix)
        self._highest = 0
        """The highest proposal seen: ours are never lower, even if our clock goes back."""
        self._proposals: dict[str, int] = {}
        """The proposal of each claim that is not undone: a repeated attempt proposes the same."""
        self._abandoned: dict[str, int] = {}
        self._queued: dict[str, WaitingClaim] = {}

    # ------------------------------------------------------------------ the engine protocol

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Propose a token to all nodes at once."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: Redlock has neither readers nor permits", claim.name)
        timeout = _reply_timeout(claim.ttl)
        queued = self._queued.pop(claim.id, None)
        connections: Connections = []
        outcome: Grant | Waiting | None = None
        try:
            if queued is None:
                connections = await self._cluster.get(timeout, deadline)
            else:
                connections = queued.connections
                await self._cluster.replace_broken(connections, timeout, deadline)
            outcome = await self._propose(claim, connections, queued, enqueue, timeout, deadline)
        finally:
            if isinstance(outcome, Waiting) and enqueue:
                self._enqueue(claim, queued, connections, outcome.engine_state)
            elif queued is not None:
                self._dequeue(claim, queued)
            else:
                self._cluster.put_back(connections)
        return outcome

    async def wait(self, waiting: Waiting, timeout: float) -> None:
        """Wait until a majority of the nodes has notified the claim, or for a random, growing pause."""
        claim = waiting.claim
        queued = self._queued.pop(claim.id, None)
        if queued is None:
            return
        queued.attempts += 1
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(queued.attempts, 10)) * self._runtime.random()
        until = self._runtime.now() + min(timeout, pause)
        try:
            while (left := until - self._runtime.now()) > 0:
                queued.event.clear()
                if queued.notified(claim.id) >= self._cluster.majority:
                    break
                connections = [conn.raw for conn in queued.connections if conn is not None and conn.raw.open]
                await self._runtime.wait_for_push(connections, queued.event, left)
        except BaseException:
            self._dequeue(claim, queued)
            raise
        self._queued[claim.id] = queued

    async def abandon(self, claim: Claim) -> None:
        """Undo the claim's last proposal on all nodes, and remove it from their queues. Safe to repeat."""
        queued = self._queued.pop(claim.id, None)
        if queued is not None:
            self._dequeue(claim, queued)
        # In this order: either another thread that is attempting sees that the claim is abandoned, or we see its proposal.
        # And an abandoned claim never proposes again: its undo could arrive after that.
        _remember(self._abandoned, claim.id, 0)
        undo = self._undo_call(claim, self._proposals.get(claim.id, 0))
        # Not long: a refused caller waits for this. Nodes that cannot be reached get the undo later.
        deadline = Deadline(
            self._runtime.now, ABANDON_CONNECT_TIMEOUT if self._cluster.started else FIRST_CONNECT_TIMEOUT
        )
        await self._cluster.request_majority(UNDO, undo, _reply_timeout(claim.ttl), is_undo=True, deadline=deadline)
        self._proposals.pop(claim.id, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew on every node. Where a lease is missing although a majority has it, put it back."""
        ttl = min(grant.claim.ttl for grant in grants)
        max_timeout = _reply_timeout(ttl)
        connections = await self._cluster.get(max_timeout, Deadline(self._runtime.now, ttl / 3))
        # A node that hangs must not take too much of a short ttl; but give slow nodes twice their last latency.
        latencies = sorted(conn.raw.last_latency for conn in connections if conn is not None)[: self._cluster.majority]
        timeout = min(max_timeout, max([ttl / 5, *(2 * seconds for seconds in latencies)]))
        silent: Connections = [None] * len(connections)
        try:
            outcome: list[Renewal] = []
            for start in range(0, len(grants), BATCH):
                outcome += await self._renew(grants[start : start + BATCH], connections, silent, timeout)
        finally:
            self._cluster.put_back(connections)
            self._cluster.put_back(silent)
        return outcome

    async def release(self, grant: Grant) -> bool:
        """Release the nodes. A majority of them decides whether this grant still held the lock."""
        claim = grant.claim
        undo = self._undo_call(claim, grant.token)
        replies = await self._cluster.request_majority(
            UNDO, undo, _reply_timeout(claim.ttl), self._majority_held, is_undo=True, repeated_zero_counts=False
        )
        self._proposals.pop(claim.id, None)
        self._highest = max(self._highest, grant.token + 1)
        if self._majority_held(replies):
            return True
        if replies.count(1) + sum(not is_reply(reply) for reply in replies) >= self._cluster.majority:
            raise OutcomeUnknown(f"{claim.name!r}: too few Redlock nodes said whether it was still held", claim.name)
        return False

    async def downgrade(self, grant: Grant) -> Grant:
        """Refuse: Redlock has no readers."""
        raise GuaranteeUnavailable(f"{grant.claim.name!r}: Redlock has no readers", grant.claim.name)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holder that a majority of the nodes has, and the waiters that a majority has."""
        replies = await self._cluster.request_majority(INSPECT, INSPECT.call(self._keys, (name,)), MAX_TIMEOUT)
        found = [reply for reply in replies if isinstance(reply, list)]
        held = Counter((holder[0], holder[1]) for holder, _ in found if holder)
        holders = []
        for attempt, nodes in held.items():
            if nodes >= self._cluster.majority:
                mine = [holder for holder, _ in found if holder and (holder[0], holder[1]) == attempt]
                left = sorted((holder[2] for holder in mine), reverse=True)[self._cluster.majority - 1]
                token = int(attempt[1])
                owner, _, value = mine[0][3].decode().partition("\n")
                age = held_for(token, self._wall())
                holders.append(Holder(owner, token, left / 1000, held_for=age, value=value))
        waiting: dict[bytes, list[tuple[float, int, bytes]]] = {}
        for _, waiters in found:
            for id, ticket, left, label in waiters:
                waiting.setdefault(id, []).append((float(ticket), left, label))
        queue = sorted(min(places) for places in waiting.values() if len(places) >= self._cluster.majority)
        return Snapshot(
            name,
            tuple(holders),
            tuple(
                Waiter(owner, left / 1000, value=value)
                for _, left, label in queue
                for owner, _, value in (label.decode().partition("\n"),)
            ),
        )

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that a majority of the nodes holds, or that have a waiter on any node."""
        held: Counter[str] = Counter()
        waited: set[str] = set()
        replies: list[Any] = [NO_REPLY] * len(self._cluster)
        connections = await self._cluster.get(MAX_TIMEOUT)
        for place, (node, connection) in enumerate(zip(self._cluster, connections, strict=True)):
            if connection is None:
                continue
            node.pool.put_back(connection)
            try:
                for kind in ("lock", "queue"):
                    start = f"{self._prefix}:{kind}:"
                    keys = await node.pool.scan(f"{escape_pattern(start)}{escape_pattern(prefix)}*", MAX_TIMEOUT)
                    found = {key.removeprefix(start) for key in keys}
                    if kind == "lock":
                        held.update(found)
                    else:
                        waited |= found
                replies[place] = True
            except EngineUnavailable:
                continue
        if replies.count(True) < self._cluster.majority:
            raise self._cluster.too_few(replies.count(True), replies)
        for name in sorted(waited | {name for name, nodes in held.items() if nodes >= self._cluster.majority}):
            yield name

    async def force_release(self, name: str) -> int:
        """Release all nodes, whatever claim holds them. Return 1 if a claim had a majority, else 0. It never runs twice."""
        await self.inspect(name)  # this may be repeated, and replaces connections that nodes have closed
        call = FORCE.call(self._keys, (name,))
        replies = await self._cluster.request_majority(FORCE, call, MAX_TIMEOUT, repeat=False)
        held = Counter(reply for reply in replies if isinstance(reply, bytes))
        most = max(held.values(), default=0)
        if most >= self._cluster.majority:
            return 1
        if most and most + sum(not is_reply(reply) for reply in replies) >= self._cluster.majority:
            raise OutcomeUnknown(f"{name!r}: too few Redlock nodes said whether somebody held it", name)
        return 0

    async def close(self) -> None:
        """Close all connections and wake the waiters."""
        self._cluster.close()
        for queued in list(self._queued.values()):
            queued.event.set()

    def after_fork(self) -> None:
        """Drop the parent's connections without sending anything."""
        self._queued.clear()
        self._proposals.clear()
        self._cluster.detach_after_fork()

    # ------------------------------------------------------------------ proposals and renewals

    def _majority_held(self, replies: Sequence[Any]) -> bool:
        return replies.count(1) >= self._cluster.majority

    async def _propose(
        self,
        claim: Claim,
        connections: Connections,
        queued: WaitingClaim | None,
        enqueue: bool,
        timeout: float,
        deadline: Deadline,
    ) -> Grant | Waiting:
        """Propose tokens until a majority accepts one, or another claim keeps too many nodes. Undo what was not granted."""
        majority = self._cluster.majority
        ticket = 0 if queued is None else queued.ticket
        since = self._runtime.now()

        def decided(replies: Sequence[Any]) -> bool:
            if replies.count(ACKNOWLEDGED) >= majority:
                return True
            refused = sum(type(reply) is list and reply != ACKNOWLEDGED for reply in replies)
            return refused > len(self._cluster) - majority

        for _ in range(MAX_ROUNDS):
            proposal = self._proposals.get(claim.id) or self._next_proposal()
            ticket = ticket or proposal
            _remember(self._proposals, claim.id, proposal)
            if claim.id in self._abandoned:
                raise ClientClosed("this claim was given up, as its client is being closed; connect again", claim.name)
            if queued is not None:
                queued.clear(claim.id)
            since = self._runtime.now()
            calls = [self._claim_call(claim, proposal)] * len(connections)
            replies = await self._cluster.run(
                CLAIM, calls, connections, reply_timeout(deadline, timeout), decided, deadline=deadline
            )
            if replies.count(ACKNOWLEDGED) >= majority:
                return Grant(claim, proposal, since)
            valid = [reply for reply in replies if type(reply) is list]
            await self._undo_proposal(
                claim, proposal, connections, timeout, ticket if enqueue and len(valid) >= majority else None
            )
            # After an undo the nodes have seen one more than the proposal.
            self._highest = max([self._highest, proposal + 1, *(reply[1] for reply in valid if reply[0] == -1)])
            if len(valid) < majority:
                raise self._cluster.too_few(len(valid), replies)
            held_ms = sorted(reply[1] for reply in valid if reply[0] == 0)
            if len(held_ms) > len(self._cluster) - majority or not any(reply[0] == -1 for reply in valid):
                # A random part: waiters that attempt at the same moment would split the nodes between them.
                retry_in = max(0, held_ms[-1]) / 1000 + FIRST_PAUSE * self._runtime.random() if held_ms else None
                return Waiting(claim, since, retry_in, ticket)
            if deadline.passed:
                break
        return Waiting(claim, since, None, ticket)

    async def _undo_proposal(
        self, claim: Claim, proposal: int, connections: Connections, timeout: float, ticket: int | None
    ) -> None:
        """Undo a proposal on all nodes, also on those without a reply; with a ticket, enqueue the claim there.

        It is sent without waiting for replies: later requests follow over the same connections, so they arrive after it.
        """
        undo = self._undo_call(claim, proposal)
        if ticket is None or claim.id in self._abandoned:
            await self._cluster.run(UNDO, [undo] * len(connections), connections, timeout, at_once, undo)
        else:
            calls = [self._enqueue_call(claim, proposal, conn, ticket) if conn else undo for conn in connections]
            await self._cluster.run(UNDO, calls, connections, timeout, at_once, undo)
            if claim.id in self._abandoned:  # meanwhile, by another thread: it may have come before this
                await self._cluster.run(UNDO, [undo] * len(connections), connections, timeout, at_once, undo)
        self._proposals.pop(claim.id, None)

    async def _renew(
        self, grants: Sequence[Grant], connections: Connections, silent: Connections, timeout: float
    ) -> list[Renewal]:
        """Renew a batch. Move the connections of silent nodes to `silent`, so that no later batch waits for them."""
        keys = tuple(f"{self._prefix}:lock:{grant.claim.name}" for grant in grants)
        args: Command = tuple(
            word for grant in grants for word in (grant.claim.id, grant.token, ttl_ms(grant.claim.ttl))
        )
        calls = [RENEW.call(keys, args)] * len(connections)
        replies = await self._cluster.run(RENEW, calls, connections, timeout, never)
        valid = [reply for reply in replies if type(reply) is list]
        if len(valid) >= self._cluster.majority:
            for place, reply in enumerate(replies):
                if reply is NO_REPLY and connections[place] is not None:
                    silent[place], connections[place] = connections[place], None
        outcome = []
        for index, grant in enumerate(grants):
            renewed = sum(reply[index] == 1 for reply in valid)
            if renewed >= self._cluster.majority:
                outcome.append(Renewal.RENEWED)
                if renewed < len(valid):
                    missing = [
                        connection if type(reply) is list and reply[index] != 1 else None
                        for connection, reply in zip(connections, replies, strict=True)
                    ]
                    await self._heal(grant, missing, timeout)
            elif len(valid) - renewed > len(self._cluster) - self._cluster.majority:
                outcome.append(Renewal.LOST)
            else:
                outcome.append(Renewal.UNKNOWN)
        return outcome

    async def _heal(self, grant: Grant, connections: Connections, timeout: float) -> None:
        """Put a lease back on nodes that have lost it."""
        claim = grant.claim
        call = HEAL.call(self._keys, (claim.name, ttl_ms(claim.ttl), _label(claim), claim.id, grant.token))
        await self._cluster.run(HEAL, [call] * len(connections), connections, timeout, at_once)

    def _next_proposal(self) -> int:
        self._highest = max(self._wall(), self._highest + 1)
        if self._highest > TOKEN_MAX:
            raise EngineUnavailable(f"the nodes have seen proposals beyond 2^53, the last one near {self._highest}")
        return self._highest

    # ------------------------------------------------------------------ queued claims

    def _enqueue(self, claim: Claim, queued: WaitingClaim | None, connections: Connections, ticket: int) -> None:
        """Keep the connections for the claim, which the nodes have put into their queues, until they notify it."""
        if queued is None:
            queued = WaitingClaim(connections, self._runtime.event(), ticket)
        for connection in queued.connections:
            if connection is not None:
                connection.push_events[claim.id] = queued.event
        self._queued[claim.id] = queued

    def _dequeue(self, claim: Claim, queued: WaitingClaim) -> None:
        """Give back the connections of a claim that no longer waits."""
        queued.clear(claim.id)
        for connection in queued.connections:
            if connection is not None:
                connection.push_events.pop(claim.id, None)
        self._cluster.put_back(queued.connections)

    # ------------------------------------------------------------------ commands

    def _claim_call(self, claim: Claim, proposal: int) -> bytes:
        return CLAIM.call(self._keys, (claim.name, ttl_ms(claim.ttl), _label(claim), claim.id, proposal))

    def _undo_call(self, claim: Claim, proposal: int) -> bytes:
        return UNDO.call(self._keys, (claim.name, claim.id, proposal))

    def _enqueue_call(self, claim: Claim, proposal: int, connection: RedisConnection, ticket: int) -> bytes:
        """Return the call that undoes a proposal and enqueues the claim."""
        args = (claim.name, claim.id, proposal, ttl_ms(claim.ttl), _label(claim), connection.channel, ticket)
        return UNDO.call(self._keys, args)


def _remember(table: dict[str, int], id: str, value: int) -> None:
    """Store a claim's number; drop the oldest entry of a full table."""
    table[id] = value
    if len(table) > MAX_CLAIMS:
        table.pop(next(iter(table)), None)


def _label(claim: Claim) -> str:
    """Return the owner and the value as the nodes store them. The first newline ends the owner."""
    return f"{claim.owner}\n{claim.value}"


def _reply_timeout(ttl: float) -> float:
    return min(MAX_TIMEOUT, max(MIN_TIMEOUT, ttl / 5))
