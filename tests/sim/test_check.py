"""Each check gets a history that it must refuse, and one that it must accept."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import pytest

from fencelock.sim.check import DEAD, Invariants, check
from fencelock.sim.history import (
    Group,
    History,
    Kind,
    Leftover,
    Note,
    Observation,
    Op,
    Outcome,
    Term,
    Write,
)


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
    value: str = "",
    downgraded: float | None = None,
    name: str = "x",
) -> Op:
    called = start if called is None else called
    ok = Outcome.OK
    return Op(name, Kind.ACQUIRE, owner, called, start, ok, token, ticket, start, end, shared, limit, value, downgraded)


def permit(owner: str, token: int, limit: int, start: float = 1) -> Op:
    return held(owner, token, start, 9, called=0, shared=True, limit=limit)


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


def test_a_good_history_passes_every_check() -> None:
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
        ([permit("a", 1, 3), permit("b", 2, 3), permit("c", 3, 2)], True),
        ([permit("a", 1, 2), permit("c", 3, 3), permit("b", 2, 2, start=2)], False),
        ([held("a", 1, 0, 5, downgraded=1), held("b", 2, 2, 3, shared=True)], False),
        ([held("a", 1, 0, 5, downgraded=3), held("b", 2, 2, 4, shared=True)], True),
        ([held("a", 1, 0, 5, downgraded=1), held("b", 2, 2, 3)], True),
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
        "a permit beyond its own lower limit",
        "a later permit with a higher limit",
        "a reader after a downgrade",
        "a reader before the downgrade",
        "a writer after a downgrade",
    ],
)
def test_exclusion(ops: list[Op], expected: bool) -> None:
    """Holders that overlap are found if they exclude each other."""
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
    """Two calls that overlapped may get their tokens in either order, if the grants themselves can be ordered."""
    early, late = held("a", 7, 1, 2, called=0), held("b", 6, 0.9, 1, called=0)
    assert check(History([early, late])) == []


def test_linearizability() -> None:
    """Grants whose tokens contradict the times of their calls are found, although none of them overlapped."""
    backwards = [held("a", 2, 1, 2, called=0), held("b", 1, 4, 5, called=3)]
    assert "linearizability" in broken(History(backwards))


def test_linearizability_counts_permits() -> None:
    """A third permit of two is granted only after one of the others ended."""
    permits = [held(str(n), n, 1, 5, called=0, shared=True, limit=2) for n in (1, 2, 3)]
    assert "linearizability" in broken(History(permits))


def test_order_of_service() -> None:
    """A claim that came later and was granted first is found."""
    ops = [held("late", 1, 0, 1, ticket=2), held("early", 2, 1, 2, called=0, ticket=1)]
    assert broken(History(ops)) == {"order"}
    assert check(History(ops), Invariants(order=False)) == []


def test_lost_wake_up() -> None:
    """A name that stays free although a caller waits is found."""
    ops = [held("a", 1, 0, 1), held("b", 2, 3, 4, called=0.5)]
    assert broken(History(ops), Invariants(free_at_most=1.5)) == {"wake-ups"}
    assert check(History(ops), Invariants(free_at_most=2.5)) == []


def test_lost_wake_up_of_a_waiter_that_timed_out() -> None:
    """A waiter that timed out counts; a caller that only tried does not, nor one that never returned."""

    def waiter(kind: Kind, returned: float | None) -> History:
        return History([held("a", 1, 0, 1), Op("x", kind, "b", 0.5, returned, Outcome.FAILED)])

    invariants = Invariants(free_at_most=1.5)
    assert broken(waiter(Kind.ACQUIRE, 3.0), invariants) == {"wake-ups"}
    assert broken(waiter(Kind.TRY, 3.0), invariants) == set()
    assert broken(waiter(Kind.ACQUIRE, None), invariants) == set()


def test_lost_wake_up_of_a_permit() -> None:
    """A permit that is free counts while a caller waits for one, but not behind a writer."""
    one = held("a", 1, 0, 9, shared=True, limit=2)
    waits = Op("x", Kind.ACQUIRE, "b", 1, 5, Outcome.FAILED, shared=True, limit=2)
    writer = Op("x", Kind.ACQUIRE, "w", 0.5, 9, Outcome.FAILED)
    assert broken(History([one, waits]), Invariants(free_at_most=2)) == {"wake-ups"}
    assert broken(History([one, waits, writer]), Invariants(free_at_most=2)) == set()


def test_lost_wake_up_of_a_reader() -> None:
    """A reader that waits although only readers hold the name is found, but not one that waits behind a writer."""
    one = held("a", 1, 0, 9, shared=True)
    waits = Op("x", Kind.ACQUIRE, "b", 1, 5, Outcome.FAILED, shared=True)
    writer = Op("x", Kind.ACQUIRE, "w", 0.5, 9, Outcome.FAILED)
    assert broken(History([one, waits]), Invariants(free_at_most=2)) == {"wake-ups"}
    assert broken(History([one, waits, writer]), Invariants(free_at_most=2)) == set()


def test_lost_wake_up_of_permits_with_different_limits() -> None:
    """A permit that waits for its own limit is not found, although one with a higher limit would fit."""
    holders = [permit("a", 1, 3), permit("b", 2, 3)]
    low, high = (Op("x", Kind.ACQUIRE, "c", 1, 5, Outcome.FAILED, shared=True, limit=limit) for limit in (2, 3))
    assert broken(History([*holders, low]), Invariants(free_at_most=2)) == set()
    assert broken(History([*holders, low, high]), Invariants(free_at_most=2)) == set()
    assert broken(History([*holders, high]), Invariants(free_at_most=2)) == {"wake-ups"}


def test_lost_wake_up_after_a_downgrade() -> None:
    """A reader that waits behind a writer is found once the writer is a reader."""
    waits = Op("x", Kind.ACQUIRE, "b", 1, 5, Outcome.FAILED, shared=True)
    assert broken(History([held("a", 1, 0, 9), waits]), Invariants(free_at_most=2)) == set()
    assert broken(History([held("a", 1, 0, 9, downgraded=2), waits]), Invariants(free_at_most=2)) == {"wake-ups"}


def test_a_downgrade_keeps_the_token() -> None:
    """An engine that has another token after a downgrade is found."""
    writing = held("a", 7, 0, 5, downgraded=1)

    def downgrade(token: int | None) -> History:
        return History([writing, Op("x", Kind.DOWNGRADE, "a", 1, 2, Outcome.OK, token)])

    assert check(downgrade(7)) == check(downgrade(None)) == []
    assert broken(downgrade(8)) == {"downgrade"}


def group(outcome: Outcome, released: float | None = None) -> Group:
    return Group(("x", "y"), "a", 0, 2, outcome, (("x", 1), ("y", 2)), released)


@pytest.mark.parametrize(
    ("group", "ends", "expected"),
    [
        (group(Outcome.OK, released=5), (4, 5), False),
        (group(Outcome.OK, released=5), (4, 6), True),
        (group(Outcome.OK), (9, 9), False),
        (group(Outcome.OK), (1.5, 9), True),
        (group(Outcome.FAILED), (1.5, 2), False),
        (group(Outcome.FAILED), (1.5, 3), True),
    ],
    ids=["released", "half released", "held", "returned without a lease", "failed", "failed and kept a lease"],
)
def test_all_or_nothing(group: Group, ends: tuple[float, float], expected: bool) -> None:
    """A multi-lock that has only some of its leases, when it returns or after its release, is found."""
    ops = [held("a", 1, 1, ends[0]), held("a", 2, 1, ends[1], name="y")]
    assert ("group" in broken(History(ops, groups=[group]))) is expected


def test_a_term_is_not_released_while_its_work_runs() -> None:
    """A candidate that released before its work had ended is found."""
    ops = [held("a", 1, 0, 2), released("a", 1, 2.0)]
    assert broken(History(ops, terms=[Term("x", "a", 1, 0.0, 2.0)])) == set()
    assert broken(History(ops, terms=[Term("x", "a", 1, 0.0, 2.5)])) == {"term"}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([("o", 1, "a", "va"), ("o", None, "", ""), ("o", 2, "b", "vb")], False),
        ([("o", 2, "b", "vb"), ("o", 1, "a", "va")], True),
        ([("o", 2, "b", "vb"), ("p", 1, "a", "va")], False),
        ([("o", 1, "a", "vb")], True),
        ([("o", 1, "b", "va")], True),
        ([("o", 3, "c", "vc")], False),
    ],
    ids=["in order", "an older term", "another observer", "another value", "another owner", "unknown to the history"],
)
def test_observers(seen: list[tuple[str, int | None, str, str]], expected: bool) -> None:
    """An observer that saw an older term after a newer one, or a leader with a wrong owner or value, is found."""
    ops = [held("a", 1, 0, 1, value="va"), held("b", 2, 2, 3, value="vb")]
    observed = [
        Observation("x", observer, float(at), token, owner, value)
        for at, (observer, token, owner, value) in enumerate(seen)
    ]
    assert ("observer" in broken(History(ops, observations=observed))) is expected


def test_accepted_tokens_must_not_fall() -> None:
    """A resource that accepted an older token after a newer one is found."""
    writes = [Write("d", "b", 34, 1.0, 0, 1, accepted=True), Write("d", "a", 33, 2.0, 1, 2, accepted=True)]
    assert broken(History(writes=writes)) == {"resource"}


def test_no_accepted_write_may_be_lost() -> None:
    """Token 34 reads, 33 writes, 34 writes over it: tokens rise, and a write is lost."""
    writes = [Write("d", "a", 33, 1.0, 0, 90, accepted=True), Write("d", "b", 34, 2.0, 0, 95, accepted=True)]
    (violation,) = check(History(writes=writes))
    assert violation.check == "resource"
    assert "the write of a (value 90) is lost" in violation.message


def test_refused_writes_do_not_count() -> None:
    """Writes that the fence refused do no harm."""
    writes = [Write("d", "b", 34, 1.0, 0, 1, accepted=True), Write("d", "a", 33, 2.0, 0, 2, accepted=False)]
    assert check(History(writes=writes)) == []


def test_orphans_after_the_ttl() -> None:
    """A claim that the engine has one ttl after the end is found, whatever its owner did."""
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
    ids=["gave up", "unknown", "held and never released"],
)
def test_orphans_of_a_caller_whose_operations_ended(op: Op, expected: bool) -> None:
    """A caller that gave up has left nothing even before its ttl; one that crashed or expired may have."""
    history = History([op], leftovers=[Leftover("x", "a", "waiter", 10.0)], quiet=10.0)
    assert ("orphans" in broken(history)) is expected
    assert broken(history, Invariants(clean=False)) == set()


def test_orphans_of_a_release() -> None:
    """A claim that is still there after its release is found at once."""
    history = History(
        [held("a", 1, 0, 1), released("a", 1, 1.0)], leftovers=[Leftover("x", "a", "claim", 1.5, since=1.1)]
    )
    assert broken(history) == {"orphans"}


def test_orphans_of_a_dead_process() -> None:
    """A claim that its dead process has left for longer than its ttl is found at once, however long others go on."""
    history = History([held("a", 1, 0, 1)], leftovers=[Leftover("x", "a", DEAD, 9.0, since=1.0)])
    assert broken(history, Invariants(clean=False)) == {"orphans"}


def test_a_history_is_lines_of_json() -> None:
    """What is written is read back the same, and an unknown line is refused."""
    history = replace(
        GOOD,
        groups=[group(Outcome.OK)],
        terms=[Term("x", "a", 1, 0.0, 1.0)],
        observations=[Observation("x", "o", 1.0, None)],
    )
    lines = list(history.lines())
    assert len(lines) == 15
    assert History.from_lines(lines) == history
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
