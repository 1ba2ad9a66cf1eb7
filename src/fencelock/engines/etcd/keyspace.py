"""The keys of a namespace, and what their values contain.

    <prefix>/<namespace>/about                  layout version, token base and origin of record versions
    <prefix>/<namespace>/claims/<name>/<key>    a claim, attached to its session's lease: `ClaimData` as JSON
    <prefix>/<namespace>/abandoned/<claim id>   marks a claim that was abandoned while an attempt of it was in flight
    <prefix>/<namespace>/records/<key>          a record, attached to a lease of its own: its token and value

Names are percent-encoded, so a slash ends them. The last part of a claim's key is the client's number and a slot number: see
`own_claims.py`.
"""

from __future__ import annotations

import json
from typing import NamedTuple
from urllib.parse import quote, unquote

from fencelock.engines.etcd.messages import KeyValue
from fencelock.errors import EngineUnavailable
from fencelock.model import TOKEN_MAX, Claim, Mode

LAYOUT = 2
"""The version of all of this; releases that differ in it must not share a namespace."""


class Keyspace:
    """The keys of one namespace."""

    def __init__(self, prefix: str, namespace: str) -> None:
        root = f"{prefix}/{quote(namespace, safe='')}"
        self.about = f"{root}/about".encode()
        self.claims = f"{root}/claims/".encode()
        self._abandoned = f"{root}/abandoned/".encode()
        self._records = f"{root}/records/".encode()

    def queue(self, name: str) -> bytes:
        """Return the prefix of all claims on a name."""
        return self.claims + quote(name, safe="").encode() + b"/"

    def names_from(self, prefix: str) -> bytes:
        """Return the prefix of the claims on all names that begin with `prefix`."""
        return self.claims + quote(prefix, safe="").encode()

    def name_of(self, key: bytes) -> str:
        """Return the name to which a claim's key belongs."""
        return unquote(key.removeprefix(self.claims).rpartition(b"/")[0].decode(errors="replace"))

    def abandoned(self, id: str) -> bytes:
        """Return the key that marks a claim as abandoned: attempts of it that arrive later create nothing."""
        return self._abandoned + id.encode()

    def record(self, key: str) -> bytes:
        """Return the key of a record."""
        return self._records + quote(key, safe="").encode()


class Numbering(NamedTuple):
    """How a namespace numbers tokens and record versions: the value of the key `about`."""

    base: int
    """A claim's token is this base, as it was when the claim was created, plus the claim's create revision."""
    origin: int
    """A record's version is this origin plus the record's mod revision. Raising the base does not move it."""
    mod_revision: int
    """The revision at which the key `about` was last written; 0 if it does not exist."""

    def encode(self) -> bytes:
        """Return the value to write."""
        return f"{LAYOUT} {self.base} {self.origin}".encode()


def read_numbering(pairs: list[KeyValue], address: str) -> Numbering | None:
    """Read the key `about`; None if it does not exist. Raises EngineUnavailable if another release wrote it."""
    if not pairs:
        return None
    (pair,) = pairs
    layout, *numbers = pair.value.decode(errors="replace").split(" ")
    valid = len(numbers) == 2 and all(number.isdecimal() and int(number) <= TOKEN_MAX for number in numbers)
    if layout != str(LAYOUT) or not valid:
        raise EngineUnavailable(
            f"etcd at {address}: {pair.key.decode(errors='replace')!r} was written by another release of fencelock (layout "
            f"{layout[:20]!r}, this one has {LAYOUT}); use another namespace, or upgrade"
        )
    return Numbering(int(numbers[0]), int(numbers[1]), pair.mod_revision)


class ClaimData(NamedTuple):
    """The value of a claim's key. The times are wall clocks of the claim's client, in µs, for people to look at."""

    id: str
    mode: Mode
    limit: int | None
    owner: str
    value: str
    base: int
    """The token base when the claim was created: its token counts from this copy, whatever happens to the base later."""
    created: int
    granted: int = 0
    """When a claim that had to wait was granted; 0 until its first renewal writes it."""

    @classmethod
    def of(cls, claim: Claim, base: int, created: int) -> ClaimData:
        """Return the data of a new claim."""
        return cls(claim.id, claim.mode, claim.limit, claim.owner, claim.value, base, created)

    def encode(self) -> bytes:
        """Return the value to write."""
        return json.dumps(self._asdict(), separators=(",", ":")).encode()


UNREAD = ClaimData("", Mode.EXCLUSIVE, None, "", "", 0, 0)
"""Stands for data that nobody has read, as of the claims ahead of an exclusive one, or that is not ours."""


def read_claim(value: bytes) -> ClaimData:
    """Read the value of a claim's key. Whatever somebody else has put there counts as an exclusive claim without a token."""
    try:
        data = ClaimData(**json.loads(value))
        return data._replace(
            mode=Mode(data.mode), base=int(data.base), created=int(data.created), granted=int(data.granted)
        )
    except (ValueError, TypeError):
        return UNREAD


class QueuedKey(NamedTuple):
    """A key in the queue of a name, and the claim that it stands for."""

    key: bytes
    data: ClaimData
    create_revision: int
    lease: int

    @property
    def id(self) -> str:
        """The key as text, for `blockers`; not the claim's id, which an attempt of an exclusive claim does not read."""
        return self.key.decode("latin-1")

    @property
    def shared(self) -> bool:
        """Whether others may hold the name at the same time."""
        return self.data.mode is not Mode.EXCLUSIVE

    @property
    def limit(self) -> int | None:
        """The number of permits, if it is a permit."""
        return self.data.limit

    @property
    def token(self) -> int:
        """The claim's token."""
        return self.data.base + self.create_revision


def queue_of(pairs: list[KeyValue]) -> list[QueuedKey]:
    """Return the claims on a name, oldest first; without a value, a claim counts as exclusive."""
    entries = [
        QueuedKey(pair.key, read_claim(pair.value) if pair.value else UNREAD, pair.create_revision, pair.lease)
        for pair in pairs
    ]
    return sorted(entries, key=lambda entry: entry.create_revision)


def key_of(id: str) -> bytes:
    """Return the key for the id of a `QueuedKey`."""
    return id.encode("latin-1")
