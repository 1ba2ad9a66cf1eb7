"""The checks of the primitives that keep records: once, schedule, rate_limit and single_flight."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import NamedTuple

from fencelock.primitives.runs import as_datetime, as_us, slot_text
from fencelock.primitives.slots import MAX_SKIPPED
from fencelock.sim.history import Build, CacheCall, Charge, JobRun, Op, Outcome, RecordWrite, Reservation, Watch

LONGEST_CALL = 60.0
"""Seconds after which a call of single flight counts as stuck."""
UNSETTLED = 9_000_000
"""µs before the end of a schedule's run in which a slot need not be settled: its worker may have been stopped."""
CLOCKS = 1.01
"""Clocks differ by less than this factor."""
LATE = 0.002
"""Seconds by which a timer of the simulator may be late."""


_parsed = lru_cache(512)(json.loads)


class Validity:
    """When each lease of a name ended for its holder."""

    def __init__(self, grants: Iterable[Op]) -> None:
        self._grants = sorted((op for op in grants if op.valid_from is not None), key=attrgetter("valid_from"))
        self._ends = {op.token: op.valid_until or inf for op in self._grants}

    def end(self, token: int) -> float:
        """Return when the lease with this token ended."""
        return self._ends.get(token, -inf)

    def end_of_builder(self, build: Build) -> float:
        """Return when the lease ended under which a process builds: the last exclusive one that it got."""
        leases = [
            op
            for op in self._grants
            if op.owner == build.owner and not op.shared and op.valid_from <= build.start  # type: ignore[operator]
        ]
        return self.end(leases[-1].token) if leases else inf  # type: ignore[arg-type]


def overlaps(work: Iterable[tuple[str, float, float]], what: str) -> Iterator[str]:
    """Never two at once: `work` has its label, its start, and the end of the work or of its lease."""
    trusted = sorted((entry for entry in work if entry[1] < entry[2]), key=lambda entry: entry[1])
    for (first, _, end), (second, start, _) in pairwise(trusted):
        if start < end:
            yield f"{second} begins {what} at {start:.4f}, and {first} is at it until {end:.4f}"


# ---------------------------------------------------------------------- jobs


def jobs(runs: Sequence[JobRun], writes: Sequence[RecordWrite], validity: Validity) -> Iterator[str]:
    """A slot has at most its attempts, one after the other, each under a lease, and none after it succeeded."""
    yield from overlaps(((_label(run), run.start, min(run.end, validity.end(run.token))) for run in runs), "a run")
    by_slot: defaultdict[str, list[JobRun]] = defaultdict(list)
    for run in sorted(runs, key=attrgetter("start")):
        if run.start > validity.end(run.token):
            yield f"{_label(run)} begins at {run.start:.4f}, after its lease ended"
        if not run.triggered:
            by_slot[run.slot].append(run)
    succeeded = _succeeded(writes)
    for slot, attempts in by_slot.items():
        if len(attempts) > attempts[0].attempts:
            yield f"slot {slot} ran {len(attempts)} times, and {attempts[0].attempts} are allowed"
        for earlier, later in pairwise(attempts):
            if later.token <= earlier.token or later.attempt <= earlier.attempt:
                yield f"{_label(later)} follows {_label(earlier)}"
        for run in attempts:
            if run.start > succeeded.get(slot, inf):
                yield f"{_label(run)} begins at {run.start:.4f}, after the slot succeeded"


def _label(run: JobRun) -> str:
    return f"{run.owner} (slot {run.slot}, attempt {run.attempt}, token {run.token})"


def _succeeded(writes: Iterable[RecordWrite]) -> dict[str, float]:
    """Return when the record first said of each slot that it succeeded."""
    found: dict[str, float] = {}
    for write in writes:
        stored = _parsed(write.value)
        if "mark" not in stored and stored["outcome"] == "succeeded":
            found.setdefault(write.key.partition("/")[2], write.at)
        for run in stored.get("runs", ()):
            if run["outcome"] == "succeeded" and "triggered" not in run:
                found.setdefault(slot_text(as_datetime(run["time"])), write.at)
    return found


def schedules(runs: Sequence[JobRun], writes: Sequence[RecordWrite], watches: Sequence[Watch]) -> Iterator[str]:
    """The mark of a schedule never goes back, and each slot up to it ran or was skipped, as the record says.

    The mark reaches each slot that came while a process ran the schedule, a while before that process stopped.
    """
    states = [_parsed(write.value) for write in writes]
    last = max((state["mark"] for state in states), default=0)
    known = {run["time"] for state in states for run in state["runs"] if "triggered" not in run}
    every = next((watch.every for watch in watches), None)
    for (earlier, later), write in zip(pairwise(states), writes[1:], strict=True):
        if later["mark"] < earlier["mark"]:
            yield f"token {write.token} set the mark back from {earlier['mark']} to {later['mark']} at {write.at:.4f}"
        passed = () if every is None else _slots(every, earlier["mark"], later["mark"])[-MAX_SKIPPED:]
        for slot in passed:
            if slot not in known:
                yield f"slot {slot} neither ran nor was skipped, and the mark is {later['mark']}"
    for run in runs:
        if not run.triggered and as_us(datetime.fromisoformat(run.slot)) > last:
            yield f"{_label(run)} ran, and the mark is {last}"
    for watch in watches:
        for slot in _slots(watch.every, watch.since, watch.until - UNSETTLED):
            if slot > last and not watch.waits:
                yield f"slot {slot} came while {watch.owner} ran the schedule, and the mark is {last}"


def _slots(every: int, start: int, end: int) -> range:
    """Return the slots after `start`, up to `end`."""
    return range((start // every + 1) * every, end + 1, every)


# ---------------------------------------------------------------------- rate limits


class _Grant(NamedTuple):
    go: int
    calls: float
    number: int


def rate_limits(charges: Sequence[Charge], reservations: Sequence[Reservation]) -> Iterator[str]:
    """No window has more than n + burst calls by the engine's clock; refused calls are not charged; nobody goes late."""
    if not reservations:
        return
    n, per, burst = reservations[0].n, reservations[0].per, reservations[0].burst
    interval = per * 1e6 / n
    number, count, grants = 0, 0, list[_Grant]()
    for charge in charges:
        if charge.number < number and grants and grants[-1].number == number:
            grants.pop()  # a refund
        elif charge.number > number:
            count += 1
            calls = (charge.number - max(number, charge.at)) / interval
            wait = max(0.0, charge.number - burst * interval - charge.at) if charge.wait is None else charge.wait * 1e6
            grants.append(_Grant(charge.at + int(wait), calls, charge.number))
        number = charge.number
    yield from _windows(grants, per, n + burst)
    outcomes = [reservation.outcome for reservation in reservations]
    granted, unknown = outcomes.count(Outcome.OK), outcomes.count(Outcome.UNKNOWN)
    if not granted <= count <= granted + unknown:
        yield f"{count} charges, for {granted} granted calls and {unknown} without a reply"
    allowed = burst * interval / 1e6 * CLOCKS + LATE
    for reservation in reservations:
        if reservation.went is None or not reservation.wait:
            continue
        late = reservation.went - reservation.called - reservation.wait * CLOCKS
        early = (reservation.returned or 0.0) + reservation.wait / CLOCKS - reservation.went
        if late > allowed:
            yield f"{reservation.owner} went at {reservation.went:.4f}, {late:.4f} s after its turn"
        if early > 0:
            yield f"{reservation.owner} went at {reservation.went:.4f}, {early:.4f} s before its turn"


def _windows(grants: Sequence[_Grant], per: float, most: int) -> Iterator[str]:
    grants = sorted(grants)
    times = [grant.go for grant in grants]
    for last, grant in enumerate(grants):
        first = bisect_left(times, grant.go - int(per * 1e6) + 1)
        calls = sum(grant.calls for grant in grants[first : last + 1])
        if calls > most + 1e-3 * len(grants):
            yield f"{calls:.2f} calls in the {per:g} s before {grant.go}, and at most {most} are allowed"


# ---------------------------------------------------------------------- cached values


def cached_values(
    builds: Sequence[Build],
    writes: Sequence[RecordWrite],
    calls: Iterable[CacheCall],
    validity: Validity,
    slack: float,
) -> Iterator[str]:
    """One builder at a time; a value is never replaced by an older one; every caller gets a value that was built, in time.

    A value is stored only over what its builder found, so the write before it came before the build. `slack` is the time
    that a value may need from its build to the record.
    """
    work = ((f"{it.owner} (build {it.number})", it.start, min(it.end, validity.end_of_builder(it))) for it in builds)
    yield from overlaps(work, "a build")
    by_number = {build.number: build for build in builds}
    for before, write in pairwise(writes):
        if before.expires <= write.at:
            continue
        if write.token < before.token or (write.token == before.token and _stored(write) and _stored(before)):
            yield f"token {write.token} replaced the value of token {before.token} at {write.at:.4f}"
        number = _stored(write)
        if number and by_number[number].start < before.at:
            yield f"build {number} was stored at {write.at:.4f}, over a write of {before.at:.4f}, after it began"
    for call in calls:
        if call.returned - call.called > LONGEST_CALL:
            yield f"{call.owner} called at {call.called:.4f} and got its answer at {call.returned:.4f}"
        build = None if call.value is None else by_number[call.value]
        # Callers of the builder's process share its flight, which may have been stopped between build and store.
        if build and build.owner != call.owner and call.called > build.end + (call.kept + slack) * CLOCKS:
            yield f"{call.owner} called at {call.called:.4f} and got build {call.value}, which has expired"


def _stored(write: RecordWrite) -> int:
    """Return the number of the build that a write stores, or 0 if it invalidates the value."""
    return int(write.value.partition("\n")[2]) if write.value.startswith("v") else 0
