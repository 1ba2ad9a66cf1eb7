"""Fenced Redlock: several Redis nodes that do not know of each other. A claim that has a majority of them holds the lock.

One round: the client proposes a token; each node accepts it only if it is free and has not seen a proposal as high. A
majority that accepts one proposal is a grant, and the proposal is its token. Two majorities share a node, and there
the later proposal is higher: tokens are unique and rise strictly, whatever clocks and delays do. `tests/redlock` checks it.

`node` keeps the connections to one node, `cluster` sends requests to all nodes, `commands` has the calls of their scripts,
`proposals` acquires, `waiting` waits for the nodes' notifications, `renewal` renews.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any
from urllib.parse import quote

from fencelock.core.clock import Deadline, wall_us
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redis.connector import RedisConnector
from fencelock.engines.redis.pool import escape_pattern
from fencelock.engines.redlock.cluster import MIN_TIMEOUT, Cluster, is_reply, reply_timeout
from fencelock.engines.redlock.commands import Commands
from fencelock.engines.redlock.inspect import snapshot_of
from fencelock.engines.redlock.proposals import Proposals
from fencelock.engines.redlock.renewal import renew
from fencelock.engines.redlock.waiting import WaitingClaim
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, TokenGuarantee, Traits, Waiting

TRAITS = Traits("redlock", TokenGuarantee.QUORUM, fair=False, loss_pushed=False, readers=False, permits=False)

ABANDON_CONNECT_TIMEOUT = 0.5


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
        self._commands = Commands(self._prefix)
        self._cluster = Cluster(runtime, connectors, self._prefix)
        self._proposals = Proposals(runtime, self._cluster, self._commands, wall)
        self._waiting: dict[str, WaitingClaim] = {}

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Propose a token to all nodes at once."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: Redlock has neither readers nor permits", claim.name)
        timeout = reply_timeout(claim.ttl)
        waiter = self._waiting.pop(claim.id, None)
        if waiter is None:
            waiter = WaitingClaim(claim.id, [None] * len(self._cluster), self._runtime.event())
        outcome: Grant | Waiting | None = None
        try:
            await self._cluster.replace_broken(waiter.connections, timeout, deadline)
            outcome = await self._proposals.propose(claim, waiter, enqueue, timeout, deadline)
        finally:
            if isinstance(outcome, Waiting) and enqueue:
                waiter.subscribe()
                self._waiting[claim.id] = waiter
            else:
                self._stop_waiting(waiter)
        return outcome

    async def wait(self, waiting: Waiting, timeout: float) -> None:
        """Wait until a majority of the nodes has notified the claim, or for a random, growing pause."""
        waiter = self._waiting.pop(waiting.claim.id, None)
        if waiter is None:
            return
        try:
            await waiter.wait(self._runtime, self._cluster.majority, timeout)
        except BaseException:
            self._stop_waiting(waiter)
            raise
        self._waiting[waiter.id] = waiter

    async def abandon(self, claim: Claim) -> None:
        """Undo the claim's last proposal on all nodes, and remove it from their queues. Safe to repeat."""
        waiter = self._waiting.pop(claim.id, None)
        if waiter is not None:
            self._stop_waiting(waiter)
        # Not long: a refused caller waits for this. Nodes that cannot be reached get the undo later.
        deadline = Deadline(self._runtime.now, ABANDON_CONNECT_TIMEOUT)
        undo = self._proposals.abandon(claim)
        await self._cluster.request_majority(undo, reply_timeout(claim.ttl), is_undo=True, deadline=deadline)
        self._proposals.undone(claim)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew on every node. Where a lease is missing although a majority has it, put it back."""
        return await renew(self._runtime, self._cluster, self._commands, grants)

    async def release(self, grant: Grant) -> bool:
        """Release the nodes. A majority of them decides whether this grant still held the lock."""
        claim, majority = grant.claim, self._cluster.majority
        replies = await self._cluster.request_majority(
            self._commands.undo(claim, grant.token),
            reply_timeout(claim.ttl),
            lambda replies: replies.count(1) >= majority,
            is_undo=True,
            repeat=False,
        )
        self._proposals.undone(claim)
        self._proposals.saw(grant.token)
        unknown = sum(not is_reply(reply) for reply in replies)
        if replies.count(1) < majority <= replies.count(1) + unknown:
            raise OutcomeUnknown(f"{claim.name!r}: too few Redlock nodes said whether it was still held", claim.name)
        return replies.count(1) >= majority

    async def downgrade(self, grant: Grant) -> Grant:
        """Refuse: Redlock has no readers."""
        raise GuaranteeUnavailable(f"{grant.claim.name!r}: Redlock has no readers", grant.claim.name)

    async def inspect(self, name: str) -> Snapshot:
        """Return the holder that a majority of the nodes has, and the waiters that a majority has."""
        replies = await self._cluster.request_majority(self._commands.inspect(name), reply_timeout(inf))
        return snapshot_of(name, filter(is_reply, replies), self._cluster.majority, self._wall())

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that a majority of the nodes holds, or that have a waiter on any node."""
        held: Counter[str] = Counter()
        waited: set[str] = set()
        replies: list[Any] = [NO_REPLY] * len(self._cluster)
        timeout = reply_timeout(inf)
        connections = await self._cluster.get(timeout)
        self._cluster.put_back(connections)
        for place, node in enumerate(self._cluster):
            if connections[place] is not None:
                with suppress(EngineUnavailable):
                    for kind, found in (("lock", held), ("queue", waited)):
                        start = f"{self._prefix}:{kind}:"
                        keys = await node.pool.scan(f"{escape_pattern(start + prefix)}*", timeout)
                        found.update(key.removeprefix(start) for key in keys)
                    replies[place] = True
        if replies.count(True) < self._cluster.majority:
            raise self._cluster.too_few(replies)
        for name in sorted(waited | {name for name, nodes in held.items() if nodes >= self._cluster.majority}):
            yield name

    async def force_release(self, name: str) -> int:
        """Release all nodes, whatever claim holds them. Return 1 if a claim had a majority, else 0. It never runs twice."""
        await self.inspect(name)  # this may be repeated, and replaces connections that nodes have closed
        replies = await self._cluster.request_majority(self._commands.force(name), reply_timeout(inf), repeat=False)
        held = Counter(reply for reply in replies if isinstance(reply, bytes))
        most = max(held.values(), default=0)
        if most >= self._cluster.majority:
            return 1
        if most and most + sum(not is_reply(reply) for reply in replies) >= self._cluster.majority:
            raise OutcomeUnknown(f"{name!r}: too few Redlock nodes said whether somebody held it", name)
        return 0

    async def close(self) -> None:
        """Send the undos that nodes have missed, close all connections, and wake the waiters."""
        try:
            if any(node.has_unconfirmed_undos for node in self._cluster):
                # Any request to all nodes does: the undos go ahead of it, and a reply shows that they have arrived.
                deadline = Deadline(self._runtime.now, ABANDON_CONNECT_TIMEOUT)
                with suppress(EngineUnavailable, RuntimeError):  # RuntimeError: no more threads, or the loop is closed
                    await self._cluster.request_majority(self._commands.inspect(""), MIN_TIMEOUT, deadline=deadline)
        finally:
            self._cluster.close()
            for waiter in list(self._waiting.values()):
                waiter.event.set()

    def after_fork(self) -> None:
        """Drop the parent's connections without sending anything."""
        self._waiting.clear()
        self._proposals.clear()
        self._cluster.detach_after_fork()

    def _stop_waiting(self, waiter: WaitingClaim) -> None:
        waiter.unsubscribe()
        self._cluster.put_back(waiter.connections)
