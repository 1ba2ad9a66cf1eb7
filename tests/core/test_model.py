"""The rule of admission, and what follows from it, on queues small enough to go through all of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from fencelock.core.clock import Deadline, boot_id, boottime, wall_us
from fencelock.model import (
    Claim,
    Grant,
    Mode,
    advance_queue,
    blockers,
    clock_margin,
    new_id,
)

WRITER = Claim("n", 30)
READER = Claim("n", 30, mode=Mode.SHARED)


def permit(limit: int) -> Claim:
    return Claim("n", 30, mode=Mode.PERMIT, limit=limit)


def queue(*kinds: Claim) -> list[Claim]:
    return [kind.with_new_id() for kind in kinds]


def test_first_claim_is_admitted() -> None:
    """A claim that is alone or first is admitted."""
    for kind in (WRITER, READER, permit(1)):
        (me,) = queue(kind)
        assert not blockers([], me)
        assert not blockers([me, *queue(WRITER, READER)], me)


def test_writer_watches_the_claim_ahead() -> None:
    """A blocked exclusive claim watches only the claim before it, so that one departure wakes one waiter."""
    a, b, c = queue(WRITER, WRITER, WRITER)
    assert blockers([a, b, c], c) == (b.id,)


def test_reader_watches_the_last_writer_ahead() -> None:
    """A reader passes other readers, but no writer that came before it."""
    r1, r2, w, r3, r4 = queue(READER, READER, WRITER, READER, READER)
    line = [r1, r2, w, r3, r4]
    assert not blockers(line, r2)
    assert blockers(line, w) == (r2.id,)
    assert blockers(line, r3) == (w.id,)
    assert blockers(line, r4) == (w.id,)


def test_permit_watches_all_claims_ahead() -> None:
    """A blocked permit watches all claims ahead of it."""
    line = queue(*[permit(2)] * 4)
    assert not blockers(line, line[1])
    assert blockers(line, line[2]) == (line[0].id, line[1].id)
    assert blockers(line, line[3]) == (line[0].id, line[1].id, line[2].id)


@pytest.mark.parametrize("limit", [None, 1, 2, 3])
def test_admission_on_all_small_queues(limit: int | None) -> None:
    """On all queues of up to six claims a writer is alone, permits stay within their limit, and nobody is overtaken."""
    shared = READER if limit is None else permit(limit)
    for length in range(1, 7):
        for kinds in itertools.product((WRITER, shared), repeat=length):
            line = queue(*kinds)
            admitted = [not blockers(line, me) for me in line]
            inside = [me for me, yes in zip(line, admitted, strict=True) if yes]
            assert admitted[0]
            assert admitted == sorted(admitted, reverse=True), "a claim was overtaken"
            assert len(inside) == 1 or all(me.shared for me in inside)
            assert limit is None or len(inside) <= max(limit, 1)
            if len(inside) < length:
                kept_out = line[len(inside)]
                assert not (kept_out.shared and all(me.shared for me in inside) and len(inside) < (limit or length))


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_blockers_stand_ahead_of_the_claim(limit: int | None) -> None:
    """The claims that a blocked claim watches stand before it in the queue."""
    shared = READER if limit is None else permit(limit)
    for kinds in itertools.product((WRITER, shared), repeat=5):
        line = queue(*kinds)
        for place, me in enumerate(line):
            assert set(blockers(line, me)) <= {other.id for other in line[:place]}


@dataclass
class Entry:
    id: str
    shared: bool
    limit: int | None
    token: int | None
    expires: float


def entry(kind: Claim, token: int | None = None, expires: float = 100) -> Entry:
    return Entry(new_id(), kind.shared, kind.limit, token, expires)


def test_advance_queue_removes_expired_and_admits_next() -> None:
    """advance_queue removes expired claims, admits the next ones, and returns the first blocked claim with its timer."""
    dead, alive, waits = entry(WRITER, 1, expires=10), entry(WRITER), entry(WRITER)
    settled = advance_queue([dead, alive, waits], 50)
    assert (settled.expired, settled.admitted, settled.first_blocked) == ([dead], [alive], waits)
    assert settled.holders_end is None
    holder = entry(READER, 3, expires=70)
    settled = advance_queue([entry(READER, 2, expires=80), holder, waits], 50)
    assert settled.first_blocked is waits
    assert settled.holders_end == 70


def test_advance_queue_removes_a_claim_at_its_expiry() -> None:
    """A claim is expired at its exact time of expiry."""
    last = entry(WRITER, 1, expires=50)
    assert advance_queue([last], 50).expired == [last]
    assert advance_queue([last], 49.999).expired == []


def test_advance_queue_stops_at_the_first_blocked_claim() -> None:
    """advance_queue does not read a long queue beyond the first blocked claim."""

    def lines() -> object:
        yield entry(WRITER, 1)
        yield entry(WRITER)
        raise AssertionError("read too far")

    assert advance_queue(lines(), 0).admitted == []  # type: ignore[arg-type]


def test_nobody_overtakes_a_waiting_permit() -> None:
    """With different limits on one name, neither a larger limit nor a reader overtakes a waiting claim with a smaller one."""
    holding, small, large, reader = queue(permit(3), permit(1), permit(5), READER)
    line = [holding, small, large, reader]
    assert blockers(line, small)
    assert blockers(line, large) == (holding.id, small.id)
    assert blockers(line, reader) == (holding.id, small.id, large.id)
    assert not blockers([small, large, reader], reader)


def test_deadline_is_before_the_end_on_the_engine() -> None:
    """The holder's deadline is 1 % of the ttl and 2 ms before the end of the claim on the engine."""
    for ttl in (0.1, 1, 30, 86400):
        grant = Grant(Claim("n", ttl), 1, since=1000.0)
        assert grant.deadline == pytest.approx(1000 + ttl * 0.99 - 0.002)
        assert clock_margin(ttl) < ttl / 3


def test_ids_are_random() -> None:
    """Claim ids have 128 bits and differ."""
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id) == 32 for id in ids)


def test_clock_does_not_go_back() -> None:
    """The client's clock does not go back; the boot id is constant; the wall clock is in µs."""
    times = [boottime() for _ in range(1000)]
    assert times == sorted(times)
    assert boot_id() == boot_id() != ""
    assert 1.6e15 < wall_us() < 2**53


def test_deadline_returns_the_remaining_time() -> None:
    """A deadline returns the remaining time, at least 0; a deadline of None never passes."""
    now = [10.0]
    deadline = Deadline(lambda: now[0], 5)
    assert (deadline.at_most(3), deadline.at_most(9), deadline.passed) == (3, 5, False)
    now[0] = 15.0
    assert (deadline.at_most(3), deadline.passed) == (0, True)
    now[0] = 20.0
    assert deadline.at_most(3) == 0
    never = Deadline(lambda: now[0], None)
    assert (never.at_most(3), never.passed) == (3, False)
