"""The rule of admission, and what follows from it, on queues small enough to go through all of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from fencelock.core.clock import Deadline, boot_id, boottime, wall_us
from fencelock.model import (
    Admitted,
    Blocked,
    Claim,
    Grant,
    Mode,
    Until,
    admit,
    advance_queue,
    clock_margin,
    new_id,
)

WRITER = Claim("n", 30)
READER = Claim("n", 30, mode=Mode.SHARED)


def permit(limit: int) -> Claim:
    return Claim("n", 30, mode=Mode.PERMIT, limit=limit)


def queue(*kinds: Claim) -> list[Claim]:
    return [kind.with_new_id() for kind in kinds]


def test_first_is_admitted() -> None:
    """A claim that is alone, or first, may hold the name."""
    for kind in (WRITER, READER, permit(1)):
        (me,) = queue(kind)
        assert isinstance(admit([], me), Admitted)
        assert isinstance(admit([me, *queue(WRITER, READER)], me), Admitted)


def test_writer_waits_for_the_one_ahead() -> None:
    """An exclusive claim watches only the one before it: one departure wakes one waiter."""
    a, b, c = queue(WRITER, WRITER, WRITER)
    assert admit([a, b, c], c) == Blocked((b.id,), Until.ALL)


def test_reader_waits_for_the_last_writer() -> None:
    """A reader passes other readers, but no writer that came before it."""
    r1, r2, w, r3, r4 = queue(READER, READER, WRITER, READER, READER)
    line = [r1, r2, w, r3, r4]
    assert isinstance(admit(line, r2), Admitted)
    assert admit(line, w) == Blocked((r2.id,), Until.ALL)
    assert admit(line, r3) == Blocked((w.id,), Until.ALL)
    assert admit(line, r4) == Blocked((w.id,), Until.ALL)


def test_permit_waits_for_any_holder() -> None:
    """Any departure ahead wakes a permit that waits."""
    line = queue(*[permit(2)] * 4)
    assert isinstance(admit(line, line[1]), Admitted)
    assert admit(line, line[2]) == Blocked((line[0].id, line[1].id), Until.ANY)
    assert admit(line, line[3]) == Blocked((line[0].id, line[1].id, line[2].id), Until.ANY)


@pytest.mark.parametrize("limit", [None, 1, 2, 3])
def test_admission_on_all_small_queues(limit: int | None) -> None:
    """On all queues of up to six: never a writer with anybody, never more permits than the limit, nobody overtaken."""
    shared = READER if limit is None else permit(limit)
    for length in range(1, 7):
        for kinds in itertools.product((WRITER, shared), repeat=length):
            line = queue(*kinds)
            admitted = [isinstance(admit(line, me), Admitted) for me in line]
            inside = [me for me, yes in zip(line, admitted, strict=True) if yes]
            assert admitted[0]
            assert admitted == sorted(admitted, reverse=True), "somebody overtook"
            assert len(inside) == 1 or all(me.shared for me in inside)
            assert limit is None or len(inside) <= max(limit, 1)
            if len(inside) < length:
                kept_out = line[len(inside)]
                assert not (kept_out.shared and all(me.shared for me in inside) and len(inside) < (limit or length))


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_blocked_by_somebody_ahead(limit: int | None) -> None:
    """Whom a blocked claim has to watch stands before it, and once they are gone it is worth asking again."""
    shared = READER if limit is None else permit(limit)
    for kinds in itertools.product((WRITER, shared), repeat=5):
        line = queue(*kinds)
        for place, me in enumerate(line):
            answer = admit(line, me)
            if isinstance(answer, Blocked):
                ahead = [other.id for other in line[:place]]
                assert answer.by
                assert set(answer.by) <= set(ahead)


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
    """Expired claims are removed, the next are admitted, and the first blocked claim is returned with its timer."""
    dead, alive, waits = entry(WRITER, 1, expires=10), entry(WRITER), entry(WRITER)
    settled = advance_queue([dead, alive, waits], 50)
    assert (settled.dead, settled.admitted, settled.first) == ([dead], [alive], waits)
    assert settled.holders_end is None
    holder = entry(READER, 3, expires=70)
    settled = advance_queue([entry(READER, 2, expires=80), holder, waits], 50)
    assert settled.first is waits
    assert settled.holders_end == 70


def test_settle_counts_the_moment_of_expiry_as_over() -> None:
    """At its very expiry a claim is over."""
    last = entry(WRITER, 1, expires=50)
    assert advance_queue([last], 50).dead == [last]
    assert advance_queue([last], 49.999).dead == []


def test_settle_stops_at_the_first_that_stays_blocked() -> None:
    """A long queue is not read to its end."""

    def lines() -> object:
        yield entry(WRITER, 1)
        yield entry(WRITER)
        raise AssertionError("read too far")

    assert advance_queue(lines(), 0).admitted == []  # type: ignore[arg-type]


def test_nobody_overtakes_a_permit_that_waits() -> None:
    """With different limits on one name, a larger limit or a reader does not pass a smaller limit that waits."""
    holding, small, large, reader = queue(permit(3), permit(1), permit(5), READER)
    line = [holding, small, large, reader]
    assert isinstance(admit(line, small), Blocked)
    assert admit(line, large) == Blocked((holding.id, small.id), Until.ANY)
    assert admit(line, reader) == Blocked((holding.id, small.id, large.id), Until.ANY)
    assert isinstance(admit([small, large, reader], reader), Admitted)


def test_deadline_is_before_the_engines() -> None:
    """A holder stops before the engine lets others in: by 1 % of the ttl and 2 ms."""
    for ttl in (0.1, 1, 30, 86400):
        grant = Grant(Claim("n", ttl), 1, since=1000.0)
        assert grant.deadline == pytest.approx(1000 + ttl * 0.99 - 0.002)
        assert clock_margin(ttl) < ttl / 3


def test_ids_are_random() -> None:
    """Ids have 128 bits and differ."""
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id) == 32 for id in ids)


def test_clock() -> None:
    """The client's clock does not go back; the boot id is steady; the wall clock is in µs."""
    times = [boottime() for _ in range(1000)]
    assert times == sorted(times)
    assert boot_id() == boot_id() != ""
    assert 1.6e15 < wall_us() < 2**53


def test_deadline() -> None:
    """A deadline knows what is left, never less than nothing, and None is never."""
    now = [10.0]
    deadline = Deadline(lambda: now[0], 5)
    assert (deadline.at_most(3), deadline.at_most(9), deadline.passed) == (3, 5, False)
    now[0] = 15.0
    assert (deadline.at_most(3), deadline.passed) == (0, True)
    now[0] = 20.0
    assert deadline.at_most(3) == 0
    never = Deadline(lambda: now[0], None)
    assert (never.at_most(3), never.passed) == (3, False)
