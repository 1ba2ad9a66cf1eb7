"""The slots of a schedule, and which of them to run now. Pure: no engine, no clock. Times are µs since the epoch."""

from __future__ import annotations

from collections.abc import Container, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Literal, NamedTuple, Protocol

from fencelock.core.validation import check_seconds
from fencelock.errors import InvalidArgument, InvalidType, MissingDependency
from fencelock.primitives.runs import Outcome, Run, as_datetime, as_us

CatchUp = Literal["latest", "all", "none"]
Overlap = Literal["skip", "wait"]

MIN_EVERY = 0.05
CHANGED_GRACE = 60_000_000
"""µs. After a change of the expression, `run_due` runs a slot that is at most this old: cron called it for this slot."""
MAX_SKIPPED = 20
"""How many slots that were skipped together get an entry in the history: the latest ones."""


class Timetable(Protocol):
    """The slots of an expression: the same for every process, whatever its clock."""

    @property
    def text(self) -> str:
        """The expression as the record stores it."""
        ...

    def after(self, time: int) -> Iterator[int]:
        """Yield all slots after this time, in order."""
        ...


class Every:
    """Multiples of a number of seconds since the epoch."""

    def __init__(self, every: object, name: str) -> None:
        seconds = check_seconds(every, "every", name, zero=False)
        if seconds is None or seconds < MIN_EVERY:
            raise InvalidArgument(f"{name!r}: every must be at least {MIN_EVERY:g} seconds, not {every!r:.40}", name)
        self._interval = round(seconds * 1e6)
        self.text = f"every {f'{self._interval / 1e6:.6f}'.rstrip('0').rstrip('.')} s"

    def after(self, time: int) -> Iterator[int]:
        """Yield all slots after this time."""
        while True:
            time = (time // self._interval + 1) * self._interval
            yield time


class Cron:
    """A cron expression in a time zone, with daylight saving as in Debian's cron.

    A job at a fixed time that does not exist runs at the end of the gap; one whose time comes twice runs the first time. Jobs
    with a star for minute or hour follow the elapsed time.
    """

    def __init__(self, expression: object, tz: object, name: str) -> None:
        try:
            from cronsim import CronSim, CronSimError
        except ImportError as error:
            message = (
                f"{name!r}: cron expressions need the package cronsim: pip install 'fencelock[cron]', or use every="
            )
            raise MissingDependency(message) from error
        if not isinstance(expression, str):
            raise InvalidType(
                f"{name!r}: cron must be a str such as '0 2 * * *', not {type(expression).__name__}", name
            )
        self._simulate = CronSim
        self._expression = " ".join(expression.split())
        self._zone = _zone(tz, name)
        self.text = f"cron {self._expression} {tz}"
        try:
            slots = CronSim(self._expression, datetime(2024, 1, 1, tzinfo=self._zone))
        except CronSimError as error:
            raise InvalidArgument(
                f"{name!r}: {expression!r:.80} is no cron expression: {error}; write minute, hour, day of the month, "
                "month and day of the week, as in '0 2 * * *' for each day at 2",
                name,
            ) from None
        if next(slots, None) is None:
            raise InvalidArgument(f"{name!r}: {expression!r:.80} names no time that ever comes", name)

    def after(self, time: int) -> Iterator[int]:
        """Yield all slots after this time."""
        # In an hour that comes twice, the first slots may be before `time`; two slots may fall on the end of a gap.
        for local in self._simulate(self._expression, as_datetime(time).astimezone(self._zone)):
            if (slot := as_us(local)) > time:
                time = slot
                yield slot


def _zone(tz: object, name: str) -> tzinfo:
    if tz == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    if not isinstance(tz, str):
        raise InvalidType(f"{name!r}: tz must be a str such as 'Europe/Berlin', not {type(tz).__name__}", name)
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError) as error:
        message = f"{name!r}: the time zone {tz!r:.80} is not known here; is its name right, and tzdata installed?"
        raise InvalidArgument(message, name) from error


def make_timetable(cron: object, every: object, tz: object, name: str) -> Timetable:
    """Return the timetable of a schedule, or raise InvalidArgument."""
    if (cron is None) == (every is None):
        raise InvalidArgument(f"{name!r}: give either cron= or every=", name)
    return Every(every, name) if cron is None else Cron(cron, tz, name)


def timetable_of(text: str, name: str) -> Timetable:
    """Return the timetable that a record names.

    >>> timetable_of("every 3600 s", "billing").text
    'every 3600 s'
    """
    kind, _, rest = text.partition(" ")
    expression, _, last = rest.rpartition(" ")
    return Every(float(expression), name) if kind == "every" else Cron(expression, last, name)


class Rules(NamedTuple):
    """What a schedule does with slots that nobody ran in time. `within` is in µs."""

    catch_up: CatchUp = "latest"
    within: int = 3_600_000_000
    overlap: Overlap = "skip"
    attempts: int = 1


class State(NamedTuple):
    """What the record of a schedule has: its high-water mark, and its last runs, oldest first."""

    text: str
    """The expression of the last writer."""
    mark: int
    """Slots up to this one never start any more, except for a further attempt of this very slot."""
    runs: tuple[Run, ...] = ()
    listed: bool = False
    """Whether the list of schedules has the name."""

    @property
    def marked(self) -> Run | None:
        """The last attempt at the slot of the mark, if it was one."""
        wanted = as_datetime(self.mark)
        return next((run for run in reversed(self.runs) if run.time == wanted and not run.triggered), None)


class Plan(NamedTuple):
    """What to do now: record the slots in `skipped`, then run `slot`, if there is one."""

    slot: int | None = None
    attempt: int = 1
    skipped: tuple[int, ...] = ()
    mark: int | None = None
    """The new high-water mark; None if nothing changes."""


NOTHING = Plan()


class Caller(NamedTuple):
    """The process that asks what to run, and what it knows. Times are in µs since the epoch."""

    now: int
    since: int
    """When it began to watch: earlier slots are missed, later ones are its own to run."""
    early: int | None = None
    """With a number, `run_due` asks, which watches nothing: the latest slot is its own, and may be so many µs ahead."""
    settled: int = 0
    """The last slot that it need not look at again."""
    not_started: Container[str] = ()
    """The ids of its claims that never began to run."""


def plan(table: Timetable, state: State | None, rules: Rules, caller: Caller) -> Plan:
    """Decide which slot to run now. The caller asks again after it."""
    now, since, early, settled, not_started = caller
    called, changed = early is not None, state is None or state.text != table.text
    mark = 0 if state is None else state.mark
    floor = max(mark, now - rules.within - 1, settled)
    if changed:
        floor = max(floor, (now - CHANGED_GRACE if state is not None else 0) if called else since)
    # All missed slots are needed only if all of them are to run: there may be years of them.
    find = _all if rules.catch_up == "all" and not changed else _last
    if early is not None:
        due = find(table, floor, now) + _early(table, max(floor, now), now, early)
        own, missed = due[-1:], due[:-1]
    else:
        own, missed = _all(table, max(floor, since), now), find(table, floor, min(since, now))
    missed = [] if changed else missed
    retry = None if state is None or changed else _retry(state, rules, now, not_started)
    chosen = _chosen(missed, own, state, rules)
    if retry is not None and (rules.overlap == "wait" or not chosen):
        return retry
    if changed:
        return Plan(chosen[0], mark=chosen[0]) if chosen else Plan(mark=max(mark, now if called else since))
    skipped = _last(table, mark, floor) + [
        slot for slot in (*missed, *own) if slot not in chosen and (not chosen or slot < chosen[0])
    ]
    if chosen:
        return Plan(chosen[0], 1, tuple(skipped[-MAX_SKIPPED:]), chosen[0])
    return Plan(None, 1, tuple(skipped[-MAX_SKIPPED:]), skipped[-1]) if skipped else NOTHING


def _last(table: Timetable, start: int, end: int) -> list[int]:
    """Return the last slots up to `end` and after `start`, at most MAX_SKIPPED: looking back further and further."""
    width = 60_000_000
    while True:
        begin = max(start, end - width)
        found = _all(table, begin, end)
        if begin == start or len(found) >= MAX_SKIPPED:
            return found[-MAX_SKIPPED:]
        width *= 8


def _all(table: Timetable, start: int, end: int) -> list[int]:
    return list(takewhile(lambda slot: slot <= end, table.after(start)))


def _early(table: Timetable, start: int, now: int, early: int) -> list[int]:
    """Return the next slot if it is at most `early` ahead, and nearer than the one before."""
    return [
        slot
        for slot in islice(table.after(start), 1)
        # The second condition: no slot in the past is as near as this one in the future.
        if slot - now <= early and next(table.after(2 * now - slot), slot) > now
    ]


def _chosen(missed: list[int], own: list[int], state: State | None, rules: Rules) -> list[int]:
    """Return the slots to run, in order."""
    if rules.overlap == "skip":
        runs = () if state is None else state.runs
        missed = [slot for slot in missed if not _overlapped(slot, runs)]
        own = [slot for slot in own[-1:] if not _overlapped(slot, runs)]
    if rules.catch_up == "all":
        return missed + own
    return own or (missed[-1:] if rules.catch_up == "latest" else [])


def _overlapped(slot: int, runs: tuple[Run, ...]) -> bool:
    """Return whether a run was in progress when the slot was due."""
    time = as_datetime(slot)
    return any(
        run.started is not None and run.ended is not None and run.started <= time < run.ended and run.time != time
        for run in runs
    )


def _retry(state: State, rules: Rules, now: int, not_started: Container[str]) -> Plan | None:
    """Return the next attempt at the slot of the mark, if its last one failed or was abandoned and it has attempts left."""
    last = state.marked
    if last is None or last.outcome in (Outcome.SUCCEEDED, Outcome.SKIPPED) or state.mark < now - rules.within:
        return None
    if last.id in not_started:
        return Plan(state.mark, last.attempt, (), state.mark)
    return Plan(state.mark, last.attempt + 1, (), state.mark) if last.attempt < rules.attempts else None


def next_slot(table: Timetable, now: int) -> datetime:
    """Return the next slot after this time; a timetable that ends goes on in the far future."""
    slot = next(table.after(now), None)
    return as_datetime(now) + timedelta(days=365 * 50) if slot is None else as_datetime(slot)
