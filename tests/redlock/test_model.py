"""The fenced Redlock protocol keeps its promises in every run of a small model, and needs each of its rules."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.redlock import model
from tests.redlock.clocks import Clocks, gap
from tests.redlock.model import SMALL, Search, Trace, find, main
from tests.redlock.protocol import Clients, Event, Instance, Model, Node, Nodes, Rules


@pytest.mark.parametrize("instance", SMALL, ids=lambda instance: instance.name)
def test_the_protocol_holds(instance: Instance) -> None:
    """No run of this instance has a grant that breaks exclusion, uniqueness or order."""
    found = find(instance)
    print(found)
    assert found.trace is None, f"\n{found.trace}"


class Variant(NamedTuple):
    """A faulty protocol, an instance that is large enough to show the fault, and the promises that it breaks."""

    name: str
    rules: Rules
    instance: Instance
    breaks: tuple[str, ...]


TWICE = Instance("two clients, two attempts each")
ONCE = Instance("two clients, one attempt each", attempts=1)
THREE = Instance("three clients, one attempt each", clients=3, attempts=1)
HEAL_ANYWHERE = Rules(heal_if_free=False, heal_above_last=False)
HEAL_LOWERS = Rules(heal_above_last=False, heal_keeps_last=False)
HEAL_REVIVES = Rules(heal_above_last=False, revive=True)
LOWER_AGAIN = Rules(higher_under_same_id=False)

VARIANTS = (
    Variant("a claim is not compared with last", Rules(claim_above_last=False), TWICE, ("uniqueness", "order")),
    Variant("a node loses its data", Rules(wiped=True), TWICE, ("exclusion", "uniqueness", "order")),
    Variant(
        "last is forgotten and the floor not raised",
        Rules(collect_raises_floor=False),
        replace(ONCE, collect=True),
        ("uniqueness", "order"),
    ),
    Variant("undo names the id only", Rules(undo_names_proposal=False), TWICE, ("exclusion", "order")),
    Variant("undo lowers last", Rules(undo_lowers_last=True), THREE, ("uniqueness", "order")),
    Variant(
        "undo puts a last below the floor",
        Rules(undo_respects_floor=False),
        replace(THREE, collect=True),
        ("uniqueness", "order"),
    ),
    Variant("heal compares nothing", HEAL_ANYWHERE, replace(THREE, heal=True), ("exclusion", "order")),
    Variant("heal lowers last", HEAL_LOWERS, replace(THREE, heal=True), ("uniqueness", "order")),
    Variant("heal below last, for a lease taken up again", HEAL_REVIVES, replace(ONCE, heal=True), ("order",)),
    Variant("heal without a majority", Rules(heal_after_grant=False), replace(ONCE, heal=True), ("uniqueness",)),
    Variant(
        "replies to different proposals are added up",
        Rules(count_one_proposal=False),
        TWICE,
        ("exclusion", "uniqueness", "order"),
    ),
    Variant(
        "a majority is counted after the deadline", Rules(count_before_deadline=False), ONCE, ("exclusion", "order")
    ),
    Variant("the deadline is counted from the replies", Rules(deadline_from_send=False), ONCE, ("exclusion",)),
    Variant("one node is enough to renew", Rules(renew_by_majority=False), replace(ONCE, rounds=2), ("exclusion",)),
    Variant("a lower proposal under the same id", LOWER_AGAIN, replace(TWICE, rising=False), ("exclusion",)),
    Variant(
        "the same proposal again after its undo",
        Rules(another_after_undo=False),
        replace(TWICE, rising=False),
        ("exclusion",),
    ),
    Variant("one node of three is a majority", Rules(majority=1), ONCE, ("exclusion", "uniqueness", "order")),
    Variant("two nodes of four are", Rules(majority=2), replace(ONCE, nodes=4), ("exclusion", "uniqueness", "order")),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_variant_is_unsound(variant: Variant) -> None:
    """The search finds a run that breaks each promise; an independent check confirms it, and the real rules forbid it."""
    for promise in variant.breaks:
        found = find(replace(variant.instance, name=variant.name, rules=variant.rules), promise, progress=str)
        print(found, found.trace, sep="\n")
        assert found.trace is not None
        assert promise in found.trace.broken
        assert seen(found.trace) == found.trace.broken
        assert possible(found.trace, variant.rules)
        assert not possible(found.trace, Rules())


def seen(trace: Trace) -> set[str]:
    """Return the promises that the last step breaks, from the holders and the tokens of the trace alone."""
    counted = [line.event for line in trace.lines if line.event.what in ("grant", "revive")]
    *earlier, token = (trace.model.proposals[event.attempt] for event in counted)
    others = [trace.model.proposals[event.attempt] for event in counted[:-1] if event.attempt != counted[-1].attempt]
    holders = sum(client.believes for client in trace.lines[-1].clients)
    facts = {"exclusion": holders > 1, "uniqueness": token in others, "order": token < max(earlier)}
    return {promise for promise, broken in facts.items() if broken}


def possible(trace: Trace, rules: Rules) -> bool:
    """Return whether these rules allow each step of the trace, with the same effect."""
    model = Model(replace(trace.model.instance, rules=rules), trace.model.proposals)
    clients, nodes = model.start()
    for line in trace.lines:
        if line not in [(event, at, *after) for event, at, *after, _ in model.steps(clients, nodes)]:
            return False
        clients, nodes = line.clients, line.nodes
    return True


@pytest.mark.parametrize(
    "rules",
    [Rules(heal_above_last=False), Rules(heal_if_free=False), Rules(revive=True), Rules(undo_raises_last=False)],
    ids=["heal below last", "heal of a held node", "a lost lease taken up again", "undo does not raise last"],
)
def test_a_rule_that_others_cover(rules: Rules) -> None:
    """Breaking one of these rules alone breaks no promise: it is a second defence, or it shortens a wait."""
    for instance in (TWICE, THREE):
        found = find(replace(instance, heal=True, rules=rules))
        print(found)
        assert found.trace is None, f"\n{found.trace}"


class Plain(Model):
    """The model with the floors that the search drops."""

    def needed_floor(self, node: Node) -> int:
        return node.floor


def reach(model: Model) -> tuple[set[tuple[Clients, Nodes]], set[Event]]:
    """Return all states, found by a simple search, and the events that changed something."""
    start = model.start()
    states, todo = {start}, [start]
    events: set[Event] = set()
    while todo:
        before = todo.pop()
        for event, _, clients, nodes, _ in model.steps(*before):
            if (clients, nodes) != before:
                events.add(event)
            if (clients, nodes) not in states:
                states.add((clients, nodes))
                todo.append((clients, nodes))
    return states, events


def test_the_search_is_complete() -> None:
    """A simple search that keeps the order of nodes and every floor finds the same states, and every kind of event."""
    happened = set()
    for instance in (replace(ONCE, nodes=2, heal=True, collect=True), replace(ONCE, rounds=2)):
        for proposals in instance.proposals():
            search = Search(Model(instance, proposals))
            assert search.run() is None
            states, events = reach(Plain(instance, proposals))
            dropped = {
                search.number(clients, tuple(search.model.simplified(node, clients, clients) for node in nodes))
                for clients, nodes in states
            }
            assert dropped == set(search.came_from)
            happened |= {event.what for event in events}
    assert happened == {"claim", "undo", "heal", "expire", "collect", "grant", "renew", "wait", "end"}


CLOCKED = (
    (Instance("late messages of an attempt before", nodes=1, clients=1, rounds=2, heal=True), 6),
    (Instance("three rounds", nodes=1, clients=1, attempts=1, rounds=3, heal=True), 6),
    (Instance("another client", nodes=1, attempts=1, rounds=2, heal=True), 4),
)


@pytest.mark.parametrize(("instance", "until"), CLOCKED, ids=[instance.name for instance, _ in CLOCKED])
def test_the_model_has_every_step_that_clocks_allow(instance: Instance, until: int) -> None:
    """With send times, deadlines and expiries on a clock, every step is also a step of the model without clocks."""
    for proposals in instance.proposals():
        model = Model(instance, proposals)
        states, found = gap(Clocks(model, until))
        print(f"{instance.name}, proposals {proposals}: {states:,} states")
        assert found is None
        _, found = gap(Clocks(model, until, late=1))
        assert found is not None, "a client that trusts its lease too long was not found"
        assert found.event.what == "expire"


def test_a_trace_is_readable() -> None:
    """A trace is as short as possible, one event per line, with the nodes beside it and the broken promise at the end."""
    found = find(replace(ONCE, rules=Rules(majority=1)), "order")
    assert [line.strip() for line in str(found.trace).splitlines()] == [
        "1  node 1 gets the claim of A1 (p=1) and acknowledges        A1 last 1   -  last 0   -  last 0",
        "2  node 2 gets the claim of B1 (p=2) and acknowledges        A1 last 1   B1 last 2   -  last 0",
        "3  B1 counts its replies: granted, token 2                   A1 last 1   B1 last 2   -  last 0",
        "4  A1 counts its replies: granted, token 1                   A1 last 1   B1 last 2   -  last 0",
        "broken: exclusion, order",
    ]


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the number of states, and fails with a trace if a promise can be broken."""
    monkeypatch.setattr(model, "SMALL", (ONCE,))
    monkeypatch.setattr(model, "LARGE", (replace(ONCE, rules=Rules(majority=1)),))
    assert main([]) == 0
    assert "one attempt each: holds, " in capsys.readouterr().out
    assert main(["--large"]) == 1
    printed = capsys.readouterr().out
    assert "one attempt each: broken in 4 steps, " in printed
    assert "broken: exclusion" in printed
