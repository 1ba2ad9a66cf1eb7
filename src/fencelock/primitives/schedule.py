"""A schedule: each slot runs once in the whole fleet, however far the clocks of its processes are apart.

One record per schedule has a high-water mark: slots up to it never start again. It is written only by the holder of the
schedule's lock, with the token of that lock and the version that was read under it. A run holds the lock until it ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, Unpack

from fencelock.core.acquire import attach_name
from fencelock.core.client import Client, L
from fencelock.core.log import ERROR, WARNING, log
from fencelock.core.records import FOREVER, RECORD_MAX_BYTES, UNFENCED_TOKEN, Record, Records, records_of
from fencelock.core.validation import check_seconds
from fencelock.core.watch import StopSignal
from fencelock.errors import EngineUnavailable, InvalidArgument, LeaseLost, MissingDependency
from fencelock.primitives import runs, slots
from fencelock.primitives.keys import record_key
from fencelock.primitives.lock import BaseLock, CommonOptions
from fencelock.primitives.runs import ClaimedRun, Outcome, Run, as_datetime, slot_text
from fencelock.primitives.slots import Plan, Rules, State

HISTORY_MAX = 50
"""Runs that the record keeps."""
LIST_KEY = "schedules:all"
"""The record with the names of all schedules, for `fencelock jobs`."""
STOP_CHECK_SECONDS = 0.5
RETRY_SECONDS = 1.0
"""The longest pause between two tries while the engine cannot be reached."""

Work = Callable[[L, Run], Awaitable[object]]
"""Calls the user's function with a slot."""


class BaseSchedule(Generic[L]):
    """The schedule of both APIs, as coroutines. It checks its arguments when it is made."""

    def __init__(
        self,
        client: Client[L],
        name: str,
        *,
        cron: str | None = None,
        every: float | None = None,
        tz: str = "UTC",
        catch_up: Literal["latest", "all", "none"] = "latest",
        within: float | None = 3600.0,
        overlap: Literal["skip", "wait"] = "skip",
        attempts: int = 1,
        **options: Unpack[CommonOptions],
    ) -> None:
        self.name = name
        self._key = record_key("schedule", name)
        self._client = client
        self._records = records_of(client.engine, f"schedule({name!r})", name)
        self._table = slots.make_timetable(cron, every, tz, name)
        _check_choice(catch_up, ("latest", "all", "none"), "catch_up", name)
        _check_choice(overlap, ("skip", "wait"), "overlap", name)
        seconds = check_seconds(within, "within", name, zero=False)
        self._rules = Rules(
            catch_up, int((FOREVER if seconds is None else seconds) * 1e6), overlap, runs.check_attempts(attempts, name)
        )
        self._lock = BaseLock(client, self._key, **options)
        self.clock: Callable[[], float] = time.time
        """The wall clock, which decides when a slot is due."""
        self._not_started: set[str] = set()
        """Ids of claims whose write may have happened, but whose run never began."""
        self._mark = 0
        """The high-water mark that was read last."""
        self._warned_changed = False

    # ------------------------------------------------------------------ what users call

    def next(self) -> datetime:
        """Return the next slot, by this machine's clock; a slot that this object has seen run early is not the next."""
        return slots.next_slot(self._table, max(self._mark, self.now_us()))

    async def history(self, limit: int = 20) -> list[Run]:
        """Return the last runs, newest first."""
        if type(limit) is not int or limit < 1:
            raise InvalidArgument(f"{self.name!r}: limit must be a whole number of runs, not {limit!r:.40}", self.name)
        self._client._check_open(self.name)
        state = await current_state(self._client, self._records, self.name)
        return [] if state is None else list(reversed(state.runs))[:limit]

    async def run(self, work: Work[L], stop: StopSignal | None) -> None:
        """Run each slot when it is due, until `stop` is set. Errors of the work are logged, an outage is retried."""
        since, settled = self.now_us(), 0

        def should_stop() -> bool:
            return stop is not None and stop.is_set()

        pause = 0.0
        while not should_stop():
            now = self.now_us()
            try:
                claimed = await self._next(since, settled, None, should_stop)
                pause = 0.0
                if claimed is not None:
                    if (error := await claimed.perform(work, self.now)) is not None:
                        self._log_failure(claimed, error)
                    continue  # more may be due
                settled = now
            except EngineUnavailable as outage:
                if not pause:
                    message = f"the slots of {self.name!r} cannot be run now; it is tried again: {outage}"
                    log("jobs", WARNING, message, lock=self._key, owner=self._client.owner)
                pause = min(RETRY_SECONDS, pause * 2 or 0.05)
                await self._client.runtime.sleep(pause * (0.5 + self._client.runtime.random() / 2))
                continue
            except LeaseLost as loss:
                if loss.name != self._key:
                    raise
                continue  # it is logged, and the record says how the run ended
            await self._sleep_until(runs.as_us(slots.next_slot(self._table, now)), should_stop)

    async def run_due(self, work: Work[L], early: float) -> list[Run]:
        """Run what is due now and return it. Raise the first error of the work, after all other slots have run."""
        since = self.now_us()
        done: dict[str, Run] = {}
        ran: list[Run] = []
        failure: Exception | None = None
        while (claimed := await self.claim_due(early, since)) is not None:
            error = await claimed.perform(work, self.now)
            failure = failure or error
            done[claimed.run.slot] = claimed.run
            ran.append(claimed.run)
        if failure is not None and any(run.outcome is not Outcome.SUCCEEDED for run in done.values()):
            raise failure
        return ran

    async def claim_due(self, early: float, since: int | None = None) -> ClaimedRun[L] | None:
        """Claim one slot that is due now, or was at `since`, for a caller that runs it by itself."""
        ahead = check_seconds(early, "early", self.name, zero=True)
        return await self._next(since or self.now_us(), 0, int((ahead or 0.0) * 1e6), lambda: False)

    async def trigger(self, work: Work[L]) -> Run | None:
        """Run now, beside the slots. Return None if another run is in progress and `overlap` is "skip"."""
        task = self._client.runtime.current_task()
        lease = await (self._lock.try_acquire() if self._rules.overlap == "skip" else self._lock.acquire())
        if lease is None:
            return None
        lease._blocks.enter(lease, task)
        try:
            claimed = None
            while claimed is None:  # a worker that lost its lease may record its outcome meanwhile
                lease.check()
                state, version = await self._read()
                run = self._begun(lease, now := self.now_us())._replace(triggered=True)
                if state is None or state.text != self._table.text:  # a change of the expression catches nothing up
                    state = (state or State(self._table.text, 0))._replace(mark=max(now, state.mark if state else 0))
                claimed = await self._claim(lease, state, version, Plan(mark=state.mark), run)
        except BaseException as error:
            await lease._exit_block(error)
            raise
        if (failure := await claimed.perform(work, self.now)) is not None:
            raise failure
        return claimed.run

    # ------------------------------------------------------------------ one slot

    async def _next(
        self, since: int, settled: int, early: int | None, should_stop: Callable[[], bool]
    ) -> ClaimedRun[L] | None:
        """Claim one slot, if one is due and nobody else has it; return None if there is nothing to do now."""

        def look(state: State | None) -> Plan:
            now = self.now_us() if early is None else since
            caller = slots.Caller(now, since, early, settled, self._not_started)
            return slots.plan(self._table, state, self._rules, caller)

        self._client._check_open(self.name)
        while not should_stop():
            state, _ = await self._read()
            plan = look(state)
            if plan.mark is None:
                return None
            task = self._client.runtime.current_task()
            lease = await self._acquire(plan, should_stop)
            if lease is None:
                if plan.slot is None or should_stop() or await self._is_running():
                    return None
                continue  # another process is about to claim the slot, or has just given up the lock
            lease._blocks.enter(lease, task)
            try:
                state, version = await self._read()
                plan = look(state)
                claimed = None
                if plan.mark is not None:
                    run = None if plan.slot is None else self._begun(lease, plan.slot, plan.attempt)
                    known = state or State(self._table.text, plan.mark)
                    claimed = await self._claim(lease, known, version, plan, run)
            except BaseException as error:
                await lease._exit_block(error)
                raise
            if claimed is not None:
                return claimed
            with suppress(LeaseLost):
                await lease._exit_block(None)
        return None

    async def _acquire(self, plan: Plan, should_stop: Callable[[], bool]) -> L | None:
        """Acquire the schedule's lock. Wait for another run only if this process may have to run after it."""
        waits = self._rules.overlap == "wait" or self._rules.attempts > 1
        if plan.slot is not None and waits:
            return await self._lock.acquire_unless(should_stop)
        lease = await self._lock.try_acquire()
        if lease is None and plan.slot is not None and not await self._is_running():
            # Its holder has not claimed a slot so far. If it dies before that, this process runs the slot.
            lease = await self._lock._acquire(STOP_CHECK_SECONDS)
        return lease

    async def _is_running(self) -> bool:
        """Return whether the holder of the lock runs a job at this moment."""
        state, _ = await self._read()
        running = set() if state is None else {run.token for run in state.runs if run.outcome is Outcome.RUNNING}
        if not running:
            return False
        return any(holder.token in running for holder in (await self._client.inspect(self._key)).holders)

    async def _claim(self, lease: L, state: State, version: int, plan: Plan, run: Run | None) -> ClaimedRun[L] | None:
        """Write the plan into the record, before anything starts; return None without a run, or if another was faster."""
        assert plan.mark is not None
        listed = state.listed or await list_schedule(self._records, self.name)
        # This lease is the only one: the worker of any other run is gone.
        past = [
            earlier._replace(outcome=Outcome.ABANDONED) if earlier.outcome is Outcome.RUNNING else earlier
            for earlier in state.runs
            if earlier.id not in self._not_started
        ]
        past += [self._begun(lease, slot)._replace(outcome=Outcome.SKIPPED, started=None) for slot in plan.skipped]
        kept = State(self._table.text, max(state.mark, plan.mark), tuple(past[-HISTORY_MAX + 1 :]), listed)

        def encoded(run: Run) -> bytes:
            return _encoded(kept._replace(runs=(*kept.runs, run)))

        value = _encoded(kept) if run is None else encoded(run)
        try:
            written = await runs.write_and_resolve(self._client, self._records, lease, value, FOREVER, version)
            lease.check()  # a job must not start under a lease that ended during the write
        except BaseException:
            self._not_started.add(lease.id)
            raise
        if written is None or run is None:
            return None
        return ClaimedRun(self._records, lease, run, written.version, encoded, FOREVER)

    def _begun(self, lease: L, slot: int, attempt: int = 1) -> Run:
        time = as_datetime(slot)
        return runs.new_run(self.name, slot_text(time), time, attempt, lease, self.now())

    def _log_failure(self, claimed: ClaimedRun[L], error: Exception) -> None:
        message = f"the run of {self.name!r} for {claimed.run.slot} failed: {error}"
        log("jobs", ERROR, message, error=error, lock=self._key, owner=self._client.owner, token=claimed.run.token)

    # ------------------------------------------------------------------ the record and the clock

    async def _read(self) -> tuple[State | None, int]:
        """Return the state of the schedule, and its version. Log a change of the expression, once."""
        state, version = await read_state(self._records, self.name)
        if state is not None:
            self._mark = state.mark
            if state.text != self._table.text and not self._warned_changed:
                self._warned_changed = True
                message = (
                    f"the expression of {self.name!r} has changed from {state.text!r} to {self._table.text!r}, so no missed "
                    "slot is caught up; if two jobs use this name, rename one"
                )
                log("jobs", WARNING, message, lock=self._key, owner=self._client.owner)
        return state, version

    def now(self) -> datetime:
        """Return the time by the wall clock."""
        return as_datetime(self.now_us())

    def now_us(self) -> int:
        """Return the time by the wall clock, in µs since the epoch."""
        return int(self.clock() * 1e6)

    async def _sleep_until(self, slot: int, should_stop: Callable[[], bool]) -> None:
        while (left := (slot - self.now_us()) / 1e6) > 0 and not should_stop():
            self._client._check_open(self.name)
            await self._client.runtime.sleep(min(left, STOP_CHECK_SECONDS))


def _encoded(state: State) -> bytes:
    stored = {
        "expression": state.text,
        "mark": state.mark,
        "listed": state.listed,
        "runs": [runs.encode(run) for run in state.runs],
    }
    return json.dumps(stored, ensure_ascii=False).encode(errors="replace")


def _check_choice(value: object, choices: tuple[str, ...], what: str, name: str) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name!r}: {what} must be one of {', '.join(choices)}, not {value!r:.40}", name)


async def read_state(records: Records, name: str) -> tuple[State | None, int]:
    """Return the state of a schedule and the version of its record."""
    key = record_key("schedule", name)
    with attach_name(key):
        record = await records.read(key)
    if record is None:
        return None, 0
    stored: dict[str, Any] = json.loads(record.value)
    entries = tuple(runs.decode(name, run) for run in stored["runs"])
    return State(stored["expression"], stored["mark"], entries, stored["listed"]), record.version


async def current_state(client: Client[Any], records: Records, name: str) -> State | None:
    """Return the state of a schedule; a run whose lease is gone counts as abandoned."""
    state, _ = await read_state(records, name)
    if state is None or all(run.outcome is not Outcome.RUNNING for run in state.runs):
        return state
    holders = {holder.token for holder in (await client.inspect(record_key("schedule", name))).holders}
    state, _ = await read_state(records, name)  # again: a run that ended meanwhile has its outcome now
    return state and state._replace(
        runs=tuple(
            run._replace(outcome=Outcome.ABANDONED)
            if run.outcome is Outcome.RUNNING and run.token not in holders
            else run
            for run in state.runs
        )
    )


class Job(NamedTuple):
    """A schedule that the engine knows: its expression, its next slot, and its last run, if there is one."""

    name: str
    expression: str
    next: datetime | None
    last: Run | None


async def jobs(client: Client[Any]) -> list[Job]:
    """Return all schedules that have been used, by name."""
    records = records_of(client.engine, "the list of schedules")
    listed: list[Job] = []
    for name in _names(await records.read(LIST_KEY)):
        state = await current_state(client, records, name)
        if state is not None:
            last = next((run for run in reversed(state.runs) if run.outcome is not Outcome.SKIPPED), None)
            listed.append(Job(name, state.text, _next(state, name), last))
    return listed


def _next(state: State, name: str) -> datetime | None:
    """Return the next slot that is still to run; a slot may have run a little early."""
    try:
        return slots.next_slot(slots.timetable_of(state.text, name), max(state.mark, int(time.time() * 1e6)))
    except (MissingDependency, InvalidArgument):
        return None  # cronsim or the time zone is not installed here


async def list_schedule(records: Records, name: str) -> bool:
    """Add a schedule to the list of all; return False if that could not be done now."""
    with suppress(EngineUnavailable):
        while True:
            record = await records.read(LIST_KEY)
            names = _names(record)
            if name in names:
                return True
            value = json.dumps(sorted([*names, name]), ensure_ascii=False).encode()
            if len(value) > RECORD_MAX_BYTES:
                return False
            expect = 0 if record is None else record.version
            if (await records.write(LIST_KEY, value, token=UNFENCED_TOKEN, ttl=FOREVER, expect=expect)).done:
                return True
    return False


def _names(record: Record | None) -> list[str]:
    return [] if record is None else [str(name) for name in json.loads(record.value)]
