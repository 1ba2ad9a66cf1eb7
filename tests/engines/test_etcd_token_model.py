"""The rule of the token base, checked on a model of etcd's revisions in every order of the clients' steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fencelock.engines.etcd.keyspace import Numbering
from fencelock.engines.etcd.token_base import MAX_LAG, next_numbering

START = 1_000_000_000_000
Step = Iterator[None]


@dataclass
class Model:
    """As much of etcd as the rule needs: a revision, the stored namespace, and the claims in the order of creation."""

    revision: int = 10
    stored: Numbering | None = None
    claims: list[tuple[int, int]] = field(default_factory=list)
    """The create revision and the token of each claim."""

    def compare_and_put(self, wanted: Numbering) -> bool:
        if (self.stored.mod_revision if self.stored else 0) != wanted.mod_revision:
            return False
        self.revision += 1
        self.stored = wanted._replace(mod_revision=self.revision)
        return True


def read(model: Model, clock: int) -> Iterator[None]:
    """`TokenBase.read`: one step for the read, one for the write that compares."""
    while True:
        seen = model.stored
        wanted = next_numbering(seen, model.revision, clock, 0)
        yield
        if wanted is seen or model.compare_and_put(wanted):
            return


def create(model: Model, clock: int) -> Step:
    """A claim as `lock.py` creates it: the transaction compares the base's revision, and stores the base."""
    known = model.stored
    if known is None:
        yield from read(model, clock)
        known = model.stored
    while True:
        yield
        if model.stored == known and known is not None:
            model.revision += 1
            model.claims.append((model.revision, known.base + model.revision))
            return
        known = model.stored


def create_and_read_again(model: Model, _: int) -> Step:
    """A claim that takes its base from a read after its creation: the mistake that the rule avoids."""
    yield
    model.revision += 1
    mine = model.revision
    at = len(model.claims)
    model.claims.append((mine, 0))
    yield
    assert model.stored is not None
    model.claims[at] = mine, model.stored.base + mine


def raise_base(model: Model, clock: int) -> Step:
    yield from read(model, clock)


def explore(start: Numbering | None, steps: Sequence[tuple[Callable[[Model, int], Step], int]]) -> Iterator[Model]:
    """Run the clients' steps in every possible order; yield the model at the end of each."""

    def run(order: list[int]) -> tuple[Model, list[int]]:
        model = Model(stored=start)
        clients = [step(model, clock) for step, clock in steps]
        live = list(range(len(clients)))
        for client in order:
            try:
                next(clients[client])
            except StopIteration:
                live.remove(client)
        return model, live

    unfinished: list[list[int]] = [[]]
    while unfinished:
        order = unfinished.pop()
        model, live = run(order)
        if live:
            unfinished += [[*order, client] for client in live]
        else:
            yield model


def tokens_rise(model: Model) -> bool:
    return all(before[1] < after[1] for before, after in pairwise(sorted(model.claims)))


BEHIND = Numbering(START, START, 5)
MINUTES = [START + minutes * 2 * MAX_LAG for minutes in range(1, 5)]


def test_tokens_rise_in_every_order_of_two_claims_and_two_raises() -> None:
    """Whatever the clocks of the clients are, a claim that is created later has a higher token, and the base never falls."""
    for clocks in (MINUTES, MINUTES[::-1], [MINUTES[0]] * 4):
        steps = list(zip((create, raise_base, create, raise_base), clocks, strict=True))
        ends = 0
        for model in explore(BEHIND, steps):
            ends += 1
            assert len(model.claims) == 2
            assert tokens_rise(model), model
            assert model.stored is not None
            assert model.stored.base > BEHIND.base
            assert model.stored.origin == BEHIND.origin, "record versions do not move"
        assert ends > 100


def test_tokens_rise_in_every_order_from_an_empty_namespace() -> None:
    """Clients that create the namespace at the same time agree on one base."""
    for model in explore(None, [(create, MINUTES[1]), (create, MINUTES[0]), (raise_base, MINUTES[2])]):
        assert tokens_rise(model), model


def test_model_finds_the_mistake() -> None:
    """With the base read again after the creation, two raises in between give a later claim a lower token."""
    steps = [(create_and_read_again, MINUTES[0]), (create_and_read_again, MINUTES[0]), (raise_base, MINUTES[2])]
    assert not all(tokens_rise(model) for model in explore(BEHIND, steps))


def test_next_namespace_stays_above_a_changed_history() -> None:
    """After a restored backup, tokens start above the clock and above all that the client has seen."""
    stored = Numbering(START, START, 5)
    raised = next_numbering(stored, 100, START + 10, START + 5_000)
    assert raised.base + 100 == START + 5_001
    assert raised.origin == START + 10
    assert next_numbering(raised, 100, START + 10, START + 5_000) is raised
