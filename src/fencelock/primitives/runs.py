"""Runs of jobs: what the records of `once` and `schedule` say about them, and the write that begins and ends one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, NamedTuple

from fencelock.core.acquire import FIRST_PAUSE, LONGEST_PAUSE, attach_name
from fencelock.core.client import Client, L
from fencelock.core.lease import BaseLease
from fencelock.core.log import WARNING, log
from fencelock.core.records import Record, Records
from fencelock.errors import EngineUnavailable, FencelockError, InvalidArgument, LeaseLost, OutcomeUnknown
from fencelock.model import LossReason

ERROR_MAX = 200
"""Characters of an error's message that a record keeps."""
OWNER_MAX = 200
MAX_ATTEMPTS = 100

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


class Outcome(StrEnum):
    """How a run ended.

    >>> Outcome.SUCCEEDED == "succeeded"
    True
    """

    RUNNING = "running"
    """It has not ended, as far as the record knows."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The work raised an error; the command ended with another code than 0."""
    ABANDONED = "abandoned"
    """Its worker died, or lost its lease."""
    SKIPPED = "skipped"
    """The slot was missed, or another run was in progress."""


class Run(NamedTuple):
    """One run of a job, as the record has it. `duration` is in seconds."""

    name: str
    slot: str
    """The slot of `once`; the time of a schedule's slot."""
    time: datetime | None
    """The instant of a schedule's slot, in UTC; None for `once`."""
    outcome: Outcome
    attempt: int = 1
    owner: str = ""
    token: int = 0
    id: str = ""
    started: datetime | None = None
    """By the clock of the process that ran it."""
    ended: datetime | None = None
    error: str = ""
    triggered: bool = False
    """Whether it was an extra run, by `trigger`."""

    @property
    def duration(self) -> float | None:
        """Seconds from start to end; None if it has not ended."""
        return None if self.started is None or self.ended is None else (self.ended - self.started).total_seconds()


def as_datetime(time: int) -> datetime:
    """Return µs since the epoch as a time in UTC."""
    return _EPOCH + timedelta(microseconds=time)


def as_us(time: datetime) -> int:
    """Return a time as µs since the epoch."""
    return (time - _EPOCH) // _US


def slot_text(time: datetime) -> str:
    """Return the text of a schedule's slot, such as 2026-07-01T02:00:00Z."""
    return time.isoformat().replace("+00:00", "Z")


def encode(run: Run) -> dict[str, Any]:
    """Return a run as JSON can store it, without what the record knows already."""
    times = {"time": run.time, "started": run.started, "ended": run.ended}
    others = {"owner": run.owner, "token": run.token, "id": run.id, "error": run.error, "triggered": run.triggered}
    return {
        "outcome": run.outcome.value,
        "attempt": run.attempt,
        **{key: as_us(time) for key, time in times.items() if time is not None},
        **{key: value for key, value in others.items() if value},
    }


def decode(name: str, stored: dict[str, Any], slot: str = "") -> Run:
    """Return a run from what `encode` made of it."""
    times = {key: as_datetime(stored[key]) for key in ("time", "started", "ended") if key in stored}
    time = times.get("time")
    return Run(
        name,
        slot if time is None else slot_text(time),
        time,
        Outcome(stored["outcome"]),
        stored["attempt"],
        stored.get("owner", ""),
        stored.get("token", 0),
        stored.get("id", ""),
        times.get("started"),
        times.get("ended"),
        stored.get("error", ""),
        stored.get("triggered", False),
    )


def check_attempts(attempts: object, name: str) -> int:
    """Return how often a slot may run, or raise InvalidArgument."""
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= MAX_ATTEMPTS:
        raise InvalidArgument(
            f"{name!r}: attempts must be a whole number from 1 to {MAX_ATTEMPTS}, not {attempts!r:.40}", name
        )
    return attempts


def new_run(name: str, slot: str, time: datetime | None, attempt: int, lease: BaseLease, now: datetime) -> Run:
    """Return the run that a lease begins."""
    return Run(name, slot, time, Outcome.RUNNING, attempt, lease.owner[:OWNER_MAX], lease.token, lease.id, now)


def outcome_of(lease: BaseLease, error: BaseException | None) -> tuple[Outcome, str]:
    """Return how a run ended. After a loss, a normal return counts as abandoned: the work may have stopped early."""
    if lease.is_lost() and not _is_own_error(error, lease):
        return Outcome.ABANDONED, str(lease._loss())
    if error is None:
        return Outcome.SUCCEEDED, ""
    return Outcome.FAILED, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_own_error(error: BaseException | None, lease: BaseLease) -> bool:
    """Return whether the work failed by itself, and not because its lease was lost."""
    if isinstance(error, LeaseLost):
        return error.name != lease.name
    return isinstance(error, Exception | KeyboardInterrupt | SystemExit)


async def write_and_resolve(
    client: Client[Any], records: Records, lease: BaseLease, value: bytes, ttl: float, expect: int
) -> Record | None:
    """Write the record of the lease's name with the lease's token; return None if another writer was faster.

    The value names the claim's id, so after a write without a reply this reads the record to see whether its own value is
    there. Raise the engine's error if that cannot be found out before the lease ends.
    """
    unknown: OutcomeUnknown | None = None
    pause = FIRST_PAUSE
    while True:
        try:
            with attach_name(lease.name):
                if unknown is None:
                    done, record = await records.write(lease.name, value, token=lease.token, ttl=ttl, expect=expect)
                    return record if done or (record is not None and record.value == value) else None
                record = await records.read(lease.name)
            if record is not None and record.value == value:
                return record
            if (0 if record is None else record.version) != expect:
                return None
            unknown = None  # not written so far. If the first request arrives late, `expect` refuses one of the two
        except EngineUnavailable as error:
            if isinstance(error, OutcomeUnknown) and unknown is None:
                unknown = error
            elif unknown is None:
                raise
            if lease.is_lost():
                raise
            await client.runtime.sleep(pause * (0.5 + client.runtime.random() / 2))
            pause = min(pause * 2, LONGEST_PAUSE)


class ClaimedRun(Generic[L]):
    """A run that is stored in its record, with the lease that protects it; the lease's `with` block is open."""

    def __init__(
        self, records: Records, lease: L, run: Run, version: int, encode: Callable[[Run], bytes], ttl: float
    ) -> None:
        self.lease = lease
        self.run = run
        self._records = records
        self._version = version
        self._encode = encode
        """Returns the record with the new entry of the run."""
        self._ttl = ttl

    async def record(self, outcome: Outcome, error: str, now: datetime) -> None:
        """Record how the run ended, unless a higher token has written since. A failure is logged."""
        self.run = self.run._replace(outcome=outcome, error=error[:ERROR_MAX], ended=now)
        await _record_outcome(
            self.lease._client, self._records, self.lease, self._encode(self.run), self._ttl, self._version
        )

    async def perform(
        self, work: Callable[[L, Run], Awaitable[object]], now: Callable[[], datetime]
    ) -> Exception | None:
        """Call the work, record its outcome and release; return its error. Raise LeaseLost after a loss."""
        failure: BaseException | None = None
        try:
            await work(self.lease, self.run)
        except BaseException as error:
            failure = error
        await self.end(failure, now())
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        return failure

    async def end(self, error: BaseException | None, now: datetime) -> None:
        """Record the outcome and end the block: release, and raise LeaseLost after a loss unless the work failed itself."""
        outcome, text = outcome_of(self.lease, error)
        failure = error
        try:
            await self.lease._client.runtime.shield(self.record(outcome, text, now), self.lease.ttl)
        except TimeoutError:  # the engine did not answer for a whole ttl: the run will count as abandoned
            message = f"the outcome of {self.lease.name!r} was not recorded within the ttl of its lease"
            log("jobs", WARNING, message, lock=self.lease.name, token=self.lease.token, owner=self.lease.owner)
        except BaseException as late:  # cancelled or interrupted meanwhile
            failure = error or late
        await self.lease._exit_block(failure)
        if failure is not None and failure is not error:
            raise failure


async def _record_outcome(
    client: Client[Any], records: Records, lease: BaseLease, value: bytes, ttl: float, expect: int
) -> None:
    """Write the outcome of a run; retry while the lease lasts."""
    if lease.reason in (LossReason.FORKED, LossReason.CLOSED):
        return
    pause = FIRST_PAUSE
    while True:
        try:
            if await write_and_resolve(client, records, lease, value, ttl, expect) is None:
                message = f"the outcome of {lease.name!r} was not recorded: a holder with a higher token has taken over"
                log("jobs", WARNING, message, lock=lease.name, token=lease.token, owner=lease.owner)
            return
        except FencelockError as error:
            if not isinstance(error, EngineUnavailable) or lease.is_lost():
                message = f"the outcome of {lease.name!r} could not be recorded, so it will count as abandoned: {error}"
                log("jobs", WARNING, message, lock=lease.name, token=lease.token, owner=lease.owner)
                return
        await client.runtime.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
