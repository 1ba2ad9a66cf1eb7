"""A breadth-first search through every run of `protocol`, and the instances that are searched.

Three reductions keep the search complete: nodes are interchangeable, so their order does not count; of two orders of
proposals that differ only in the names of clients, one is searched; `Model.simplified` drops what has no effect any more.

`python -m tests.redlock.model` searches the instances of the test run, `--large` the larger ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from math import isqrt, prod
from typing import Generic, NamedTuple, TypeVar

from tests.redlock.protocol import GONE, Clients, Event, Instance, Model, Move, Node, Nodes

# Every instance has claims, late claims, late undos, loss and expiry, three nodes and two clients with two attempts each,
# the second under the same id, unless it says otherwise. A second round is a re-sent claim or a renewal. The figures are
# states and seconds, on one core of a busy machine and CPython 3.11.
SMALL = (
    # 484,904 in 19 s
    Instance("late heals, collection", heal=True, collect=True),
    # 127,027 in 8 s
    Instance("re-sends, renewals, late heals", rounds=2, heal=True),
    # 183,156 in 9 s
    Instance("new claims with any proposal, late heals", heal=True, rising=False),
    # 56,117 in 2 s
    Instance("three clients with one attempt, late heals, collection", clients=3, attempts=1, heal=True, collect=True),
    # 48,655 in 2 s
    Instance("one attempt in three rounds, late heals, collection", attempts=1, rounds=3, heal=True, collect=True),
)
LARGE = (
    # 1,816,893 in 143 s
    Instance("everything at once", rounds=2, heal=True, collect=True),
    # 330,752 in 15 s
    Instance("three clients, everything", clients=3, attempts=1, rounds=2, heal=True, collect=True),
    # 2,093,825 in 130 s
    Instance("new claims with any proposal, late heals, collection", heal=True, collect=True, rising=False),
    # 262,295 in 21 s
    Instance("five nodes with one attempt, everything", nodes=5, attempts=1, rounds=2, heal=True, collect=True),
    # 2,282,073 in 264 s
    Instance("three attempts each, late heals", attempts=3, heal=True),
)

T = TypeVar("T", bound=Hashable)

Seen = tuple[int, tuple[int, ...]]
"""A state, and the primes of its nodes."""


def primes() -> Iterator[int]:
    """Yield all primes."""
    found: list[int] = []
    for number in count(2):
        if all(number % prime for prime in takewhile(isqrt(number).__ge__, found)):
            found.append(number)
            yield number


class Labels(Generic[T]):
    """Numbers for objects, assigned in the order in which they first appear."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.things: dict[int, T] = {}
        self._numbers = numbers
        self._labels: dict[T, int] = {}

    def of(self, thing: T) -> int:
        label = self._labels.get(thing)
        if label is None:
            label = self._labels[thing] = next(self._numbers)
            self.things[label] = thing
        return label


class Step(NamedTuple):
    """A client's move on numbers. Its effect on each node, and the node's vote, are computed once per node state."""

    move: Move
    clients: int
    nodes: dict[int, tuple[int, bool]]


BITS = 24  # for the prime of a node's state


class Search:
    """All states of one model, each one integer: the number of the clients' state and the product of the nodes' primes.

    Each state of a node has its own prime, so the product says which states the nodes have, whatever their order. The
    innermost loop need not sort.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.came_from: dict[int, int] = {}
        self._clients: Labels[Clients] = Labels(count())
        self._nodes: Labels[Node] = Labels(primes())
        self._node_steps: dict[int, list[int]] = {}
        self._client_steps: dict[int, list[Step]] = {}
        self._shift = BITS * model.instance.nodes

    def run(self, promise: str | None = None, within: int = sys.maxsize) -> list[int] | None:
        """Return a shortest path to a state whose next step breaks a promise (or this promise), or None."""
        start = self.number(*self.model.start())
        self.came_from = {start: start}
        layer = [(start, tuple(self._nodes.of(node) for node in self.model.start()[1]))]
        while layer and within > 0:
            following: list[Seen] = []
            for seen in layer:
                if self._expand(seen, following, promise):
                    return self._path(seen[0])
            layer = following
            within -= 1
        return None

    def number(self, clients: Clients, nodes: Nodes) -> int:
        return self._clients.of(clients) << self._shift | prod(map(self._nodes.of, nodes))

    def _expand(self, seen: Seen, following: list[Seen], promise: str | None) -> bool:
        """Add the new states after this one; return True if a step breaks a promise."""
        came_from = self.came_from
        state, nodes = seen
        clients = state >> self._shift
        same = clients << self._shift
        product = state - same
        for at, node in enumerate(nodes):
            if node in nodes[:at]:
                continue
            others = product // node
            steps = self._node_steps.get(clients << BITS | node)
            for changed in self._steps_of_node(clients, node) if steps is None else steps:
                new = same + others * changed
                if new not in came_from:
                    came_from[new] = state
                    following.append((new, (*nodes[:at], changed, *nodes[at + 1 :])))
        for step in self._client_steps.get(clients) or self._steps_of_clients(clients):
            after = [step.nodes.get(node) or self._meet(step, clients, node) for node in nodes]
            if step.move.quorum and sum(vote for _, vote in after) < step.move.quorum:
                continue
            if step.move.broken and promise in (None, *step.move.broken):
                return True
            then = tuple(node for node, _ in after)
            new = (step.clients << self._shift) + prod(then)
            if new not in came_from:
                came_from[new] = state
                following.append((new, then))
        return False

    def _steps_of_node(self, clients: int, node: int) -> list[int]:
        around = self._clients.things[clients]
        steps = self.model.node_steps(self._nodes.things[node], around)
        found = {self._nodes.of(self.model.simplified(changed, around, around)) for _, changed in steps}
        self._node_steps[clients << BITS | node] = ordered = sorted(found - {node})
        return ordered

    def _steps_of_clients(self, clients: int) -> list[Step]:
        moves = self.model.client_moves(self._clients.things[clients])
        self._client_steps[clients] = steps = [Step(move, self._clients.of(move.clients), {}) for move in moves]
        return steps

    def _meet(self, step: Step, clients: int, node: int) -> tuple[int, bool]:
        before, around = self._nodes.things[node], self._clients.things[clients]
        after = self._nodes.of(self.model.simplified(before, around, step.move.clients))
        step.nodes[node] = found = (after, self.model.votes(before, step.move.event))
        return found

    def _path(self, state: int) -> list[int]:
        way = [state]
        while self.came_from[state] != state:
            state = self.came_from[state]
            way.append(state)
        return way[::-1]


class Line(NamedTuple):
    """One event of a trace, its node if it has one, and the state after it."""

    event: Event
    node: int
    clients: Clients
    nodes: Nodes


@dataclass(frozen=True)
class Trace:
    """A shortest run that breaks a promise."""

    model: Model
    lines: tuple[Line, ...]
    broken: frozenset[str]

    def __str__(self) -> str:
        return "\n".join([*self._describe(), f"    broken: {', '.join(sorted(self.broken))}"])

    def _describe(self) -> Iterator[str]:
        for number, line in enumerate(self.lines, 1):
            what = SENTENCES[line.event.what].format(
                attempt=self._name(line.event.attempt),
                p=self.model.proposals[line.event.attempt],
                number=line.event.number,
                node=line.node + 1,
            )
            yield f"    {number:2}  {what:58}{'   '.join(map(self._show, line.nodes))}"

    def _name(self, attempt: int) -> str:
        client, k = divmod(attempt, self.model.instance.attempts)
        return f"{chr(ord('A') + client)}{k + 1}"

    def _show(self, node: Node) -> str:
        holder = "-" if node.free else self._name(node.holder)
        return f"{holder:2} " + (f"floor {node.floor}" if node.last == GONE else f"last {node.last}")


SENTENCES = {
    "claim": "node {node} gets the claim of {attempt} (p={p}) and acknowledges",
    "undo": "node {node} gets the undo of {attempt} (p={p})",
    "heal": "node {node} is healed for {attempt} (p={p})",
    "expire": "node {node} lets {attempt} expire",
    "collect": "node {node} collects, its floor is {number}",
    "wipe": "node {node} loses its data",
    "grant": "{attempt} counts its replies: granted, token {p}",
    "renew": "{attempt} counts its replies: renewed",
    "revive": "{attempt} is renewed after its deadline, token {p}",
    "wait": "{attempt} is past a deadline, waits for a later round",
    "end": "{attempt} is over, its undo is in flight",
}


def replay(search: Search, way: list[int], promise: str | None) -> Trace:
    """Return a path through packed states as a trace with named nodes, up to the step that breaks a promise."""
    clients, nodes = search.model.start()
    lines: list[Line] = []
    for state in way[1:]:
        event, at, clients, nodes, _ = next(
            step for step in search.model.steps(clients, nodes) if search.number(step[2], step[3]) == state
        )
        lines.append(Line(event, at, clients, nodes))
    event, at, clients, nodes, broken = next(
        step for step in search.model.steps(clients, nodes) if step[4] and promise in (None, *step[4])
    )
    return Trace(search.model, (*lines, Line(event, at, clients, nodes)), broken)


@dataclass(frozen=True)
class Found:
    """The result of a search: the number of states, and a shortest trace if a promise can be broken."""

    instance: Instance
    states: int
    seconds: float
    trace: Trace | None

    def __str__(self) -> str:
        found = f"broken in {len(self.trace.lines)} steps" if self.trace else "holds"
        return f"{self.instance.name}: {found}, {self.states:,} states, {self.seconds:.1f} s"


def find(instance: Instance, promise: str | None = None, progress: Callable[[str], object] = print) -> Found:
    """Search an instance for a broken promise, or for this one, in one order of proposals after the other."""
    started, states = time.monotonic(), 0
    trace: Trace | None = None
    for proposals in instance.proposals():
        search = Search(Model(instance, proposals))
        way = search.run(promise, within=len(trace.lines) - 1 if trace else sys.maxsize)
        trace = replay(search, way, promise) if way else trace
        states += len(search.came_from)
        progress(f"  proposals {proposals}: {states:,} states, {time.monotonic() - started:.0f} s")
    return Found(instance, states, time.monotonic() - started, trace)


def main(arguments: list[str] | None = None) -> int:
    """Search the instances of the test run, or the larger ones, and print the result of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.redlock.model", description=main.__doc__)
    parser.add_argument("--large", action="store_true", help="search the larger instances")
    wanted = LARGE if parser.parse_args(arguments).large else SMALL
    broken = 0
    for instance in wanted:
        found = find(instance)
        broken += found.trace is not None
        print(found, *([found.trace] if found.trace else []), sep="\n", flush=True)
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
