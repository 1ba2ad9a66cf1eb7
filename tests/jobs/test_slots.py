"""The slots of schedules: daylight saving, missed slots, overlaps, changed expressions. Nothing here needs an engine."""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest

from fencelock.errors import InvalidArgument, MissingDependency
from fencelock.primitives.runs import Outcome, Run, as_datetime, as_us, slot_text
from fencelock.primitives.slots import Caller, CatchUp, Plan, Rules, State, make_timetable, plan, timetable_of

MINUTE = 60_000_000
HOUR = 60 * MINUTE


def us(text: str) -> int:
    """Return a time in UTC as µs."""
    return as_us(datetime.fromisoformat(f"{text}+00:00"))


def local_slots(expression: str, zone: str, start: str, count: int) -> list[str]:
    """Return the local times of the first slots after a local time, with their offset from UTC."""
    begin = as_us(datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone)))
    found = islice(make_timetable(expression, None, zone, "job").after(begin), count)
    return [as_datetime(slot).astimezone(ZoneInfo(zone)).isoformat(timespec="minutes") for slot in found]


def finished(slot: int, started: int, ended: int, outcome: Outcome = Outcome.SUCCEEDED, attempt: int = 1) -> Run:
    """Return a run that has ended."""
    time = as_datetime(slot)
    return Run("job", slot_text(time), time, outcome, attempt, id="x",
               started=as_datetime(started), ended=as_datetime(ended))  # fmt: skip


# ---------------------------------------------------------------------------- daylight saving


@pytest.mark.parametrize(
    ("zone", "day", "expected"),
    [
        ("Europe/Berlin", "2026-03-28", ["2026-03-28T02:30+01:00", "2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        (
            "America/New_York",
            "2026-03-07",
            ["2026-03-07T02:30-05:00", "2026-03-08T03:00-04:00", "2026-03-09T02:30-04:00"],
        ),
        (
            "Australia/Lord_Howe",  # clocks move by half an hour
            "2026-10-03",
            ["2026-10-03T02:15+10:30", "2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"],
        ),
    ],
)
def test_fixed_time_in_a_gap_runs_at_its_end(zone: str, day: str, expected: list[str]) -> None:
    """In spring, a job whose time does not exist runs once, when the gap ends."""
    minute = 15 if "Howe" in zone else 30
    assert local_slots(f"{minute} 2 * * *", zone, f"{day}T00:00", 3) == expected


@pytest.mark.parametrize(
    ("zone", "day", "expected"),
    [
        ("Europe/Berlin", "2026-10-24", ["2026-10-24T02:30+02:00", "2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        (
            "America/New_York",
            "2026-10-31",
            ["2026-10-31T01:30-04:00", "2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"],
        ),
        (
            "Australia/Lord_Howe",
            "2026-04-04",
            ["2026-04-04T01:45+11:00", "2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"],
        ),
    ],
)
def test_fixed_time_that_comes_twice_runs_once(zone: str, day: str, expected: list[str]) -> None:
    """In autumn, a job whose time comes twice runs the first time only."""
    hour, minute = (2, 30) if "Berlin" in zone else (1, 45) if "Howe" in zone else (1, 30)
    assert local_slots(f"{minute} {hour} * * *", zone, f"{day}T00:00", 3) == expected


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("day", ["2026-03-08", "2026-03-29", "2026-04-05", "2026-10-04", "2026-10-25", "2026-11-01"])
def test_slots_do_not_depend_on_the_start(zone: str, day: str) -> None:
    """Processes that start at any minute of such a day agree about all later slots; `*` follows the elapsed time."""
    for expression in ("30 2 * * *", "0,15,45 1,2,3 * * *", "*/20 * * * *"):
        table = make_timetable(expression, None, zone, "job")
        begin = us(f"{day}T00:00") - 14 * HOUR
        slots = list(islice(table.after(begin), 120))
        assert all(one < other for one, other in pairwise(slots))
        for minute in range(0, 36 * 60, 7):
            now = begin + minute * MINUTE
            assert next(table.after(now)) == next(slot for slot in slots if slot > now)
        if expression.startswith("*") and "Howe" not in zone:  # there, clocks move by half an hour
            assert {other - one for one, other in pairwise(slots)} == {20 * MINUTE}


def test_every_counts_from_the_epoch() -> None:
    """All processes agree about the slots of `every`, whenever they start; fractions stay exact."""
    table = make_timetable(None, 0.3, "UTC", "job")
    slots = list(islice(table.after(us("2026-07-01T00:00:00.000001")), 1000))
    assert all(slot % 300_000 == 0 for slot in slots)
    assert {other - one for one, other in pairwise(slots)} == {300_000}


def test_timetable_can_be_made_from_its_text() -> None:
    """The text that the record stores is enough to find the next slot, as `fencelock jobs` does."""
    for table in (
        make_timetable(None, 86400, "UTC", "job"),
        make_timetable(None, 0.3, "UTC", "job"),
        make_timetable(" 0  2 * * 1-5", None, "Europe/Berlin", "job"),
    ):
        now = us("2026-07-01T00:00")
        assert next(timetable_of(table.text, "job").after(now)) == next(table.after(now))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cron": "* * * * *", "every": 5},
        {"cron": "61 * * * *"},
        {"cron": "0 0 30 2 *"},
        {"cron": 5},
        {"cron": "* * * * *", "tz": "Europe/Nowhere"},
        {"cron": "* * * * *", "tz": "../etc/passwd"},
        {"cron": "* * * * *", "tz": None},
        {"every": 0},
        {"every": 0.001},
        {"every": float("nan")},
        {"every": True},
    ],
)
def test_wrong_expressions_are_refused(options: dict[str, object]) -> None:
    """A schedule without a meaning raises InvalidArgument, which names it."""
    given = {"cron": None, "every": None, "tz": "UTC", **options}
    with pytest.raises(InvalidArgument, match="'job'"):
        make_timetable(given["cron"], given["every"], given["tz"], "job")


def test_word_instead_of_a_cron_expression() -> None:
    """The error for a word such as `daily` names the five fields."""
    with pytest.raises(InvalidArgument, match=r"^'job': 'daily' is no cron expression: .*write minute, hour, .*'0 2 "):
        make_timetable("daily", None, "UTC", "job")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cronsim, a cron expression says what to install, and `every` works."""
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingDependency, match=r"fencelock\[cron\]"):
        make_timetable("* * * * *", None, "UTC", "job")
    assert make_timetable(None, 60, "UTC", "job").text == "every 60 s"


# ---------------------------------------------------------------------------- which slots run

HOURLY = make_timetable(None, 3600, "UTC", "job")


def planned(state: State | None, rules: Rules, now: int, since: int, early: int | None = None) -> list[int]:
    """Return the slots that run at one moment, one after the other; each takes a second."""
    ran: list[int] = []
    while (found := plan(HOURLY, state, rules, Caller(now=now, since=since, early=early))).mark is not None:
        past = () if state is None else state.runs
        past += tuple(finished(slot, slot, slot, Outcome.SKIPPED) for slot in found.skipped)
        if found.slot is not None:
            ran.append(found.slot)
            past += (finished(found.slot, now, now + 1_000_000),)
            now += 1_000_000
        assert state is None or found.mark >= state.mark
        state = State(HOURLY.text, found.mark, past)
    return ran


@pytest.mark.parametrize(
    ("catch_up", "within", "expected"),
    [
        ("none", 24, []),
        ("latest", 24, [18]),
        ("all", 24, [13, 14, 15, 16, 17, 18]),
        ("all", 3, [16, 17, 18]),
        ("latest", 0.25, []),
    ],
)
def test_catch_up_after_six_hours_of_downtime(catch_up: CatchUp, within: float, expected: list[int]) -> None:
    """A fleet that ran the slot of 12:00 and was down until 18:30 runs the slots that `catch_up` says."""
    now = us("2026-07-01T18:30")
    twelve = us("2026-07-01T12:00")
    state = State(HOURLY.text, twelve, (finished(twelve, twelve, twelve + MINUTE),))
    rules = Rules(catch_up, int(within * HOUR))
    assert planned(state, rules, now, since=now) == [us(f"2026-07-01T{hour:02}:00") for hour in expected]


def test_first_run_starts_from_now() -> None:
    """A new schedule runs no slot that was due before, and stores when it began."""
    now = us("2026-07-01T18:30")
    assert plan(HOURLY, None, Rules("all"), Caller(now=now, since=now)) == Plan(mark=now)
    later = now + HOUR
    assert planned(None, Rules("all"), later, since=now) == [us("2026-07-01T19:00")]


def test_first_run_due_runs_the_latest_slot() -> None:
    """The first call of `run_due` runs the latest slot, if it is younger than `within`."""
    now = us("2026-07-01T18:30")
    for catch_up in ("latest", "all", "none"):
        assert planned(None, Rules(catch_up), now, now, early=0) == [us("2026-07-01T18:00")]
    assert planned(None, Rules("all", 10 * MINUTE), now, now, early=0) == []


def test_deciding_without_within_is_fast() -> None:
    """Without `within`, a schedule of seconds that was not used for years is decided at once."""
    table = make_timetable(None, 1, "UTC", "job")
    now = us("2026-07-01T18:30")
    rules = Rules(within=10**16, overlap="wait")
    state = State(table.text, us("2020-01-01T00:00"))
    for known, early in ((None, 0), (state, 0), (state, None)):
        found = plan(table, known, rules, Caller(now=now, since=now, early=early))
        assert (found.slot, found.mark) == (now, now)
        assert len(found.skipped) <= 20


def test_run_due_accepts_a_slot_that_is_a_little_ahead() -> None:
    """Kubernetes may start a job by a clock that is ahead: the slot runs, and does not run again when its time comes."""
    slot = us("2026-07-01T18:00")
    early = slot - 20_000_000
    assert planned(None, Rules(), early, early, early=30_000_000) == [slot]
    state = State(HOURLY.text, slot, (finished(slot, early, early + 1),))
    for now in (early + 2, slot, slot + MINUTE):
        assert planned(state, Rules(), now, now, early=30_000_000) == []


def test_early_runs_only_the_nearest_slot() -> None:
    """With slots every 10 s, `early=30` runs the nearest slot and no later one."""
    table = make_timetable(None, 10, "UTC", "job")
    at = us("2026-07-01T18:00:01")
    assert plan(table, None, Rules(), Caller(now=at, since=at, early=30_000_000)).slot == us("2026-07-01T18:00:00")
    at = us("2026-07-01T18:00:09")
    assert plan(table, None, Rules(), Caller(now=at, since=at, early=30_000_000)).slot == us("2026-07-01T18:00:10")


def test_changed_expression_neither_replays_nor_catches_up() -> None:
    """After a change, only slots run that are due after it; those up to the mark stay rejected."""
    twelve = us("2026-07-01T12:00")
    state = State("cron 0 12 * * * UTC", twelve, (finished(twelve, twelve, twelve + 1),))
    now = us("2026-07-01T18:30")
    assert plan(HOURLY, state, Rules("all", 24 * HOUR), Caller(now=now, since=now)) == Plan(mark=now)
    assert plan(HOURLY, state, Rules("all", 24 * HOUR), Caller(now=now, since=now, early=0)) == Plan(mark=now)
    on_time = us("2026-07-01T19:00:02")
    assert plan(HOURLY, state, Rules(), Caller(now=on_time, since=on_time, early=0)).slot == us("2026-07-01T19:00")
    ahead = State("cron 0 20 * * * UTC", us("2026-07-01T20:00"))
    assert plan(HOURLY, ahead, Rules("all"), Caller(now=us("2026-07-01T20:00"), since=now)).slot is None


def test_mark_ahead_of_this_clock_rejects_slots() -> None:
    """A process with a slow clock does not run what a process with a fast clock has run."""
    slot = us("2026-07-01T18:00")
    state = State(HOURLY.text, slot, (finished(slot, slot, slot + 1),))
    for now in range(slot - 5_000_000, slot + 5_000_000, 1_000_000):
        assert plan(HOURLY, state, Rules("all"), Caller(now=now, since=now - HOUR)).slot is None


def test_overlap_skips_or_waits() -> None:
    """Slots that were due during a run are skipped, or run after it, as the schedule says."""
    first = us("2026-07-01T12:00")
    now = us("2026-07-01T15:30")
    state = State(HOURLY.text, first, (finished(first, first, now - 1),))
    skipped = (first + HOUR, first + 2 * HOUR, first + 3 * HOUR)
    rules = Rules("latest", 24 * HOUR)
    assert plan(HOURLY, state, rules, Caller(now=now, since=first - HOUR)) == Plan(None, 1, skipped, skipped[-1])
    assert planned(state, rules._replace(overlap="wait"), now, since=first - HOUR) == list(skipped)


def test_slots_that_could_not_run_in_an_outage() -> None:
    """After an outage, the latest slot runs and the earlier ones are skipped; with overlap="wait", all of them run."""
    first = us("2026-07-01T12:00")
    now = us("2026-07-01T15:30")
    state = State(HOURLY.text, first, (finished(first, first, first + MINUTE),))
    rules = Rules("none", 24 * HOUR)
    found = plan(HOURLY, state, rules, Caller(now=now, since=first - HOUR))
    assert (found.slot, found.skipped) == (first + 3 * HOUR, (first + HOUR, first + 2 * HOUR))
    assert len(planned(state, rules._replace(overlap="wait"), now, since=first - HOUR)) == 3


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.ABANDONED, Outcome.RUNNING])
def test_failed_slot_runs_again_while_it_has_attempts(outcome: Outcome) -> None:
    """A slot that failed or lost its worker runs again while it has attempts left and is young enough."""
    slot = us("2026-07-01T12:00")
    state = State(HOURLY.text, slot, (finished(slot, slot, slot + MINUTE, outcome),))
    now = slot + 2 * MINUTE
    assert plan(HOURLY, state, Rules(attempts=1), Caller(now=now, since=now)).slot is None
    assert plan(HOURLY, state, Rules(attempts=2), Caller(now=now, since=now)) == Plan(slot, 2, (), slot)
    again = state._replace(runs=(*state.runs, finished(slot, slot, slot, outcome, attempt=2)))
    assert plan(HOURLY, again, Rules(attempts=2), Caller(now=now, since=now)).slot is None
    assert plan(HOURLY, state, Rules(within=MINUTE, attempts=2), Caller(now=now, since=now)).slot is None
    newer = plan(HOURLY, state, Rules(attempts=2), Caller(now=slot + HOUR, since=slot))
    assert (newer.slot, newer.attempt) == (slot + HOUR, 1)


def test_claim_that_never_started_does_not_use_up_an_attempt() -> None:
    """If the reply to a claim was lost and nothing started, the same process runs the slot as the same attempt."""
    slot = us("2026-07-01T12:00")
    state = State(HOURLY.text, slot, (finished(slot, slot, slot, Outcome.RUNNING),))
    found = plan(HOURLY, state, Rules(), Caller(now=slot + MINUTE, since=slot, not_started={"x"}))
    assert (found.slot, found.attempt) == (slot, 1)
