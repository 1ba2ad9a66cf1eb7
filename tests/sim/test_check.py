"""Each check is shown a history that it must refuse, beside one that it must let pass."""

from __future__ import annotations

import time
from math import inf

import pytest

from fencelock.sim.check import Invariants, check
from fencelock.sim.history import History, Kind, Leftover, Note, Op, Outcome, Write


def held(
    owner: str,
    token: int,
    start: float,
    end: float,
    *,
    called: float | None = None,
    ticket: int | None = None,
    shared: bool = False,
    limit: int | None = None,
) -> Op:
    called = start if called is None else called
    return Op("x", Kind.ACQUIRE, owner, called, start, Outcome.OK, token, ticket, start, end, shared, limit)


def released(owner: str, token: int, at: float, outcome: Outcome = Outcome.OK) -> Op:
    return Op("x", Kind.RELEASE, owner, at, at + 0.1, outcome, token)


def broken(history: History, invariants: Invariants | None = None) -> set[str]:
    return {violation.check for violation in check(history, invariants)}


GOOD = History(
    ops=[
        held("a", 1, 0.0, 1.0, ticket=1),
        released("a", 1, 1.0),
        held("b", 2, 1.1, 2.0, called=0.5, ticket=2),
        released("b", 2, 2.0),
        held("a", 5, 2.5, 3.0, called=0.7, ticket=3),
    ],
    writes=[
        Write("data", "a", 1, 0.5, 0, 1, accepted=True),
        Write("data", "b", 2, 1.5, 1, 2, accepted=True),
        Write("data", "a", 1, 1.6, 1, 3, accepted=False),
        Write("data", "b", 2, 1.7, 2, 4, accepted=True),
    ],
    leftovers=[Leftover("x", "c", "holder", 4.5)],
    notes=[Note(0.2, "b", "is stopped for 0.100 s")],
    quiet=4.0,
)
STRICT = Invariants(free_at_most=0.6, ttl=1.0, clean=False)


def test_a_history_that_is_in_order_passes_every_check() -> None:
    """A good history breaks no promise, not even the strict ones."""
    assert check(GOOD, STRICT) == []


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ([held("a", 1, 0, 2), held("b", 2, 1, 3)], True),
        ([held("a", 1, 0, 9), held("b", 2, 1, 2), held("c", 3, 3, 4)], True),
        ([held("a", 1, 0, 1), held("b", 2, 1, 3)], False),
        ([held("a", 1, 0, 2, shared=True), held("b", 2, 1, 3)], True),
        ([held("a", 1, 0, 2), held("b", 2, 1, 3, shared=True)], True),
        ([held("a", 1, 0, 2, shared=True), held("b", 2, 1, 3, shared=True)], False),
        ([held(str(n), n, n, n + 2.5, shared=True, limit=3) for n in range(1, 9)], False),
        ([held(str(n), n, n, n + 2.5, shared=True, limit=2) for n in range(1, 9)], True),
        ([held("a", 1, 0, 2), held("b", 2, 1, 1)], False),
    ],
    ids=[
        "two holders",
        "a long one over short ones",
        "one after the other",
        "a reader and a writer",
        "a writer and a reader",
        "two readers",
        "three permits of three",
        "three permits of two",
        "lost before it was returned",
    ],
)
def test_exclusion(ops: list[Op], expected: bool) -> None:
    """Holders that overlap are found, as far as they exclude each other."""
    assert ("exclusion" in broken(History(ops))) is expected


def test_exclusion_is_counted_per_name() -> None:
    """Two names may be held at once."""
    other = Op("y", Kind.ACQUIRE, "b", 1, 1, Outcome.OK, 2, None, 1, 3)
    assert check(History([held("a", 1, 0, 2), other])) == []


def test_tokens_must_be_unique() -> None:
    """Two grants with one token are found, even if they never overlapped."""
    assert broken(History([held("a", 7, 0, 1), held("b", 7, 2, 3)])) == {"tokens"}


def test_tokens_must_rise() -> None:
    """A token below one that was returned before it was asked for is found."""
    assert "tokens" in broken(History([held("a", 7, 0, 1), held("b", 6, 2, 3)]))


def test_tokens_of_calls_at_the_same_time_may_be_in_either_order() -> None:
    """Nothing is said about two calls that overlapped, as long as the grants themselves can be put in order."""
    early, late = held("a", 7, 1, 2, called=0), held("b", 6, 0.9, 1, called=0)
    assert check(History([early, late])) == []


def test_linearizability() -> None:
    """Grants whose tokens contradict the times of their calls are found, though nobody held the lock at once."""
    backwards = [held("a", 2, 1, 2, called=0), held("b", 1, 4, 5, called=3)]
    assert "linearizability" in broken(History(backwards))


def test_linearizability_counts_permits() -> None:
    """A third permit of two is granted only after one of the others ended."""
    permits = [held(str(n), n, 1, 5, called=0, shared=True, limit=2) for n in (1, 2, 3)]
    assert "linearizability" in broken(History(permits))


def test_order_of_service() -> None:
    """Whoever came later and was served first is found."""
    ops = [held("late", 1, 0, 1, ticket=2), held("early", 2, 1, 2, called=0, ticket=1)]
    assert broken(History(ops)) == {"order"}
    assert check(History(ops), Invariants(order=False)) == []


def test_lost_wake_up() -> None:
    """A name that stays free although somebody waits in line is found."""
    ops = [held("a", 1, 0, 1), held("b", 2, 3, 4, called=0.5)]
    assert broken(History(ops), Invariants(free_at_most=1.5)) == {"wake-ups"}
    assert check(History(ops), Invariants(free_at_most=2.5)) == []


def test_lost_wake_up_of_somebody_who_gave_up() -> None:
    """A waiter that gave up in vain counts; one that only tried does not, nor one that never returned."""

    def waiter(kind: Kind, returned: float | None) -> History:
        return History([held("a", 1, 0, 1), Op("x", kind, "b", 0.5, returned, Outcome.FAILED)])

    invariants = Invariants(free_at_most=1.5)
    assert broken(waiter(Kind.ACQUIRE, 3.0), invariants) == {"wake-ups"}
    assert broken(waiter(Kind.TRY, 3.0), invariants) == set()
    assert broken(waiter(Kind.ACQUIRE, None), invariants) == set()


def test_lost_wake_up_of_a_permit() -> None:
    """A permit that is free counts while somebody waits for one, a free reader's place behind a writer does not."""
    one = held("a", 1, 0, 9, shared=True, limit=2)
    waits = Op("x", Kind.ACQUIRE, "b", 1, 5, Outcome.FAILED, shared=True, limit=2)
    writer = Op("x", Kind.ACQUIRE, "w", 0.5, 9, Outcome.FAILED)
    assert broken(History([one, waits]), Invariants(free_at_most=2)) == {"wake-ups"}
    assert broken(History([one, waits, writer]), Invariants(free_at_most=2)) == set()


def test_accepted_tokens_must_not_fall() -> None:
    """A resource that took an older token after a newer one is found."""
    writes = [Write("d", "b", 34, 1.0, 0, 1, accepted=True), Write("d", "a", 33, 2.0, 1, 2, accepted=True)]
    assert broken(History(writes=writes)) == {"resource"}


def test_no_accepted_write_may_be_lost() -> None:
    """The story of DESIGN.md: 34 reads, 33 writes, 34 writes over it; tokens rise, and a write is lost."""
    writes = [Write("d", "a", 33, 1.0, 0, 90, accepted=True), Write("d", "b", 34, 2.0, 0, 95, accepted=True)]
    (violation,) = check(History(writes=writes))
    assert violation.check == "resource"
    assert "the write of a (value 90) is lost" in violation.message


def test_refused_writes_do_not_count() -> None:
    """What the fence refused harms nobody."""
    writes = [Write("d", "b", 34, 1.0, 0, 1, accepted=True), Write("d", "a", 33, 2.0, 0, 2, accepted=False)]
    assert check(History(writes=writes)) == []


def test_orphans_after_the_ttl() -> None:
    """Whatever is on the engine after quiet and one ttl is found, whosever it was."""
    history = History([held("a", 1, 0, 1)], leftovers=[Leftover("x", "a", "holder", 12.0)], quiet=10.0)
    assert broken(history, Invariants(ttl=1.5)) == {"orphans"}
    assert check(history, Invariants(ttl=3.0)) == []


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Op("x", Kind.ACQUIRE, "a", 0, 1, Outcome.FAILED), True),
        (Op("x", Kind.ACQUIRE, "a", 0, 1, Outcome.UNKNOWN), False),
        (held("a", 1, 0, 1), False),
    ],
    ids=["gave up", "nobody knows", "held and never released"],
)
def test_orphans_of_somebody_who_ended_in_order(op: Op, expected: bool) -> None:
    """Who gave up in order has left nothing even before its ttl; who crashed or ran out may have."""
    history = History([op], leftovers=[Leftover("x", "a", "waiter", 10.0)], quiet=10.0)
    assert ("orphans" in broken(history)) is expected
    assert broken(history, Invariants(clean=False)) == set()


def test_orphans_of_a_release() -> None:
    """A claim that is still there after its release is found at once."""
    history = History(
        [held("a", 1, 0, 1), released("a", 1, 1.0)], leftovers=[Leftover("x", "a", "claim", 1.5, since=1.1)]
    )
    assert broken(history) == {"orphans"}


def test_a_history_is_lines_of_json() -> None:
    """What is written is read back the same, and a line that means nothing is refused."""
    lines = list(GOOD.lines())
    assert len(lines) == 12
    assert History.from_lines(lines) == GOOD
    with pytest.raises(ValueError, match="no such record"):
        History.from_lines(['{"record": "song"}'])


def test_a_hundred_thousand_grants() -> None:
    """Every check runs over 100,000 grants, and still sees the one mistake among them."""
    ops = [held(f"p{n % 7}", n + 1, n + 0.1, n + 0.9, called=max(0.0, n - 2.0), ticket=n) for n in range(100_000)]
    writes = [Write("d", op.owner, n, op.called, n, n + 1, accepted=True) for n, op in enumerate(ops)]
    started = time.perf_counter()
    assert check(History(ops, writes), Invariants(free_at_most=0.5)) == []
    print(f"\n6 checks over {len(ops)} grants in {time.perf_counter() - started:.2f} s")
    ops[50_000] = held("p0", 50_001, 50_000.1, 50_001.2, called=49_998.0, ticket=50_000)
    assert broken(History(ops, writes), Invariants(free_at_most=inf)) == {"exclusion", "linearizability"}
