"""The scripts of a Redlock node, on a real Redis, compared with the rules of `protocol` in plain Python.

Messages come in any order and at any age, while holds expire and periods end: scripts and rules reply and store the same.
In one point the scripts are stricter than the model: an undo raises `last` to one above the proposal, so that a late heal
of it is refused, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from fencelock.engines.redis.scripts import Script
from fencelock.engines.redlock.commands import CLAIM, FORCE, HEAL, UNDO
from tests.servers.redis import Redis

BASE = "scripts:redlock"
SEEN = f"{BASE}:seen"
CHANNEL = "scripts/channel"
TTL = 60_000
NAMES, IDS = ("a", "b:c"), ("1" * 32, "2" * 32, "3" * 32)
PROPOSALS = range(-1, 9)
"""Relative to the time at which the node was created."""
FAR = 10**9
"""A period that does not end during a test."""


class Rules:
    """One node by the rules, in plain Python."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, int]] = {}
        self.waiters: set[tuple[str, str]] = set()
        self.seen: dict[str, int] = {}
        self.before: dict[str, int] = {}
        self.high = self.high_before = self.floor = self.born = 0
        self.ends = False
        """Whether the period is over."""

    def turn(self) -> None:
        """Collect what was seen two periods ago, behind the floor."""
        if self.ends:
            self.floor = max(self.floor, self.high_before)
            self.before, self.seen = self.seen, {}
            self.high_before, self.high, self.ends = self.high, 0, False

    def last(self, name: str) -> int:
        return self.seen.get(name, self.before.get(name, self.floor))

    def raise_to(self, name: str, proposal: int) -> None:
        self.seen[name] = proposal
        self.high = max(self.high, proposal)

    def claim(self, name: str, id: str, proposal: int) -> Any:
        self.turn()
        holder = self.held.get(name)
        if holder == (id, proposal):
            return [1]
        if holder is not None and (holder[0] != id or holder[1] > proposal):
            return [0]
        least = max(self.last(name), self.born)
        if proposal <= least:
            return [-1, least]
        self.raise_to(name, proposal)
        self.held[name] = id, proposal
        self.waiters.discard((name, id))
        return [1]

    def undo(self, name: str, id: str, proposal: int, stays: bool) -> int:
        had = self.held.get(name) == (id, proposal)
        if had:
            del self.held[name]
        if stays:
            self.waiters.add((name, id))
        else:
            self.waiters.discard((name, id))
        if proposal:
            self.turn()
            if proposal + 1 > self.last(name):
                self.raise_to(name, proposal + 1)
        return int(had)

    def heal(self, name: str, id: str, proposal: int) -> int:
        self.turn()
        if name in self.held or proposal < self.last(name):
            return 0
        if proposal > self.last(name):
            self.raise_to(name, proposal)
        self.held[name] = id, proposal
        return 1

    def force(self, name: str) -> bytes | None:
        holder = self.held.pop(name, None)
        return None if holder is None else f"{holder[0]}:{holder[1]}".encode()


class Node:
    """The same node by the scripts, on a real Redis."""

    def __init__(self, client: Any) -> None:  # its signatures have no types
        self._client = client

    def execute(self, *words: str | int) -> Any:
        return self._client.execute_command(*words)

    def period(self, ends: bool) -> None:
        """End the current period, or keep it."""
        self.execute("HSET", SEEN, "\0period", 0 if ends else FAR)

    def run(self, script: Script, *args: str | int) -> Any:
        return self.execute("EVAL", script.text, 1, BASE, *args)

    def claim(self, name: str, id: str, proposal: int) -> Any:
        answer = self.run(CLAIM, name, TTL, "owner", id, proposal)
        return [0] if answer[0] == 0 and 0 < answer[1] <= TTL else answer

    def undo(self, name: str, id: str, proposal: int, stays: bool) -> Any:
        return self.run(UNDO, name, id, proposal, *((TTL, "owner", CHANNEL, 1) if stays else ()))

    def heal(self, name: str, id: str, proposal: int) -> Any:
        return self.run(HEAL, name, TTL, "owner", id, proposal)

    def force(self, name: str) -> Any:
        return self.run(FORCE, name)

    def stored(self) -> dict[str, Any]:
        """Return all that the node stores, in the form of the rules."""
        waiters = [(name, id.decode()) for name in NAMES for id in self.execute("HKEYS", f"{BASE}:waiters:{name}")]
        queued = [(name, id.decode()) for name in NAMES for id in self.execute("ZRANGE", f"{BASE}:queue:{name}", 0, -1)]
        assert sorted(waiters) == sorted(queued)
        locks = {name: self.execute("GET", f"{BASE}:lock:{name}") for name in NAMES}
        held = {name: value.decode().split(":")[:2] for name, value in locks.items() if value is not None}
        seen, before = (self._names(key) for key in (SEEN, f"{BASE}:before"))
        floor = int(self.execute("HGET", SEEN, "\0floor"))
        return {
            "held": {name: (id, int(proposal)) for name, (id, proposal) in held.items()},
            "waiters": set(waiters),
            "seen": seen,
            "before": before,
            "floor": floor,
        }

    def _names(self, key: str) -> dict[str, int]:
        found = {name: self.execute("HGET", key, name) for name in NAMES}
        return {name: int(value) for name, value in found.items() if value is not None}


@pytest.fixture
def node(redis_node: Redis) -> Iterator[Node]:
    """A new node, with a subscriber to its notifications."""
    with redis.Redis(host=redis_node.host, port=redis_node.port, protocol=2) as client:
        client.flushall()
        with client.pubsub() as subscriber:
            subscriber.subscribe(CHANNEL)
            subscriber.get_message(timeout=5)
            yield Node(client)
        client.flushall()


def begin(node: Node) -> Rules:
    """Create the node, and rules that start at the same time."""
    rules = Rules()
    assert node.claim("first", IDS[0], 1)[0] == -1
    rules.born = int(node.execute("HGET", SEEN, "\0born"))
    node.period(ends=False)
    return rules


@pytest.mark.parametrize("seed", range(40))
def test_scripts_do_what_the_rules_say(node: Node, seed: int) -> None:
    """Scripts and rules reply the same to random messages, and store the same."""
    rng = random.Random(seed)
    rules = begin(node)
    for step in range(60):
        name, id = rng.choice(NAMES), rng.choice(IDS)
        proposal = rules.born + rng.choice(PROPOSALS)
        what = rng.choice(["claim"] * 4 + ["undo"] * 3 + ["release"] * 2 + ["heal", "expire", "ends", "force"])
        if what == "claim":
            answers = node.claim(name, id, proposal), rules.claim(name, id, proposal)
        elif what == "undo":
            stays, made = rng.random() < 0.3, proposal if rng.random() < 0.9 else 0
            answers = node.undo(name, id, made, stays), rules.undo(name, id, made, stays)
        elif what == "release":
            id, proposal = rules.held.get(name, (id, proposal))
            answers = node.undo(name, id, proposal, stays=False), rules.undo(name, id, proposal, stays=False)
        elif what == "heal":
            answers = node.heal(name, id, proposal), rules.heal(name, id, proposal)
        elif what == "force":
            answers = node.force(name), rules.force(name)
        elif what == "expire":
            answers = node.execute("DEL", f"{BASE}:lock:{name}"), int(rules.held.pop(name, None) is not None)
        else:
            rules.ends, answers = True, (None, None)
        assert answers[0] == answers[1], (seed, step, what)
        node.period(rules.ends)
        stored = node.stored()
        assert stored == {key: getattr(rules, key) for key in stored}, (seed, step, what)


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(lambda node, proposal: node.claim("a", IDS[0], proposal)[0] == 1, id="claim"),
        pytest.param(lambda node, proposal: node.heal("a", IDS[0], proposal) == 1, id="heal"),
    ],
)
@pytest.mark.parametrize("periods", [0, 1, 2, 3])
def test_late_messages_of_what_was_undone(node: Node, late: Callable[[Node, int], bool], periods: int) -> None:
    """A message that arrives after the undo of its attempt changes nothing, however many periods have passed."""
    proposal = begin(node).born + 5
    assert node.claim("a", IDS[0], proposal) == [1]
    for period in range(periods):
        node.period(ends=True)
        if period:
            assert node.claim("b:c", IDS[1], proposal + 2 * period) == [1]
            assert node.undo("b:c", IDS[1], proposal + 2 * period, stays=False) == 1
    assert node.undo("a", IDS[0], proposal, stays=False) == 1
    assert not late(node, proposal)
    assert node.claim("a", IDS[1], proposal + 10) == [1]


def test_full_node(node: Node) -> None:
    """A node that is out of memory refuses claims, but releases what it holds."""
    proposal = begin(node).born + 5
    assert node.claim("a", IDS[0], proposal) == [1]
    node.execute("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            node.claim("b:c", IDS[1], proposal)
        assert node.undo("a", IDS[0], proposal, stays=False) == 1
    finally:
        node.execute("CONFIG", "SET", "maxmemory", 0)
    assert node.claim("b:c", IDS[1], proposal) == [1]
    assert node.claim("a", IDS[0], proposal) == [-1, proposal + 1]
