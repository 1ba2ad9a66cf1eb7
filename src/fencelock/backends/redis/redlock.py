"""Fenced Redlock: several Redis nodes that know nothing of each other; whoever has a majority of them holds the lock.

One round: the client proposes a token; each node takes it only if it is free and has seen nothing as high. A grant is a
majority of acknowledgements of one proposal, and the proposal is the token. Two majorities share a node, and there the
later one is higher: tokens are unique and rise strictly, whatever clocks and delays do. `tests/redlock` checks it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from math import ceil, inf
from typing import Any
from urllib.parse import quote

from fencelock.backends.redis.dial import RedisDialer, ServerError, from_url
from fencelock.backends.redis.link import Link, Links, literally
from fencelock.backends.redis.scripts import Script, load
from fencelock.core.clock import wall_us
from fencelock.core.urls import redact
from fencelock.core.world import NO_ANSWER, Command, Dialer, Event, Wire, World
from fencelock.errors import (
    ClientClosed,
    EngineUnavailable,
    FencelockError,
    GuaranteeUnavailable,
    InvalidURL,
    Unanswered,
)
from fencelock.model import (
    TOKEN_MAX,
    Busy,
    Claim,
    Grant,
    Holder,
    Renewal,
    Snapshot,
    Strength,
    Traits,
    Waiter,
)

TRAITS = Traits(
    engine="redlock", strength=Strength.QUORUM, fair=False, push=False, loss_pushed=False, shared=False, limit=False
)

SHORTEST, LONGEST = 0.2, 1.0
"""Seconds that a node has for its answer: a fifth of the ttl, within these bounds."""
AGAIN_FIRST, AGAIN_LAST = 0.02, 2.0
"""Seconds between attempts, at random up to these: twice as many each time. A hint of the nodes comes sooner."""
MEND_FIRST, MEND_LAST = 0.5, 10.0
"""Seconds before a node that could not be reached is dialled again, by the way."""
ROUNDS = 4
"""Proposals in a row, each above what the nodes said that they had seen."""
BATCH = 500
CLAIMS_KEPT = 10_000

CLAIM, UNDO, RENEW, HEAL, INSPECT, FORCE = (
    load(f"redlock/{name}") for name in ("claim", "undo", "renew", "heal", "inspect", "force")
)


_log = logging.getLogger("fencelock")


class Node:
    """One of the servers. While it cannot be reached nobody waits for it; it is dialled again beside the work."""

    def __init__(self, world: World, dialer: Dialer, prefix: str) -> None:
        self.links = Links(world, dialer, prefix, LONGEST)
        self.error: EngineUnavailable | None = None
        """Why it is out of reach, if it is."""
        self._world = world
        self.failed = -inf
        """When it was last found to be out of reach."""
        self._again = 0.0
        self._pause = MEND_FIRST
        self._mending = False

    async def take(self, patience: float) -> Link | None:
        """Return a link, or None while the node cannot be reached."""
        if self.error is None:
            link = self.links.idle(patience)
            if link is None and self.links.stuck:
                self._down(EngineUnavailable(f"{self.links.address}: no answer within {patience:g} s"))
            elif link is None:
                try:
                    link = await self.links.make()
                except EngineUnavailable as error:
                    self._down(error)
            if link is not None:
                if self.links.owed:
                    await self.links.pay(link)
                return link
        if not self._mending and self._world.now() >= self._again:
            self._mending = True
            self._world.spawn(self._mend(patience), "fencelock-mend")
        return None

    async def insist(self, patience: float) -> Link | None:
        """Return a link to a node that is out of reach, if it is back: for when there are too few without it."""
        until = self._world.now() + patience
        while self._mending and self._world.now() < until:
            await self._world.sleep(AGAIN_FIRST / 2)
        if self.error is None or self._world.now() - self.failed < MEND_FIRST:
            return self.links.idle(patience) if self.error is None else None
        try:
            link = await self.links.take(patience)
        except EngineUnavailable as error:
            self._down(error)
            return None
        self._up()
        return link

    def _up(self) -> None:
        if self.error is not None:
            _log.warning("the Redlock node %s is back", self.links.address)
        self.error, self._pause = None, MEND_FIRST

    def _down(self, error: EngineUnavailable) -> None:
        if self.error is None:
            _log.warning("a Redlock node is out of reach: %s", error)
        self.error = error
        self.failed = self._world.now()
        self._again = self.failed + self._pause * (0.5 + self._world.random() / 2)
        self._pause = min(self._pause * 2, MEND_LAST)

    async def _mend(self, patience: float) -> None:
        try:
            self.links.give(await self.links.take(patience))
            self._up()
        except EngineUnavailable as error:
            self._down(error)
        except FencelockError:
            pass  # closed meanwhile
        finally:
            self._mending = False


class Hint:
    """Counts the nodes that say that the lock came free; the bell rings when they are a majority."""

    __slots__ = ("_seat", "given")

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.given = False

    def set(self) -> None:
        """Take a hint."""
        if not self.given:
            self.given = True
            self._seat.hinted()


class Seat:
    """A claim that waits: its links, on which the nodes call it, and how often it has tried.

    Whoever takes it out of `_seats` has it, and its links, to itself.
    """

    __slots__ = ("_majority", "bell", "hints", "links", "ticket", "tries")

    def __init__(self, links: list[Link | None], bell: Event, majority: int, ticket: int) -> None:
        self.links = links
        self.bell = bell
        self.hints = [Hint(self) for _ in links]
        self.ticket = ticket
        self.tries = 0
        self._majority = majority

    def hinted(self) -> None:
        """Ring when a majority has called."""
        if sum(hint.given for hint in self.hints) >= self._majority:
            self.bell.set()

    def clear(self) -> None:
        """Forget what was called so far."""
        for hint in self.hints:
            hint.given = False
        self.bell.clear()


class RedlockBackend:
    """`fencelock.core.backend.Backend` on a majority of Redis nodes."""

    traits = TRAITS
    url: str | None = None

    def __init__(
        self, world: World, dialers: Sequence[Dialer], namespace: str, wall: Callable[[], int] = wall_us
    ) -> None:
        self._world = world
        self._wall = wall
        self._prefix = f"{quote(namespace, safe='')}:redlock"
        self._nodes = [Node(world, dialer, self._prefix) for dialer in dialers]
        self._majority = len(dialers) // 2 + 1
        self._highest = 0
        """The highest proposal seen: ours are never lower, whatever our clock says."""
        self._tried: dict[str, int] = {}
        """What each claim has proposed and not undone: asked again, it proposes the same."""
        self._given_up: dict[str, int] = {}
        self._seats: dict[str, Seat] = {}
        self._run_ids: list[bytes | None] = []

    # ------------------------------------------------------------------ the protocol

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Busy:  # noqa: ARG002
        """Propose a token to all nodes at once."""
        if claim.shared:
            raise GuaranteeUnavailable(f"{claim.name!r}: Redlock has neither readers nor permits", claim.name)
        return await self._attempt(claim, queue, self._seats.pop(claim.id, None) if self._seats else None)

    async def wait(self, busy: Busy, timeout: float) -> Grant | Busy:
        """Wait for a hint, or at random for longer and longer; try again in the end."""
        claim = busy.claim
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            seat.tries += 1
            pause = min(AGAIN_LAST, AGAIN_FIRST * 2 ** min(seat.tries, 10)) * self._world.random()
            if busy.retry_in is not None:
                pause = min(pause, busy.retry_in + AGAIN_FIRST * self._world.random())
            try:
                wires = [link.wire for link in seat.links if link is not None and link.wire.open]
                await self._world.listen(wires, seat.bell, min(timeout, pause))
            except BaseException:
                self._rise(claim, seat)
                raise
        return await self._attempt(claim, True, seat)

    async def _attempt(self, claim: Claim, queue: bool, seat: Seat | None) -> Grant | Busy:
        patience = _patience(claim.ttl)
        links: list[Link | None] = []
        outcome: Grant | Busy | None = None
        try:
            links = await self._take(patience) if seat is None else await self._refresh(seat, patience)
            outcome = await self._propose(claim, links, seat, queue, patience)
        finally:
            if isinstance(outcome, Busy) and queue:
                self._sit(claim, seat, links, outcome.handle)
            elif seat is not None:
                self._rise(claim, seat)
            else:
                self._give(links)
        return outcome

    async def abandon(self, claim: Claim) -> None:
        """Undo the claim's last proposal everywhere."""
        seat = self._seats.pop(claim.id, None)
        if seat is not None:
            self._rise(claim, seat)
        # In this order: whoever is asking for it in another thread right now sees that it is given up, or we see what it
        # has proposed. And never the same again once it is undone: the undo could arrive last.
        _keep(self._given_up, claim.id, 0)
        args = (claim.name, claim.id, self._tried.get(claim.id, 0))
        await self._majority_of(UNDO, self._keys(claim.name), args, _patience(claim.ttl), everybody=True)
        self._tried.pop(claim.id, None)

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Renew on every node; where a lease is missing and a majority has it, put it back."""
        patience = _patience(min(grant.claim.ttl for grant in grants))
        links = await self._take(patience)
        try:
            answers: list[Renewal] = []
            for start in range(0, len(grants), BATCH):
                answers += await self._renew(grants[start : start + BATCH], links, patience)
        finally:
            self._give(links)
        return answers

    async def release(self, grant: Grant) -> bool:
        """Give the nodes back; a majority of them decides whether it was still ours."""
        claim = grant.claim
        answers = await self._majority_of(
            UNDO, self._keys(claim.name), (claim.name, claim.id, grant.token), _patience(claim.ttl)
        )
        self._tried.pop(claim.id, None)
        self._highest = max(self._highest, grant.token + 1)
        return answers.count(1) >= self._majority

    async def inspect(self, name: str) -> Snapshot:
        """Ask all nodes; whoever has a majority of them holds the name."""
        keys = self._keys(name)
        answers = await self._majority_of(INSPECT, (keys[0], *keys[3:]), (), LONGEST, everybody=True)
        there = [answer for answer in answers if isinstance(answer, list)]
        held = Counter((holder[0], holder[1]) for holder, _ in there if holder)
        holders = []
        for attempt, nodes in held.items():
            if nodes >= self._majority:
                mine = [holder for holder, _ in there if holder and (holder[0], holder[1]) == attempt]
                left = sorted((holder[2] for holder in mine), reverse=True)[self._majority - 1]
                holders.append(Holder(mine[0][3].decode(), int(attempt[1]), left / 1000))
        waiting: dict[bytes, list[tuple[float, int, bytes]]] = {}
        for _, waiters in there:
            for id, ticket, left, owner in waiters:
                waiting.setdefault(id, []).append((float(ticket), left, owner))
        queue = sorted(min(places) for places in waiting.values() if len(places) >= self._majority)
        return Snapshot(name, tuple(holders), tuple(Waiter(owner.decode(), left / 1000) for _, left, owner in queue))

    async def names(self, prefix: str) -> AsyncIterator[str]:
        """Iterate over what a majority holds, or somebody waits for."""
        held: Counter[str] = Counter()
        waited: set[str] = set()
        answers: list[Any] = [NO_ANSWER] * len(self._nodes)
        for place, (node, link) in enumerate(zip(self._nodes, await self._take(LONGEST), strict=True)):
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
        if answers.count(True) < self._majority:
            raise self._too_few(answers.count(True), answers)
        for name in sorted(waited | {name for name, nodes in held.items() if nodes >= self._majority}):
            yield name

    async def force_release(self, name: str) -> int:
        """Free all nodes."""
        answers = await self._majority_of(FORCE, self._keys(name), (), LONGEST, everybody=True)
        had = Counter(answer for answer in answers if isinstance(answer, bytes))
        return int(any(nodes >= self._majority for nodes in had.values()))

    async def close(self) -> None:
        """Close all connections; whoever still waits learns of it."""
        for node in self._nodes:
            node.links.close()
        for seat in list(self._seats.values()):
            seat.bell.set()

    def before_fork(self) -> None:
        """Nothing that must not be copied."""

    def after_fork(self, *, child: bool) -> None:
        """The child lets go of the parent's connections without a word, and makes its own."""
        if child:
            self._seats.clear()
            self._tried.clear()
            for node in self._nodes:
                node.links.forget()
                node.error, node._mending = None, False

    # ------------------------------------------------------------------ one round, or a few

    async def _propose(
        self, claim: Claim, links: list[Link | None], seat: Seat | None, queue: bool, patience: float
    ) -> Grant | Busy:
        keys, needed = self._keys(claim.name), self._majority
        ttl = ceil(claim.ttl * 1000)
        ticket = 0 if seat is None else seat.ticket
        sent = self._world.now()

        def decided(answers: Sequence[Any]) -> bool:
            acknowledged = refused = 0
            for answer in answers:
                if type(answer) is list:
                    if answer[0] == 1:
                        acknowledged += 1
                    else:
                        refused += 1
            return acknowledged >= needed or refused > len(self._nodes) - needed

        for _ in range(ROUNDS):
            proposal = self._tried.get(claim.id) or self._next()
            ticket = ticket or proposal
            _keep(self._tried, claim.id, proposal)
            if claim.id in self._given_up:
                raise ClientClosed("this claim was given up, as its client is being closed; connect again", claim.name)
            if seat is not None:
                seat.clear()
            sent = self._world.now()
            args: Command = (claim.name, claim.id, proposal, ttl, claim.owner)
            answers = await self._fan(CLAIM, keys, [args] * len(links), links, patience, decided)
            said = [answer for answer in answers if type(answer) is list]
            if sum(answer[0] == 1 for answer in said) >= needed:
                return Grant(claim, proposal, sent)
            # Undone everywhere, also where no answer came. It is sent, not waited for: the next round follows on the
            # same wires, and behind it.
            stays = queue and claim.id not in self._given_up and len(said) >= needed
            undo: list[Command] = [
                (*args[:3], ttl, claim.owner, link.channel, ticket) if stays and link else args[:3] for link in links
            ]
            await self._fan(UNDO, keys, undo, links, patience, _at_once)
            if stays and claim.id in self._given_up:
                await self._fan(UNDO, keys, [args[:3]] * len(links), links, patience, _at_once)
            self._tried.pop(claim.id, None)
            # Undone, the nodes have seen one more than was proposed.
            self._highest = max([self._highest, proposal + 1, *(answer[1] for answer in said if answer[0] == -1)])
            busy = sorted(answer[1] for answer in said if answer[0] == 0)
            if len(said) < needed:
                raise self._too_few(len(said), answers)
            if len(busy) > len(self._nodes) - needed or not any(answer[0] == -1 for answer in said):
                return Busy(claim, sent, max(0, busy[-1]) / 1000 if busy else None, ticket)
        return Busy(claim, sent, None, ticket)

    async def _renew(self, grants: Sequence[Grant], links: list[Link | None], patience: float) -> list[Renewal]:
        keys = tuple(f"{self._prefix}:lock:{grant.claim.name}" for grant in grants)
        args: Command = tuple(
            word for grant in grants for word in (grant.claim.id, grant.token, ceil(grant.claim.ttl * 1000))
        )
        answers = await self._fan(RENEW, keys, [args] * len(links), links, patience, _never)
        there = [answer for answer in answers if type(answer) is list]
        outcome = []
        for place, grant in enumerate(grants):
            renewed = sum(answer[place] == 1 for answer in there)
            if renewed >= self._majority:
                outcome.append(Renewal.RENEWED)
                if renewed < len(there):
                    missing = [
                        link if type(answer) is list and answer[place] != 1 else None
                        for link, answer in zip(links, answers, strict=True)
                    ]
                    await self._heal(grant, missing, patience)
            elif len(there) - renewed > len(self._nodes) - self._majority:
                outcome.append(Renewal.LOST)
            else:
                outcome.append(Renewal.UNKNOWN)
        return outcome

    async def _heal(self, grant: Grant, links: list[Link | None], patience: float) -> None:
        claim = grant.claim
        args = (claim.name, claim.id, grant.token, ceil(claim.ttl * 1000), claim.owner)
        await self._fan(HEAL, self._keys(claim.name), [args] * len(links), links, patience, _at_once)

    def _next(self) -> int:
        self._highest = max(self._wall(), self._highest + 1)
        if self._highest > TOKEN_MAX:
            raise EngineUnavailable(f"the nodes have seen proposals beyond 2^53, the last one near {self._highest}")
        return self._highest

    # ------------------------------------------------------------------ asking the nodes

    async def _take(self, patience: float) -> list[Link | None]:
        links: list[Link | None] = []
        try:
            for node in self._nodes:
                ready = node.links.idle(patience) if node.error is None and not node.links.owed else None
                links.append(ready or await node.take(patience))
            if links.count(None) > len(links) - self._majority:
                await self._insist(links, patience)
            self._tell_apart()
        except BaseException:
            self._give(links)
            raise
        return links

    async def _insist(self, links: list[Link | None], patience: float) -> None:
        """Dial the nodes that are out of reach, as there are too few without them."""
        until = self._world.now() + patience
        for place in sorted(range(len(links)), key=lambda place: self._nodes[place].failed):
            if links.count(None) <= len(links) - self._majority or self._world.now() >= until:
                break
            if links[place] is None:
                links[place] = await self._nodes[place].insist(patience)

    def _tell_apart(self) -> None:
        """Refuse a server that is named twice: it would count as two nodes of the majority."""
        run_ids = [node.links.run_id for node in self._nodes]
        if run_ids == self._run_ids:
            return
        seen: dict[bytes, Node] = {}
        for node, run_id in zip(self._nodes, run_ids, strict=True):
            if run_id is not None and (other := seen.setdefault(run_id, node)) is not node:
                raise InvalidURL(
                    f"{other.links.address} and {node.links.address} are the same Redis server; Redlock needs nodes that "
                    "fail on their own"
                )
        self._run_ids = run_ids

    def _give(self, links: Sequence[Link | None]) -> None:
        for node, link in zip(self._nodes, links, strict=False):
            if link is not None:
                node.links.give(link)

    async def _fan(
        self,
        script: Script,
        keys: Command,
        args: Sequence[Command],
        links: list[Link | None],
        patience: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Run a script on every node that has a link; one answer for each node.

        Where a connection turns out to be broken, asked again over a new one, which takes its place in `links`: a server
        hangs up on the idle, and what it had done before it broke must not be left there.
        """
        answers = await self._fan_once(script, keys, args, links, patience, enough)
        again: list[Link | None] = [None] * len(links)
        if enough is not _at_once and not enough(answers):
            for place, (node, link) in enumerate(zip(self._nodes, links, strict=True)):
                if link is not None and answers[place] is NO_ANSWER and not link.wire.open:
                    links[place] = None
                    node.links.give(link)
                    links[place] = again[place] = await node.take(patience)
        if any(again):
            more = await self._fan_once(script, keys, args, again, patience, lambda more: enough([*answers, *more]))
            answers = [old if new is NO_ANSWER else new for old, new in zip(answers, more, strict=True)]
        if script is UNDO:
            for node, link, answer, words in zip(self._nodes, links, answers, args, strict=True):
                if answer is NO_ANSWER and (link is None or not link.wire.open):
                    node.links.owed.append(UNDO.teach(keys, words[:3]))
        return answers

    async def _fan_once(
        self,
        script: Script,
        keys: Command,
        args: Sequence[Command],
        links: Sequence[Link | None],
        patience: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        places = [place for place, link in enumerate(links) if link is not None]
        wires = [link.wire for link in links if link is not None]
        # What nobody waits for cannot be repeated if the script has to be taught first.
        word = script.teach if enough is _at_once else script.call
        words: Command | None = None
        command: Command = ()
        asked: list[tuple[Wire, Command]] = []
        for wire, place in zip(wires, places, strict=True):
            if args[place] is not words:  # most of the time all nodes are asked the same, which is packed once
                words = args[place]
                command = word(keys, words)
            asked.append((wire, command))
        answers = await self._world.fan(asked, patience, enough)
        unknown = [at for at, answer in enumerate(answers) if type(answer) is ServerError and answer.kind == "NOSCRIPT"]
        if unknown:
            asked = [(wires[at], script.teach(keys, args[places[at]])) for at in unknown]
            for at, answer in zip(unknown, await self._world.fan(asked, patience, _never), strict=True):
                answers[at] = answer
        full: list[Any] = [NO_ANSWER] * len(links)
        for place, answer in zip(places, answers, strict=True):
            full[place] = answer
        return full

    async def _majority_of(
        self, script: Script, keys: Command, args: Command, patience: float, *, everybody: bool = False
    ) -> list[Any]:
        """Run a script on all nodes; raise unless a majority answered. `everybody`: wait for as many as can be had."""

        def enough(answers: Sequence[Any]) -> bool:
            return not everybody and sum(_is_answer(answer) and answer != 0 for answer in answers) >= self._majority

        links = await self._take(patience)
        try:
            answers = await self._fan(script, keys, [args] * len(links), links, patience, enough)
        finally:
            self._give(links)
        reached = sum(_is_answer(answer) for answer in answers)
        if reached < self._majority:
            raise self._too_few(reached, answers, sent=True)
        return answers

    def _too_few(self, reached: int, answers: Sequence[Any] = (), *, sent: bool = False) -> EngineUnavailable:
        """Say who is out of reach, and why."""
        reasons = []
        for place, node in enumerate(self._nodes):
            answer = answers[place] if answers else NO_ANSWER
            if isinstance(answer, ServerError):
                reasons.append(f"{node.links.address}: {answer}")
            elif not _is_answer(answer):
                reasons.append(str(node.error) if node.error is not None else f"{node.links.address}: no answer")
        kind = Unanswered if sent else EngineUnavailable
        return kind(
            f"{reached} of {len(self._nodes)} Redlock nodes answered, and {self._majority} are needed: {'; '.join(reasons)}"
        )

    # ------------------------------------------------------------------ places in line

    def _sit(self, claim: Claim, seat: Seat | None, links: list[Link | None], ticket: int) -> None:
        if seat is None:
            seat = Seat(links, self._world.bell(), self._majority, ticket)
        for link, hint in zip(seat.links, seat.hints, strict=True):
            if link is not None:
                link.bells[claim.id] = hint
                if link.calls.pop(claim.id, None) is not None:
                    hint.set()
        self._seats[claim.id] = seat

    async def _refresh(self, seat: Seat, patience: float) -> list[Link | None]:
        """See that a seat has a link to every node that can be reached."""
        for place, (node, link) in enumerate(zip(self._nodes, seat.links, strict=True)):
            if link is not None and not node.links.usable(link, patience):
                node.links.drop(link)
                link = None
            seat.links[place] = await node.take(patience) if link is None else link
        return seat.links

    def _rise(self, claim: Claim, seat: Seat) -> None:
        for link in seat.links:
            if link is not None:
                link.bells.pop(claim.id, None)
                link.calls.pop(claim.id, None)
        self._give(seat.links)

    def _keys(self, name: str) -> tuple[str, str, str, str, str]:
        at = self._prefix
        return f"{at}:lock:{name}", f"{at}:seen", f"{at}:before", f"{at}:queue:{name}", f"{at}:waiters:{name}"


def _keep(memory: dict[str, int], id: str, value: int) -> None:
    """Remember something of a claim, for as many claims as may be under way at a time."""
    memory[id] = value
    if len(memory) > CLAIMS_KEPT:
        memory.pop(next(iter(memory)), None)


def _patience(ttl: float) -> float:
    return min(LONGEST, max(SHORTEST, ttl / 5))


def _is_answer(answer: Any) -> bool:
    return answer is not NO_ANSWER and type(answer) is not ServerError


def _at_once(_: Sequence[Any]) -> bool:
    return True


def _never(_: Sequence[Any]) -> bool:
    return False


def connect(world: World, url: str, namespace: str) -> RedlockBackend:
    """Open `redlock://[user:password@]host:port,host:port,…[/db][?options]`; `redlocks://` for TLS.

    Every node takes the login of the first unless it has one of its own.
    """
    scheme, _, rest = url.partition("://")
    server = "rediss" if scheme.lower().endswith("s") else "redis"
    hosts, slash, tail = rest.partition("/") if "/" in rest else (rest.partition("?")[0], "", rest.partition("?")[2])
    tail = f"/{tail}" if slash else f"/?{tail}" if tail else ""
    if "," in tail.partition("?")[0]:
        raise InvalidURL(f"{redact(url)!r}: the database stands once, behind all nodes, as in redlock://h1,h2,h3/0")
    first = ""
    dialers: list[RedisDialer] = []
    for part in hosts.split(","):
        login, at, host = part.rpartition("@")
        if not host:
            raise InvalidURL(
                f"{redact(url)!r}: redlock:// takes the addresses of its nodes, as in redlock://h1:6379,h2,h3"
            )
        first = first or f"{login}{at}"
        try:
            if dialers and at and ":" not in login:
                raise InvalidURL("a user without a password, and not of the first node")
            dialers.append(from_url(f"{server}://{f'{login}{at}' or first}{host}{tail}", LONGEST))
        except InvalidURL:
            if "@" not in hosts.partition(",")[2]:
                raise
            # Nothing of this part is quoted: it may be half a password.
            raise InvalidURL(
                f"{redact(url)!r}: every node is given as host:port or user:password@host:port, and a password's comma is "
                "written %2C"
            ) from None
    addresses = [dialer.address for dialer in dialers]
    if len(set(addresses)) < len(addresses):
        twice = next(address for address in addresses if addresses.count(address) > 1)
        raise InvalidURL(f"{redact(url)!r} names {twice} twice; Redlock needs nodes that fail on their own")
    if len(dialers) % 2 == 0 or len(dialers) < 3:
        _log.warning(
            "Redlock over %d nodes survives the loss of %d; %d nodes would survive %d: use an odd number, and 3 at least",
            len(dialers),
            (len(dialers) - 1) // 2,
            max(3, len(dialers) + 1 - len(dialers) % 2),
            max(1, len(dialers) // 2),
        )
    return RedlockBackend(world, dialers, namespace)
