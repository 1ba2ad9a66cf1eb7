"""The history of a run: plain records, times on one clock, one line of JSON for each record.

Simulated runs and real processes write the same histories, so one checker judges both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


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
class Leftover:
    """A claim or a wake-up on the engine, or a task in a process, that was found after its time.

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


Record = Op | Group | Term | Observation | Write | Leftover | Note
RECORDS: dict[str, type[Record]] = {kind.record: kind for kind in (Op, Group, Term, Observation, Write, Leftover, Note)}


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
    quiet: float | None = None

    def add(self, record: Record) -> None:
        """Append a record to the list of its kind."""
        getattr(self, f"{record.record}s").append(record)

    def lines(self) -> Iterator[str]:
        """Yield one line of JSON for each record."""
        for kind in RECORDS:
            for record in getattr(self, f"{kind}s"):
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
