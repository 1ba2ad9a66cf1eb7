"""Fenced Redlock: several Redis nodes that know nothing of each other; whoever has a majority of them holds the lock.

One round: the client proposes a token; each node takes it only if it is free and has seen nothing as high. A grant is a
majority of acknowledgements of one proposal, and the proposal is the token. Two majorities share a node, and there the
later one is higher: tokens are unique and rise strictly, whatever clocks and delays do. `tests/redlock` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from fencelock.core.clock import Deadline, wall_us
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, limit_of
from fencelock.core.runtime import NO_REPLY, Command, Runtime
from fencelock.engines.redis.dial import RedisConnector
from fencelock.engines.redis.link import Link
from fencelock.engines.redis.links import literally
from fencelock.engines.redis.scripts import load, ms, packed
from fencelock.engines.redlock.node import DIAL_SECONDS
from fencelock.engines.redlock.nodes import Nodes, at_once, is_answer, never, reply_timeout
from fencelock.engines.redlock.seats import Seat
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
    shared=False,
    limit=False,
)

SHORTEST, LONGEST = 0.2, DIAL_SECONDS
"""Seconds that a node has for its answer: a fifth of the ttl, within these bounds."""
AGAIN_FIRST, AGAIN_LAST = 0.02, 2.0
"""Seconds between attempts, at random up to these: twice as many each time. A hint of the nodes comes sooner."""
UNDO_DIAL_SECONDS = 0.5
"""How long connecting may take for an undo."""
ROUNDS = 4
"""Proposals in a row, each above what the nodes said that they had seen."""
BATCH = 500
CLAIMS_KEPT = 10_000
FORMS_KEPT = 1000
ACKNOWLEDGED = [1]
"""What a node answers that takes a proposal."""

CLAIM, UNDO, RENEW, HEAL, INSPECT, FORCE = (
    load(f"redlock/{name}") for name in ("claim", "undo", "renew", "heal", "inspect", "force")
)


class RedlockEngine:
    """`fencelock.core.engine.Backend` on a majority of Redis nodes."""

    traits = TRAITS
    url: str | None = None

    def __init__(
        self, runtime: Runtime, connectors: Sequence[RedisConnector], namespace: str, wall: Callable[[], int] = wall_us
    ) -> None:
        self._runtime = runtime
        self._wall = wall
        self._prefix = f"{quote(namespace, safe='')}:redlock"
        self._base = (self._prefix,)
        self._nodes = Nodes(runtime, connectors, self._prefix)
        self._form = lru_cache(FORMS_KEPT)(self._make_form)
        self._highest = 0
        """The highest proposal seen: ours are never lower, whatever our clock says."""
        self._tried: dict[str, int] = {}
        """What each claim has proposed and not undone: asked again, it proposes the same."""
        self._given_up: dict[str, int] = {}
        self._seats: dict[str, Seat] = {}

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Propose a token to all nodes at once."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: Redlock has neither readers nor permits", claim.name)
        limit = limit_of(self._runtime.now, patience, met=self._nodes.met)
        return await self._attempt(claim, queue, self._seats.pop(claim.id, None) if self._seats else None, limit)

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait for a hint, or at random for longer and longer; try again in the end."""
        claim = waiting.claim
        until = None if patience is None else self._runtime.now() + patience
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            seat.tries += 1
            pause = min(AGAIN_LAST, AGAIN_FIRST * 2 ** min(seat.tries, 10)) * self._runtime.random()
            if waiting.retry_in is not None:
                pause = min(pause, waiting.retry_in + AGAIN_FIRST * self._runtime.random())
            try:
                connections = [link.connection for link in seat.links if link is not None and link.connection.open]
                await self._runtime.wait_for_push(connections, seat.bell, min(timeout, pause))
            except BaseException:
                self._rise(claim, seat)
                raise
        left = None if until is None else until - self._runtime.now()
        return await self._attempt(claim, True, seat, limit_of(self._runtime.now, left))

    async def _attempt(self, claim: Claim, queue: bool, seat: Seat | None, limit: Deadline) -> Grant | Waiting:
        patience = _patience(claim.ttl)
        links: list[Link | None] = []
        outcome: Grant | Waiting | None = None
        try:
            if seat is None:
                links = await self._nodes.take(patience, limit)
            else:
                links = seat.links
                await self._nodes.refresh(links, patience, limit)
            outcome = await self._propose(claim, links, seat, queue, patience, limit)
        finally:
            if isinstance(outcome, Waiting) and queue:
                self._sit(claim, seat, links, outcome.handle)
            elif seat is not None:
                self._rise(claim, seat)
            else:
                self._nodes.give(links)
        return outcome

    async def abandon(self, claim: Claim) -> None:
        """Undo the claim's last proposal everywhere."""
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            self._rise(claim, seat)
        # In this order: whoever is asking for it in another thread right now sees that it is given up, or we see what it
        # has proposed. And never the same again once it is undone: the undo could arrive last.
        _keep(self._given_up, claim.id, 0)
        undo = self._undo(claim, self._tried.get(claim.id, 0))
        # Not for long: whoever was refused waits for this, and what is not undone is owed.
        limit = Deadline(self._runtime.now, UNDO_DIAL_SECONDS if self._nodes.met else FIRST_CONNECT_TIMEOUT)
        await self._nodes.most(UNDO, undo, _patience(claim.ttl), owe=True, limit=limit)
        self._tried.pop(claim.id, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew on every node; where a lease is missing and a majority has it, put it back."""
        ttl = min(grant.claim.ttl for grant in grants)
        patience = _patience(ttl)
        links = await self._nodes.take(patience, Deadline(self._runtime.now, ttl / 3))
        # No longer for a node that hangs, however short the ttl is; but twice as long as a majority took last.
        pace = sorted(link.connection.pace for link in links if link is not None)[: self._nodes.majority]
        within = min(patience, max([ttl / 5, *(2 * seconds for seconds in pace)]))
        silent: list[Link | None] = [None] * len(links)
        try:
            answers: list[Renewal] = []
            for start in range(0, len(grants), BATCH):
                answers += await self._renew(grants[start : start + BATCH], links, silent, within)
        finally:
            self._nodes.give(links)
            self._nodes.give(silent)
        return answers

    async def release(self, grant: Grant) -> bool:
        """Give the nodes back; a majority of them decides whether it was still ours."""
        claim = grant.claim
        undo = self._undo(claim, grant.token)
        answers = await self._nodes.most(UNDO, undo, _patience(claim.ttl), self._had, owe=True, certain=True)
        self._tried.pop(claim.id, None)
        self._highest = max(self._highest, grant.token + 1)
        if self._had(answers):
            return True
        if answers.count(1) + sum(not is_answer(answer) for answer in answers) >= self._nodes.majority:
            raise OutcomeUnknown(f"{claim.name!r}: too few Redlock nodes said whether it was still held", claim.name)
        return False

    async def inspect(self, name: str) -> Snapshot:
        """Ask all nodes; whoever has a majority of them holds the name."""
        answers = await self._nodes.most(INSPECT, INSPECT.call(self._base, (name,)), LONGEST)
        there = [answer for answer in answers if isinstance(answer, list)]
        held = Counter((holder[0], holder[1]) for holder, _ in there if holder)
        holders = []
        for attempt, nodes in held.items():
            if nodes >= self._nodes.majority:
                mine = [holder for holder, _ in there if holder and (holder[0], holder[1]) == attempt]
                left = sorted((holder[2] for holder in mine), reverse=True)[self._nodes.majority - 1]
                token = int(attempt[1])
                holders.append(Holder(mine[0][3].decode(), token, left / 1000, held_for=held_for(token, self._wall())))
        waiting: dict[bytes, list[tuple[float, int, bytes]]] = {}
        for _, waiters in there:
            for id, ticket, left, owner in waiters:
                waiting.setdefault(id, []).append((float(ticket), left, owner))
        queue = sorted(min(places) for places in waiting.values() if len(places) >= self._nodes.majority)
        return Snapshot(name, tuple(holders), tuple(Waiter(owner.decode(), left / 1000) for _, left, owner in queue))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what a majority holds, or somebody waits for."""
        held: Counter[str] = Counter()
        waited: set[str] = set()
        answers: list[Any] = [NO_REPLY] * len(self._nodes)
        for place, (node, link) in enumerate(zip(self._nodes, await self._nodes.take(LONGEST), strict=True)):
            if link is None:
                continue
            node.links.give(link)
            try:
                for kind in ("lock", "queue"):
                    start = f"{self._prefix}:{kind}:"
                    keys = await node.links.scan(f"{literally(start)}{literally(prefix)}*", LONGEST)
                    found = {key.removeprefix(start) for key in keys}
                    if kind == "lock":
                        held.update(found)
                    else:
                        waited |= found
                answers[place] = True
            except EngineUnavailable:
                continue
        if answers.count(True) < self._nodes.majority:
            raise self._nodes.too_few(answers.count(True), answers)
        for name in sorted(waited | {name for name, nodes in held.items() if nodes >= self._nodes.majority}):
            yield name

    async def force_release(self, name: str) -> int:
        """Free all nodes; whoever had a majority of them was dropped."""
        await self.inspect(name)  # may be repeated: connections that nodes have closed are replaced here
        answers = await self._nodes.most(FORCE, FORCE.call(self._base, (name,)), LONGEST, repeat=False)
        held = Counter(answer for answer in answers if isinstance(answer, bytes))
        most = max(held.values(), default=0)
        if most >= self._nodes.majority:
            return 1
        if most and most + sum(not is_answer(answer) for answer in answers) >= self._nodes.majority:
            raise OutcomeUnknown(f"{name!r}: too few Redlock nodes said whether somebody held it", name)
        return 0

    async def close(self) -> None:
        """Close all connections; whoever still waits learns of it."""
        self._nodes.close()
        for seat in list(self._seats.values()):
            seat.bell.set()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._seats.clear()
            self._tried.clear()
            self._nodes.forget()

    # ------------------------------------------------------------------ one round, or a few

    def _had(self, answers: Sequence[Any]) -> bool:
        return answers.count(1) >= self._nodes.majority

    async def _propose(
        self,
        claim: Claim,
        links: list[Link | None],
        seat: Seat | None,
        queue: bool,
        patience: float,
        limit: Deadline,
    ) -> Grant | Waiting:
        needed = self._nodes.majority
        ticket = 0 if seat is None else seat.ticket
        sent = self._runtime.now()

        def decided(answers: Sequence[Any]) -> bool:
            if answers.count(ACKNOWLEDGED) >= needed:
                return True
            refused = sum(type(answer) is list and answer != ACKNOWLEDGED for answer in answers)
            return refused > len(self._nodes) - needed

        for _ in range(ROUNDS):
            proposal = self._tried.get(claim.id) or self._next()
            ticket = ticket or proposal
            _keep(self._tried, claim.id, proposal)
            if claim.id in self._given_up:
                raise ClientClosed("this claim was given up, as its client is being closed; connect again", claim.name)
            if seat is not None:
                seat.clear()
            sent = self._runtime.now()
            call = self._claim(claim, proposal)
            within = reply_timeout(limit, patience)
            answers = await self._nodes.fan(CLAIM, [call] * len(links), links, within, decided, limit=limit)
            if answers.count(ACKNOWLEDGED) >= needed:
                return Grant(claim, proposal, sent)
            said = [answer for answer in answers if type(answer) is list]
            # Undone everywhere, also where no answer came. It is sent, not waited for: the next round follows on the
            # same wires, and behind it.
            stays = queue and claim.id not in self._given_up and len(said) >= needed
            undo = self._undo(claim, proposal)
            undos = [self._stay(claim, proposal, link, ticket) if stays and link else undo for link in links]
            await self._nodes.fan(UNDO, undos, links, patience, at_once, undo)
            if stays and claim.id in self._given_up:
                await self._nodes.fan(UNDO, [undo] * len(links), links, patience, at_once, undo)
            self._tried.pop(claim.id, None)
            # Undone, the nodes have seen one more than was proposed.
            self._highest = max([self._highest, proposal + 1, *(answer[1] for answer in said if answer[0] == -1)])
            waiting = sorted(answer[1] for answer in said if answer[0] == 0)
            if len(said) < needed:
                raise self._nodes.too_few(len(said), answers)
            if len(waiting) > len(self._nodes) - needed or not any(answer[0] == -1 for answer in said):
                return Waiting(claim, sent, max(0, waiting[-1]) / 1000 if waiting else None, ticket)
            if limit.passed:
                break
        return Waiting(claim, sent, None, ticket)

    async def _renew(
        self, grants: Sequence[Grant], links: list[Link | None], silent: list[Link | None], patience: float
    ) -> list[Renewal]:
        """Renew a batch; move the links of nodes that do not answer to `silent`, where nobody waits for them again."""
        keys = tuple(f"{self._prefix}:lock:{grant.claim.name}" for grant in grants)
        args: Command = tuple(word for grant in grants for word in (grant.claim.id, grant.token, ms(grant.claim.ttl)))
        answers = await self._nodes.fan(RENEW, [RENEW.call(keys, args)] * len(links), links, patience, never)
        there = [answer for answer in answers if type(answer) is list]
        if len(there) >= self._nodes.majority:
            for place, answer in enumerate(answers):
                if answer is NO_REPLY and links[place] is not None:
                    silent[place], links[place] = links[place], None
        outcome = []
        for place, grant in enumerate(grants):
            renewed = sum(answer[place] == 1 for answer in there)
            if renewed >= self._nodes.majority:
                outcome.append(Renewal.RENEWED)
                if renewed < len(there):
                    missing = [
                        link if type(answer) is list and answer[place] != 1 else None
                        for link, answer in zip(links, answers, strict=True)
                    ]
                    await self._heal(grant, missing, patience)
            elif len(there) - renewed > len(self._nodes) - self._nodes.majority:
                outcome.append(Renewal.LOST)
            else:
                outcome.append(Renewal.UNKNOWN)
        return outcome

    async def _heal(self, grant: Grant, links: list[Link | None], patience: float) -> None:
        claim = grant.claim
        call = HEAL.call(self._base, (claim.name, ms(claim.ttl), claim.owner, claim.id, grant.token))
        await self._nodes.fan(HEAL, [call] * len(links), links, patience, at_once)

    def _next(self) -> int:
        self._highest = max(self._wall(), self._highest + 1)
        if self._highest > TOKEN_MAX:
            raise EngineUnavailable(f"the nodes have seen proposals beyond 2^53, the last one near {self._highest}")
        return self._highest

    # ------------------------------------------------------------------ places in line

    def _sit(self, claim: Claim, seat: Seat | None, links: list[Link | None], ticket: int) -> None:
        if seat is None:
            seat = Seat(links, self._runtime.push_event(), self._nodes.majority, ticket)
        for link, hint in zip(seat.links, seat.hints, strict=True):
            if link is not None:
                link.bells[claim.id] = hint
                if link.calls.pop(claim.id, None) is not None:
                    hint.set()
        self._seats[claim.id] = seat

    def _rise(self, claim: Claim, seat: Seat) -> None:
        for link in seat.links:
            if link is not None:
                link.bells.pop(claim.id, None)
                link.calls.pop(claim.id, None)
        self._nodes.give(seat.links)

    # ------------------------------------------------------------------ what is sent

    def _claim(self, claim: Claim, proposal: int) -> bytes:
        name, ttl, owner, _, _, id = claim
        return f"{self._form(name, ttl, owner)[0]}${len(id)}\r\n{id}\r\n{packed(proposal)}".encode()

    def _undo(self, claim: Claim, proposal: int) -> bytes:
        name, ttl, owner, _, _, id = claim
        return f"{self._form(name, ttl, owner)[1]}${len(id)}\r\n{id}\r\n{packed(proposal)}".encode()

    def _stay(self, claim: Claim, proposal: int, link: Link, ticket: int) -> bytes:
        """Undo, and stay in line."""
        name, ttl, owner, _, _, id = claim
        return UNDO.call(self._base, (name, id, proposal, ms(ttl), owner, link.channel, ticket))

    def _make_form(self, name: str, ttl: float, owner: str) -> tuple[str, str]:
        """Return how claims of a kind begin, and what undoes them: all but the id and the proposal."""
        return CLAIM.begin(self._base, (name, ms(ttl), owner), 2), UNDO.begin(self._base, (name,), 2)


def _keep(memory: dict[str, int], id: str, value: int) -> None:
    """Remember something of a claim, for as many claims as may be under way at a time."""
    memory[id] = value
    if len(memory) > CLAIMS_KEPT:
        memory.pop(next(iter(memory)), None)


def _patience(ttl: float) -> float:
    return min(LONGEST, max(SHORTEST, ttl / 5))
