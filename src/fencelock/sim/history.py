"""What a run leaves behind: plain data, times on one clock, one line of JSON for each record.

Simulated runs and real processes write the same histories, so that one checker judges both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar


class Outcome(StrEnum):
    """How an operation ended. UNKNOWN is an answer of its own: it may or may not have been carried out."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Kind(StrEnum):
    """What was asked for. An ACQUIRE waits in line, a TRY does not."""

    ACQUIRE = "acquire"
    TRY = "try"
    RELEASE = "release"
    FORCE = "force"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on a lock.

    `valid_from` to `valid_until` is how long the holder believed to hold it: from the moment it got the lease until it
    called release or would have been told of the loss, had it looked. `ticket` is its place in the engine's order of
    arrival, where that is known. `returned` is None if nobody lived to see it.
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


@dataclass(frozen=True, slots=True)
class Write:
    """A line of a resource's own log: somebody read `saw` and wants to replace it by `value`."""

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
    """Something that was found although it may be too late for it: a claim or a bell on the engine, a task in a process.

    `since` is when the operation that should have removed it had ended, in order, if it is known which one that was.
    """

    record: ClassVar[str] = "leftover"
    name: str
    owner: str
    role: str
    at: float
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """What befell somebody, for people to read."""

    record: ClassVar[str] = "note"
    at: float
    who: str
    what: str


Record = Op | Write | Leftover | Note


@dataclass(slots=True)
class History:
    """All records of a run. `quiet` is when the last participant had ended and every fault was healed.

    >>> history = History([Op("x", Kind.TRY, "me", 0.0, 0.1, Outcome.OK, token=7, valid_from=0.1, valid_until=1.0)])
    >>> History.from_lines(history.lines()) == history
    True
    """

    ops: list[Op] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    quiet: float | None = None

    def add(self, record: Record) -> None:
        """File a record where it belongs."""
        match record:
            case Op():
                self.ops.append(record)
            case Write():
                self.writes.append(record)
            case Leftover():
                self.leftovers.append(record)
            case Note():
                self.notes.append(record)

    def lines(self) -> Iterator[str]:
        """Yield one line of JSON for each record."""
        records: list[Record] = [*self.ops, *self.writes, *self.leftovers, *self.notes]
        for record in records:
            yield json.dumps({"record": record.record} | asdict(record), ensure_ascii=False)
        if self.quiet is not None:
            yield json.dumps({"record": "quiet", "at": self.quiet})

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> History:
        """Read what `lines` wrote, in any order: each process may have written a file of its own."""
        history = cls()
        for line in lines:
            fields: dict[str, Any] = json.loads(line)
            match fields.pop("record"):
                case "op":
                    kind, outcome = Kind(fields.pop("kind")), Outcome(fields.pop("outcome"))
                    history.ops.append(Op(kind=kind, outcome=outcome, **fields))
                case "write":
                    history.writes.append(Write(**fields))
                case "leftover":
                    history.leftovers.append(Leftover(**fields))
                case "note":
                    history.notes.append(Note(**fields))
                case "quiet":
                    history.quiet = fields["at"]
                case other:
                    raise ValueError(f"no such record in a history: {other!r}")
        return history
