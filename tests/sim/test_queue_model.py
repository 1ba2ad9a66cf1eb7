"""Every state that the queue of one name can reach with three claims: nothing that it grants breaks a promise.

Claims attempt, renew, downgrade and release in any order while time passes in ticks; a claim that does nothing is one whose
process was stopped or killed. The queue is the reference engine's, and with it the admission rule that all engines share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import pytest

from fencelock.engines.memory import MemoryStore, QueuedClaim
from fencelock.model import Claim, Mode, Renewal
from tests.sim import variants

TTL = 2.0
"""In ticks."""


class Place(NamedTuple):
    """An entry of the queue: which claim, in which mode now, the ticks that it has left, and its token's rank."""

    claim: int
    mode: Mode
    left: float
    token: int | None


State = tuple[Place, ...]


class Queue:
    """Steps from one state of the queue to the next, on a real store."""

    def __init__(self, claims: list[tuple[Mode, int | None]]) -> None:
        self.claims = [Claim("x", TTL, mode=mode, limit=limit, id=str(at)) for at, (mode, limit) in enumerate(claims)]

    def steps(self, state: State) -> Iterator[State]:
        """Yield the state after each step; raise AssertionError if the step breaks a promise."""
        # An entry may stay a tick beyond its end, as the queue is cleaned only when it is used.
        yield tuple(place._replace(left=place.left - 1) for place in state if place.left > -1)
        for at, claim in enumerate(self.claims):
            actions: dict[str, Callable[[MemoryStore], object]] = {
                "attempt": partial(MemoryStore.attempt, claim=claim, enqueue=True),
                "renew": partial(MemoryStore.renew, claims=[claim]),
                "release": partial(MemoryStore.release, claim=claim),
                "abandon": partial(MemoryStore.abandon, claim=claim),
                "downgrade": partial(MemoryStore.downgrade, claim=claim),
            }
            for name, action in actions.items():
                if name == "downgrade" and claim.shared:
                    continue
                woken: list[int] = []
                store = self._store(state, woken)
                reply = action(store)
                after = self._state(store)
                self._check(state, after, name, at, reply, woken)
                yield after

    def _store(self, state: State, woken: list[int]) -> MemoryStore:
        store = MemoryStore(lambda: 0.0, lambda: 0)
        store._counter = max((place.token or 0 for place in state), default=0)
        for place in state:
            claim = self.claims[place.claim]._replace(mode=place.mode)
            wake = partial(woken.append, place.claim) if place.token is None else None
            store._queues.setdefault("x", []).append(QueuedClaim(claim, place.left, place.token, wake))
        return store

    def _state(self, store: MemoryStore) -> State:
        entries = store._queues.get("x", [])
        ranks = sorted(entry.token for entry in entries if entry.token is not None)
        return tuple(
            Place(
                int(entry.id),
                entry.claim.mode,
                entry.expires,
                None if entry.token is None else 1 + ranks.index(entry.token),
            )
            for entry in entries
        )

    def _check(self, before: State, after: State, action: str, at: int, reply: object, woken: list[int]) -> None:
        alive = {place.claim for place in before if place.left > 0}
        held = {place.claim for place in before if place.token is not None and place.left > 0}
        holding = [place for place in after if place.token is not None and place.left > 0]
        granted = {place.claim for place in holding} - held
        if any(place.mode is Mode.EXCLUSIVE for place in holding):
            assert len(holding) == 1, "an exclusive holder is not alone"
        for place in holding:
            limit = self.claims[place.claim].limit
            earlier = sum(other.token < place.token for other in holding)  # type: ignore[operator]
            assert limit is None or earlier < limit, "a permit is beyond its limit"
        acting = {at} if action == "attempt" else set()
        assert granted - acting <= alive, "a claim that had expired was granted the lock"
        assert granted - acting == set(woken) - acting, (
            "a waiter was granted the lock and not woken, or woken for nothing"
        )
        waiting = [place.claim for place in after if place.token is None]
        order = [place.claim for place in after]
        assert all(order.index(claim) < order.index(waits) for claim in granted for waits in waiting), "overtaken"
        if action in ("renew", "downgrade"):
            done = reply in ([Renewal.RENEWED], True)
            assert done == (at in held), "a dead holder was renewed, or a live one was not"
        if action == "downgrade" and at in held:
            assert not any(place.mode is Mode.EXCLUSIVE for place in holding), "a downgrade admitted a writer"
            tokens = [{place.claim: place.token for place in state}.get(at) for state in (before, after)]
            assert tokens[0] == tokens[1], "a downgrade changed the token"


def explore(claims: list[tuple[Mode, int | None]]) -> int:
    """Visit every state; return how many there are."""
    queue, found = Queue(claims), set[State]({()})
    todo: list[State] = [()]
    while todo:
        for state in queue.steps(todo.pop()):
            if state not in found:
                found.add(state)
                todo.append(state)
    return len(found)


WRITER, READER = (Mode.EXCLUSIVE, None), (Mode.SHARED, None)
QUEUES: dict[str, list[tuple[Mode, int | None]]] = {
    "writers": [WRITER, WRITER, WRITER],
    "readers and writers": [READER, WRITER, READER],
    "writers and a reader": [WRITER, READER, WRITER],
    "permits": [(Mode.PERMIT, 2)] * 3,
    "permits with different limits": [(Mode.PERMIT, 1), (Mode.PERMIT, 2), (Mode.PERMIT, 3)],
}


@pytest.mark.parametrize("claims", QUEUES.values(), ids=QUEUES)
def test_every_state_of_a_queue(claims: list[tuple[Mode, int | None]]) -> None:
    """No order of steps lets a writer share, a permit exceed its limit, a dead claim win, or a waiter sleep on."""
    states = explore(claims)
    print(f"{states} states")
    assert states > 100


MISTAKES: dict[Callable[[], AbstractContextManager[None]], str] = {
    variants.readers_overtake_writers: "overtaken",
    variants.expired_waiter_is_granted: "had expired",
    variants.downgrade_mints_a_token: "changed the token",
    variants.downgrade_in_two_steps: "not alone|admitted a writer",
    variants.dead_reader_is_renewed: "dead holder was renewed",
    variants.writers_ignore_readers: "not alone",
}


@pytest.mark.parametrize("variant", MISTAKES, ids=lambda variant: variant.__name__)
def test_a_mistake_is_found(variant: Callable[[], AbstractContextManager[None]]) -> None:
    """The search finds the step that breaks the promise."""
    with variant(), pytest.raises(AssertionError, match=MISTAKES[variant]):
        for claims in QUEUES.values():
            explore(claims)
