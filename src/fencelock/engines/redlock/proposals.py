"""Proposals of tokens: one round to all nodes, and the undo of a proposal that was not granted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Runtime
from fencelock.engines.redlock.cluster import MIN_TIMEOUT, Cluster
from fencelock.engines.redlock.commands import Call, Commands
from fencelock.engines.redlock.waiting import FIRST_PAUSE, WaitingClaim
from fencelock.errors import ClientClosed, EngineUnavailable
from fencelock.model import TOKEN_MAX, Claim, Grant, Waiting

MAX_ROUNDS = 4
"""Proposals in a row, each above what the nodes have seen."""
MAX_CLAIMS = 10_000
ACCEPTED = [1]
"""The reply of a node that accepts a proposal."""


class Proposals:
    """The proposals of one client."""

    def __init__(self, runtime: Runtime, cluster: Cluster, commands: Commands, wall: Callable[[], int]) -> None:
        self._runtime = runtime
        self._cluster = cluster
        self._commands = commands
        self._wall = wall
        self._highest = 0
        """The highest proposal seen: ours are never lower, even if our clock goes back."""
        self._current: dict[str, int] = {}
        """The proposal of each claim that is not undone, by the claim's id: a repeated attempt proposes the same."""
        self._abandoned: dict[str, int] = {}
        """Claims that never propose again: their undo could arrive before the proposal."""

    async def propose(
        self, claim: Claim, waiter: WaitingClaim, enqueue: bool, timeout: float, deadline: Deadline
    ) -> Grant | Waiting:
        """Propose tokens until a majority accepts one, or another claim keeps too many nodes. Undo what was not granted."""
        majority, minority = self._cluster.majority, len(self._cluster) - self._cluster.majority

        def decided(replies: Sequence[Any]) -> bool:
            accepted = replies.count(ACCEPTED)
            return accepted >= majority or sum(type(reply) is list for reply in replies) - accepted > minority

        since = self._runtime.now()
        for _ in range(MAX_ROUNDS):
            proposal = self._current.get(claim.id) or self._next()
            waiter.ticket = waiter.ticket or proposal
            _remember(self._current, claim.id, proposal)
            if claim.id in self._abandoned:
                raise ClientClosed("this claim was given up, as its client is being closed; connect again", claim.name)
            waiter.forget_notifications()
            since = self._runtime.now()
            calls = [self._commands.claim(claim, proposal)] * len(self._cluster)
            seconds = max(MIN_TIMEOUT, deadline.at_most(timeout))  # also after a slow connect
            replies = await self._cluster.run(calls, waiter.connections, seconds, decided, deadline=deadline)
            if replies.count(ACCEPTED) >= majority:
                return Grant(claim, proposal, since)
            valid = [reply for reply in replies if type(reply) is list]
            await self._undo(claim, proposal, waiter, timeout, enqueue and len(valid) >= majority)
            seen = [reply[1] for reply in valid if reply[0] == -1]
            self.saw(proposal, *seen)
            if len(valid) < majority:
                raise self._cluster.too_few(replies)
            held_ms = [reply[1] for reply in valid if reply[0] == 0]
            if len(held_ms) > minority or not seen:
                # A random part: waiters that attempt at the same moment would split the nodes between them.
                pause = FIRST_PAUSE * self._runtime.random()
                return Waiting(claim, since, max(0, *held_ms) / 1000 + pause if held_ms else None)
            if deadline.passed:
                break
        return Waiting(claim, since)

    def abandon(self, claim: Claim) -> Call:
        """Never propose for this claim again. Return the call that undoes its last proposal and removes it from the queue."""
        # In this order: either another thread that is attempting sees that the claim is abandoned, or we see its proposal.
        _remember(self._abandoned, claim.id, 0)
        return self._commands.undo(claim, self._current.get(claim.id, 0))

    def undone(self, claim: Claim) -> None:
        """Forget the proposal of a claim: a majority of the nodes has undone it."""
        self._current.pop(claim.id, None)

    def saw(self, *proposals: int) -> None:
        """Propose above these from now on, and above their undos: those raise what a node has seen to one more."""
        self._highest = max(self._highest, *(proposal + 1 for proposal in proposals))

    def clear(self) -> None:
        """Forget the parent's proposals in a forked child."""
        self._current.clear()

    async def _undo(self, claim: Claim, proposal: int, waiter: WaitingClaim, timeout: float, enqueue: bool) -> None:
        """Undo a proposal on all nodes, also on those without a reply; with `enqueue`, enqueue the claim there.

        It is sent without waiting for replies: later requests follow over the same connections, so they arrive after it.
        """
        undo = self._commands.undo(claim, proposal)
        calls = [
            self._commands.enqueue(claim, proposal, connection, waiter.ticket) if enqueue and connection else undo
            for connection in waiter.connections
        ]
        await self._cluster.send_undo(undo, calls, waiter.connections, timeout)
        if enqueue and claim.id in self._abandoned:  # by another thread, whose undo may have come before this
            await self._cluster.send_undo(undo, [undo] * len(calls), waiter.connections, timeout)
        self.undone(claim)

    def _next(self) -> int:
        self._highest = max(self._wall(), self._highest + 1)
        if self._highest > TOKEN_MAX:
            raise EngineUnavailable(f"the nodes have seen proposals beyond 2^53, the last one near {self._highest}")
        return self._highest


def _remember(table: dict[str, int], id: str, value: int) -> None:
    """Store a claim's number; drop the oldest entry of a full table."""
    table[id] = value
    if len(table) > MAX_CLAIMS:
        table.pop(next(iter(table)), None)
