"""The history of a run: plain records, times on one clock, one line of JSON for each record.

Simulated runs and real processes write the same histories, so one checker judges both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, ClassVar, get_args


class Outcome(StrEnum):
    """How an operation ended. UNKNOWN: it may or may not have been carried out."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Kind(StrEnum):
    """What the caller asked for. An ACQUIRE waits in the queue, a TRY does not."""

    ACQUIRE = "acquire"
    TRY = "try"
    RELEASE = "release"
    DOWNGRADE = "downgrade"
    FORCE = "force"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on one name.

    From `valid_from` to `valid_until` the holder could trust the lease: from the moment it got the lease until it called
    release, or `lease.check()` would have raised. From `downgraded` on it held a read lease. `ticket` is the claim's place
    in the engine's order of arrival, where that is known. `returned` is None if the caller never got an answer. The token
    of a DOWNGRADE is the one that the engine has afterwards.
    """

    record: ClassVar[str] = "op"
    name: str
    kind: Kind
    owner: str
    called: float
    returned: float | None
    outcome: Outcome
    token: int | None = None
    ticket: int | None = None
    valid_from: float | None = None
    valid_until: float | None = None
    shared: bool = False
    limit: int | None = None
    value: str = ""
    downgraded: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """One acquisition of a multi-lock. `leases` has the name and token of every lease that was acquired for it.

    `released` is when the call that gave the group back returned.
    """

    record: ClassVar[str] = "group"
    names: tuple[str, ...]
    owner: str
    called: float
    returned: float | None
    outcome: Outcome
    leases: tuple[tuple[str, int], ...]
    released: float | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """The work of one term of an election, from its first step to its last."""

    record: ClassVar[str] = "term"
    name: str
    owner: str
    token: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Observation:
    """A state that an observer of an election saw; without a token there was no leader."""

    record: ClassVar[str] = "observation"
    name: str
    observer: str
    at: float
    token: int | None
    owner: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """A line of a resource's own log: a client read `saw` and asked to replace it by `value`."""

    record: ClassVar[str] = "write"
    resource: str
    owner: str
    token: int
    at: float
    saw: int
    value: int
    accepted: bool


@dataclass(frozen=True, slots=True)
class RecordWrite:
    """A write that the engine accepted: the record has `value` until it expires, or until the next write."""

    record: ClassVar[str] = "record_write"
    key: str
    at: float
    token: int
    value: str
    expires: float


@dataclass(frozen=True, slots=True)
class JobRun:
    """The work of one run of a job, from its first step to its last; `end` is when its process died, if it did."""

    record: ClassVar[str] = "job_run"
    name: str
    slot: str
    owner: str
    token: int
    attempt: int
    attempts: int
    """How many attempts a slot has."""
    triggered: bool
    start: float
    end: float = inf


@dataclass(frozen=True, slots=True)
class Watch:
    """A process that ran a schedule by its own clock, in µs, from `since` to `until`, and survived."""

    record: ClassVar[str] = "watch"
    name: str
    owner: str
    every: int
    since: int
    until: int
    waits: bool
    """Whether slots wait for the run before them, so that they may be late without a limit."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The number that a rate limit has after a charge or a refund, in µs of the engine's clock, as is `at`."""

    record: ClassVar[str] = "charge"
    key: str
    at: int
    number: int
    wait: float | None = None
    """Seconds after which the call may go, if the engine's log has that."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request to a rate limit. OK: granted. FAILED: refused. UNKNOWN: no reply. Its caller goes after `wait` seconds.

    `went` is when it did; None if it gave up, or had to reserve again.
    """

    record: ClassVar[str] = "reservation"
    key: str
    owner: str
    n: int
    per: float
    burst: int
    called: float
    returned: float | None = None
    outcome: Outcome = Outcome.UNKNOWN
    wait: float = 0.0
    went: float | None = None


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a cached value. Its value is its number."""

    record: ClassVar[str] = "build"
    key: str
    owner: str
    number: int
    start: float
    end: float = inf


@dataclass(frozen=True, slots=True)
class CacheCall:
    """One call of single flight, which returned the number of a build, or an error (None)."""

    record: ClassVar[str] = "cache_call"
    key: str
    owner: str
    called: float
    returned: float
    value: int | None
    kept: float
    """Seconds for which a value is fresh or stale."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A claim on the engine, or a task in a process, that was found after its time.

    `since` is when the operation that should have removed it had returned, or when its process and its ttl had ended; None
    if that is not known.
    """

    record: ClassVar[str] = "leftover"
    name: str
    owner: str
    role: str
    at: float
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A fault or a loss, for people to read."""

    record: ClassVar[str] = "note"
    at: float
    who: str
    what: str


def readable(value: bytes | None) -> str:
    """Return the value of a record without the ids of claims, which differ in every run."""
    return "" if value is None else re.sub(r'"id": "\w+"', '"id": ""', value.decode())


Record = (
    Op
    | Group
    | Term
    | Observation
    | Write
    | RecordWrite
    | JobRun
    | Watch
    | Charge
    | Reservation
    | Build
    | CacheCall
    | Leftover
    | Note
)
RECORDS: dict[str, type[Record]] = {kind.record: kind for kind in get_args(Record)}
PLURALS = {kind: "watches" if kind == "watch" else f"{kind}s" for kind in RECORDS}
"""The list of a history that has the records of a kind."""


@dataclass(slots=True)
class History:
    """All records of a run. `quiet` is when the last participant had ended and all faults were cleared.

    >>> history = History([Op("x", Kind.TRY, "me", 0.0, 0.1, Outcome.OK, token=7, valid_from=0.1, valid_until=1.0)])
    >>> History.from_lines(history.lines()) == history
    True
    """

    ops: list[Op] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    record_writes: list[RecordWrite] = field(default_factory=list)
    job_runs: list[JobRun] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)
    cache_calls: list[CacheCall] = field(default_factory=list)
    quiet: float | None = None

    def add(self, record: Record) -> None:
        """Append a record to the list of its kind."""
        getattr(self, PLURALS[record.record]).append(record)

    def lines(self) -> Iterator[str]:
        """Yield one line of JSON for each record."""
        for kind, plural in PLURALS.items():
            for record in getattr(self, plural):
                yield json.dumps({"record": kind} | asdict(record), ensure_ascii=False)
        if self.quiet is not None:
            yield json.dumps({"record": "quiet", "at": self.quiet})

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> History:
        """Read what `lines` wrote, in any order: each process may have written its own file."""
        history = cls()
        for line in lines:
            fields: dict[str, Any] = json.loads(line)
            kind = fields.pop("record")
            if kind == "quiet":
                history.quiet = fields["at"]
            elif kind in RECORDS:
                for name, convert in _CONVERT.items():
                    if name in fields:
                        fields[name] = convert(fields[name])
                history.add(RECORDS[kind](**fields))
            else:
                raise ValueError(f"no such record in a history: {kind!r}")
        return history


_CONVERT: dict[str, Any] = {
    "kind": Kind,
    "outcome": Outcome,
    "names": tuple,
    "leases": lambda leases: tuple((name, token) for name, token in leases),
}
