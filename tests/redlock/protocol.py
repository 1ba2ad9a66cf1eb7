"""A model of the fenced Redlock protocol: the possible steps of a few clients and about three nodes, for one lock.

**The protocol.** For the name, a node stores `holder` (an attempt: a claim's id and its proposal p), `last` (the highest p
that it took or undid; gone once collected) and `floor` (of the whole node; never falls). A proposal is compared with
`last`, or with `floor` where `last` is gone. The methods `claim`, `undo` (a release is the same message), `heal` and
`collect` of `Model` say how a node handles each message.

**The promises** are checked whenever a client counts a majority and considers its attempt granted:

- exclusion: no other client considers itself the holder;
- uniqueness: no earlier grant has the same token;
- order: no earlier grant has a higher token. "Earlier" means counted earlier in true time,
  which is stronger than a comparison with the grants that existed when this one was requested.

**Messages.** A message may arrive at any later point, in any order, at some nodes only, never, or once more. So the
network needs no state of its own, and everything may be sent as early as possible: when an attempt ends, its undo is on
its way to all nodes, and so are the claims of the client's next attempt.

**Time.** A client sends an attempt in rounds: the first claims, then re-sends, then renewals. The deadline of a round is
its send time + ttl - drift. A node that got a message of round r counts the ttl from there, which is not before r was
sent, so its hold cannot expire before the deadline of r (`since` is r); afterwards it may at any point. A client counts
for round r only answers to r or later, only before the deadline of r, and then believes until that deadline. When a
deadline passes is open, but for the order of the rounds:

- an open attempt in round r is past the deadlines before r ("wait" takes it past that of r as well);
- a believed one counted r last: a hold that saw only earlier rounds is not protected any more;
- an attempt ends by a release, by giving up or by its last deadline, and nothing protects its holds any more.

A hold by a heal, or by a message of a round that is past, is not protected either (`LOOSE`). All this lets holds expire
earlier than clocks would, never later. The one assumption is that of every lease: but for the drift, clocks run at one rate.

**More may happen than really can**, which makes the answer stronger and the model smaller: a renewal may take a node, as
a re-sent claim may; a heal may come from the first majority on, not only after a renewal, and to any node; a client may
go on under the same id after a grant too. A later attempt with a higher proposal is under the same id, others are not.

**Proposals** count by their order alone. Each order that those of all attempts can have, ties included, is a model of its
own, so a range of as many numbers as there are attempts stands for every range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

NO_HOLDER = LOOSE = GONE = NONE = -1  # no holder; a hold that may expire now; a collected `last`; no reply


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol; a variant differs in one or two of them."""

    majority: int | None = None  # of nodes; None: more than half
    claim_above_last: bool = True
    wiped: bool = False
    collect_raises_floor: bool = True
    undo_names_proposal: bool = True
    undo_raises_last: bool = True
    undo_lowers_last: bool = False
    undo_respects_floor: bool = True
    heal_if_free: bool = True
    heal_above_last: bool = True
    heal_keeps_last: bool = True
    heal_after_grant: bool = True
    count_one_proposal: bool = True
    count_before_deadline: bool = True
    deadline_from_send: bool = True
    renew_by_majority: bool = True
    higher_under_same_id: bool = True
    another_after_undo: bool = True
    revive: bool = False


@dataclass(frozen=True)
class Instance:
    """The size of the model, and what may happen in it besides claims, undos, expiry and delay."""

    name: str
    nodes: int = 3
    clients: int = 2
    attempts: int = 2
    rounds: int = 1
    heal: bool = False
    collect: bool = False
    rising: bool = True  # a client's proposals; without it also new claims with lower ones
    rules: Rules = field(default_factory=Rules)

    @property
    def majority(self) -> int:
        return self.rules.majority or self.nodes // 2 + 1

    def proposals(self) -> Iterator[tuple[int, ...]]:
        """Yield each order that the proposals of all attempts can have, as numbers from 1 without a gap."""
        size = self.clients * self.attempts
        for order in itertools.product(range(1, size + 1), repeat=size):
            clients = [order[start : start + self.attempts] for start in range(0, size, self.attempts)]
            dense = set(order) == set(range(1, max(order) + 1))
            rising = all(a < b for client in clients for a, b in itertools.pairwise(client))
            if dense and clients == sorted(clients) and (rising or not self.rising):
                yield order


class Node(NamedTuple):
    """What a node stores for the name, and its replies."""

    holder: int = NO_HOLDER  # the number of an attempt
    since: int = LOOSE  # the latest round of the holder that the node saw
    last: int = 0
    floor: int = 0
    answers: tuple[int, ...] = ()  # for each client, the latest round of its attempt that was acknowledged

    @property
    def bound(self) -> int:
        return self.floor if self.last == GONE else self.last

    @property
    def free(self) -> bool:
        return self.holder == NO_HOLDER

    def freed(self) -> Node:
        return self._replace(holder=NO_HOLDER, since=LOOSE)


class Client(NamedTuple):
    """A client, in its current attempt."""

    attempt: int = 0
    believes: bool = False
    round: int = 0
    granted: int = 0  # a bit for each of its attempts


Clients = tuple[Client, ...]
Nodes = tuple[Node, ...]


class Event(NamedTuple):
    """A step: its kind, its attempt, and its round or number."""

    what: str
    attempt: int = NO_HOLDER
    number: int = 0


class Move(NamedTuple):
    """A step of a client; it needs the votes of `quorum` nodes."""

    event: Event
    clients: Clients
    broken: frozenset[str] = frozenset()
    quorum: int = 0


class Model:
    """The possible steps in one instance with one order of the proposals."""

    def __init__(self, instance: Instance, proposals: tuple[int, ...]) -> None:
        self.instance = instance
        self.rules = instance.rules
        self.proposals = proposals
        self.top = max(proposals)

    def start(self) -> tuple[Clients, Nodes]:
        """Return the first state: every client has sent the claims of a first attempt, and none has arrived."""
        clients = self.instance.clients
        return (Client(),) * clients, (Node(answers=(NONE,) * clients),) * self.instance.nodes

    def owner(self, attempt: int) -> int:
        return attempt // self.instance.attempts

    def same_id(self, earlier: int, later: int) -> bool:
        """Return whether the attempt that holds a node and another attempt belong to one claim."""
        rising = not self.rules.higher_under_same_id or earlier < later
        return self.owner(earlier) == self.owner(later) and rising

    # How a node handles a message.

    def claim(self, node: Node, attempt: int, round: int, over: bool) -> Node:
        """Hold the node, or acknowledge again; the client does not count replies to an attempt that is over."""
        p, owner = self.proposals[attempt], self.owner(attempt)
        if node.holder == attempt:
            node = node._replace(since=max(node.since, round))
        else:
            given_up = not node.free and self.proposals[node.holder] < p and self.same_id(node.holder, attempt)
            too_low = self.rules.claim_above_last and p <= node.bound
            if too_low or not (node.free or given_up):
                return node
            node = node._replace(holder=attempt, since=round, last=max(p, node.bound))
        if over:
            return node
        answer = max(node.answers[owner], round)
        return node._replace(answers=(*node.answers[:owner], answer, *node.answers[owner + 1 :]))

    def undo(self, node: Node, attempt: int) -> Node:
        """Free the node if this attempt holds it, and raise `last` so that a late claim of it is refused."""
        p = self.proposals[attempt]
        same = not node.free and self.owner(node.holder) == self.owner(attempt)
        equal = same and self.proposals[node.holder] == p and not self.rules.another_after_undo
        if node.holder == attempt or equal or (same and not self.rules.undo_names_proposal):
            node = node.freed()
        bound = node.bound if self.rules.undo_respects_floor else node.last
        higher = p > bound and self.rules.undo_raises_last
        return node._replace(last=p) if higher or self.rules.undo_lowers_last else node

    def heal(self, node: Node, attempt: int) -> Node:
        """Hold the node again if it is free and has seen no higher proposal."""
        p = self.proposals[attempt]
        refused = (self.rules.heal_if_free and not node.free) or (self.rules.heal_above_last and p < node.bound)
        if refused or node.holder == attempt:
            return node
        last = max(p, node.bound) if self.rules.heal_keeps_last else p
        return node._replace(holder=attempt, since=LOOSE, last=last)

    def collect(self, node: Node) -> Iterator[Node]:
        """Forget `last` behind the floor, which other names may have raised further."""
        if node.last != GONE and self.rules.collect_raises_floor:
            for floor in range(max(node.floor, node.last), self.top + 1):
                yield node._replace(last=GONE, floor=floor)
        elif node.last != GONE:
            yield node._replace(last=GONE)

    def node_steps(self, node: Node, clients: Clients) -> Iterator[tuple[Event, Node]]:
        """Yield the possible steps of a node: any message that was sent arrives, the hold expires, `last` is collected."""
        for owner, client in enumerate(clients):
            for k in range(min(client.attempt + 1, self.instance.attempts)):
                attempt, over = owner * self.instance.attempts + k, k < client.attempt
                past = over or client.round > 0
                rounds = [LOOSE] * past + [*range(client.round, self.instance.rounds)] * (not over)
                for round in rounds:
                    yield Event("claim", attempt, round), self.claim(node, attempt, round, over)
                if over and not self.lapsed(client):
                    yield Event("undo", attempt), self.undo(node, attempt)
                granted = client.granted >> k & 1 or not self.rules.heal_after_grant
                if self.instance.heal and granted:
                    yield Event("heal", attempt), self.heal(node, attempt)
        if not node.free and (node.since == LOOSE or self.early(clients[self.owner(node.holder)])):
            yield Event("expire", node.holder), node.freed()
        if self.instance.collect:
            for collected in self.collect(node):
                yield Event("collect", number=collected.floor), collected
        if self.rules.wiped:
            yield Event("wipe"), node.freed()._replace(last=0, floor=0)

    def early(self, client: Client) -> bool:
        """Return whether a variant lets the holds of this client expire although it still relies on them."""
        return not (self.rules.deadline_from_send if client.believes else self.rules.count_before_deadline)

    def lapsed(self, client: Client) -> bool:
        """Return whether a variant lets this client use a lease again after its deadline, if it has not undone it."""
        last = self.instance.attempts - 1
        return self.rules.revive and client.attempt > last and bool(client.granted >> last & 1)

    # What a client does.

    def client_moves(self, clients: Clients) -> Iterator[Move]:
        """Yield the possible steps of a client: count a majority, wait for replies to a later round, or end its attempt."""
        for owner, client in enumerate(clients):
            attempt = owner * self.instance.attempts + client.attempt

            def becomes(client: Client, owner: int = owner) -> Clients:
                return (*clients[:owner], client, *clients[owner + 1 :])

            if client.attempt == self.instance.attempts:
                if self.lapsed(client):
                    again = becomes(client._replace(attempt=client.attempt - 1, believes=True))
                    broken = self.broken(clients, attempt - 1)
                    yield Move(Event("revive", attempt - 1), again, broken, self.instance.majority)
                continue
            for round in range(client.round + client.believes, self.instance.rounds):
                granted = client.granted | 1 << client.attempt
                after = becomes(client._replace(believes=True, round=round, granted=granted))
                if client.believes:
                    quorum = self.instance.majority if self.rules.renew_by_majority else 1
                    yield Move(Event("renew", attempt, round), after, quorum=quorum)
                else:
                    broken = self.broken(clients, attempt)
                    yield Move(Event("grant", attempt, round), after, broken, self.instance.majority)
            if not client.believes and client.round + 1 < self.instance.rounds:
                yield Move(Event("wait", attempt, client.round), becomes(client._replace(round=client.round + 1)))
            yield Move(Event("end", attempt), becomes(Client(client.attempt + 1, granted=client.granted)))

    def votes(self, node: Node, event: Event) -> bool:
        """Return whether this node counts for the client's quorum."""
        if event.what == "revive":
            return node.holder == event.attempt
        return node.answers[self.owner(event.attempt)] >= event.number

    def broken(self, clients: Clients, attempt: int) -> frozenset[str]:
        """Return the promises that a grant of this attempt breaks."""
        found = set()
        for owner, client in enumerate(clients):
            if client.believes and owner != self.owner(attempt):
                found.add("exclusion")
            for k in range(self.instance.attempts):
                other = owner * self.instance.attempts + k
                if other != attempt and client.granted >> k & 1:
                    if self.proposals[other] == self.proposals[attempt]:
                        found.add("uniqueness")
                    elif self.proposals[other] > self.proposals[attempt]:
                        found.add("order")
        return frozenset(found)

    def simplified(self, node: Node, before: Clients, after: Clients) -> Node:
        """Return the node without the parts that have no effect any more."""
        answers = []
        for answer, was, client in zip(node.answers, before, after, strict=True):
            other = was.attempt != client.attempt and self.rules.count_one_proposal
            ended = client.attempt == self.instance.attempts
            answers.append(NONE if other or ended or answer < client.round + client.believes else answer)
        since = node.since
        if not node.free:
            was, client = before[self.owner(node.holder)], after[self.owner(node.holder)]
            current = node.holder % self.instance.attempts == client.attempt
            revived = current and was.attempt > client.attempt
            since = client.round if revived else since if current and since >= client.round else LOOSE
        return node._replace(since=since, floor=self.needed_floor(node), answers=tuple(answers))

    def needed_floor(self, node: Node) -> int:
        """Return the floor, or 0 if it has no effect: below `last`, collecting would raise it."""
        return 0 if self.rules.collect_raises_floor and node.last > node.floor else node.floor

    def steps(self, clients: Clients, nodes: Nodes) -> Iterator[tuple[Event, int, Clients, Nodes, frozenset[str]]]:
        """Yield each event, its node if it has one, the state after it, and the promises that it breaks."""
        for at, node in enumerate(nodes):
            for event, changed in self.node_steps(node, clients):
                settled = self.simplified(changed, clients, clients)
                yield event, at, clients, (*nodes[:at], settled, *nodes[at + 1 :]), frozenset()
        for move in self.client_moves(clients):
            if sum(self.votes(node, move.event) for node in nodes) >= move.quorum:
                after = tuple(self.simplified(node, clients, move.clients) for node in nodes)
                yield move.event, -1, move.clients, after, move.broken
