"""The messages of etcd that we use, in protobuf's wire format: a dozen, of numbers and bytes only.

A runtime for protobuf would take longer to import than a command takes to run, and ties generated code to its version.
The numbers are those of etcd's `rpc.proto` and `kv.proto`, which never change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fencelock.errors import OutcomeUnknown

TXN, RANGE, DELETE = "/etcdserverpb.KV/Txn", "/etcdserverpb.KV/Range", "/etcdserverpb.KV/DeleteRange"
WATCH = "/etcdserverpb.Watch/Watch"
GRANT, REVOKE = "/etcdserverpb.Lease/LeaseGrant", "/etcdserverpb.Lease/LeaseRevoke"
KEEP_ALIVE, TIME_TO_LIVE = "/etcdserverpb.Lease/LeaseKeepAlive", "/etcdserverpb.Lease/LeaseTimeToLive"
AUTHENTICATE, STATUS = "/etcdserverpb.Auth/Authenticate", "/etcdserverpb.Maintenance/Status"

ASCENDING, DESCENDING = 1, 2
BY_CREATION = 2
EQUAL, LESS = 0, 2
OF_CREATION, OF_CHANGE, OF_VALUE = 1, 2, 3
NO_PUTS = 0
DELETED = 1


# ---------------------------------------------------------------------- writing


def _varint(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _int(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def after(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with a prefix; ours end with a character that has a next one."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def absent(key: bytes) -> bytes:
    """Compare: there is no such key."""
    return created(key, EQUAL, 0)


def created(key: bytes, result: int, revision: int) -> bytes:
    """Compare the revision at which a key was created; that of a key that is not there is 0."""
    return _int(1, result) + _int(2, OF_CREATION) + _bytes(3, key) + _int(5, revision)


def unchanged(key: bytes, revision: int) -> bytes:
    """Compare the revision at which a key was last written; that of a key that is not there is 0."""
    return _int(1, EQUAL) + _int(2, OF_CHANGE) + _bytes(3, key) + _int(6, revision)


def valued(key: bytes, value: bytes) -> bytes:
    """Compare what is written at a key; one that is not there is as good as no value."""
    return _int(1, EQUAL) + _int(2, OF_VALUE) + _bytes(3, key) + _bytes(7, value)


def none_below(prefix: bytes) -> bytes:
    """Compare: there is no key that begins with the prefix."""
    return absent(prefix) + _bytes(64, after(prefix))


def find(key: bytes) -> bytes:
    """Return a range of one key."""
    return _bytes(1, key)


def below(
    prefix: bytes, *, order: int = ASCENDING, limit: int = 0, bare: bool = False, until: int = 0, start: bytes = b""
) -> bytes:
    """Return a range of the keys that begin with a prefix, by their creation; `until` is the last one's revision.

    With `start`, by their names and from there on.
    """
    out = _bytes(1, start or prefix) + _bytes(2, after(prefix))
    if limit:
        out += _int(3, limit)
    if not start:
        out += _int(5, order) + _int(6, BY_CREATION)
    if bare:
        out += _int(8, 1)
    if until:
        out += _int(13, until)
    return out


def local(body: bytes) -> bytes:
    """Have a range be answered as far as a member knows, which may be less than the others do, without asking them."""
    return body + _int(7, 1)


def count(key: bytes) -> bytes:
    """Return the smallest range that there is: whether a key is there."""
    return _bytes(1, key) + _int(9, 1)


def put(key: bytes, value: bytes, lease: int) -> bytes:
    """Return a put, under a lease or for good."""
    return _bytes(1, key) + _bytes(2, value) + (_int(3, lease) if lease else b"")


def do_range(body: bytes) -> bytes:
    """Return a range as a step of a transaction."""
    return _bytes(1, body)


def do_put(body: bytes) -> bytes:
    """Return a put as a step of a transaction."""
    return _bytes(2, body)


def do_delete(key: bytes) -> bytes:
    """Return the deletion of a key as a step of a transaction."""
    return _bytes(3, _bytes(1, key))


def txn(compares: Iterable[bytes], then: Iterable[bytes], otherwise: Iterable[bytes] = ()) -> bytes:
    """Return a transaction."""
    return (
        b"".join([_bytes(1, compare) for compare in compares])
        + b"".join([_bytes(2, step) for step in then])
        + b"".join([_bytes(3, step) for step in otherwise])
    )


def grant(lease: int, ttl: int) -> bytes:
    """Return the wish for a lease of this number."""
    return _int(1, ttl) + _int(2, lease)


def of_lease(lease: int) -> bytes:
    """Return the request of whatever takes a lease's number and nothing else."""
    return _int(1, lease)


def login(user: str, password: str) -> bytes:
    """Return a log-in."""
    return _bytes(1, user.encode()) + _bytes(2, password.encode())


def watch(id: int, key: bytes, end: bytes, revision: int) -> bytes:
    """Begin to watch for deletions, from this revision on, or from now on if it is 0."""
    body = _bytes(1, key) + (_bytes(2, end) if end else b"") + (_int(3, revision) if revision else b"")
    return _bytes(1, body + _bytes(5, bytes((NO_PUTS,))) + _int(7, id))


def unwatch(id: int) -> bytes:
    """Watch no longer."""
    return _bytes(2, _int(1, id))


# ---------------------------------------------------------------------- reading

Fields = dict[int, Any]


def _read(data: bytes, lists: Sequence[int] = ()) -> Fields:
    """Return the fields of a message: numbers and bytes, in a list where one may come again."""
    fields: Fields = {field: [] for field in lists}
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _read_varint(data, at - 1)
            kind = tag & 7
            value: int | bytes
            if kind == 0 or kind == 2:
                number = data[at]
                at += 1
                if number > 127:
                    number, at = _read_varint(data, at - 1)
                value = number
                if kind == 2:
                    value = data[at : at + number]
                    at += number
            elif kind == 1 or kind == 5:
                size = 8 if kind == 1 else 4
                value = data[at : at + size]
                at += size
            else:
                raise OutcomeUnknown("etcd: an answer that cannot be read")
            field = tag >> 3
            if field in lists:
                fields[field].append(value)
            else:
                fields[field] = value
    except IndexError as error:
        raise OutcomeUnknown("etcd: an answer that breaks off") from error
    if at != end:
        raise OutcomeUnknown("etcd: an answer that breaks off")
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return (number if number < 2**63 else number - 2**64), at
        shift += 7


class Header(NamedTuple):
    """What every answer begins with: which cluster and member says it, and where they are."""

    cluster: int
    member: int
    revision: int
    term: int


class Pair(NamedTuple):
    """A key, and what is known of it."""

    key: bytes
    created: int
    value: bytes
    lease: int
    changed: int


class Found(NamedTuple):
    """What a range found; `more` says that there would have been more of it."""

    pairs: list[Pair]
    more: bool


class Answer(NamedTuple):
    """An answer to a transaction: for each step a range's finds, or how many keys were deleted."""

    header: Header
    succeeded: bool
    steps: list[Found | int]

    def found(self, step: int) -> list[Pair]:
        """Return what the range at this step found."""
        found = self.steps[step]
        if isinstance(found, int):
            raise OutcomeUnknown("etcd: a transaction that was answered in another order")
        return found.pairs


class News(NamedTuple):
    """Something that a watch has to say."""

    id: int
    revision: int
    created: bool
    canceled: bool
    compacted: int
    reason: str
    deleted: int
    """The revision of the last deletion that it tells of, or 0."""


def header(fields: Fields) -> Header:
    """Return the header of an answer."""
    inner = _read(fields.get(1, b""))
    return Header(inner.get(1, 0), inner.get(2, 0), inner.get(3, 0), inner.get(4, 0))


def _pair(data: bytes) -> Pair:
    fields = _read(data)
    return Pair(fields.get(1, b""), fields.get(2, 0), fields.get(5, b""), fields.get(6, 0), fields.get(3, 0))


def _found(fields: Fields) -> Found:
    return Found([_pair(item) for item in fields[2]], bool(fields.get(3)))


def read_range(data: bytes) -> tuple[Header, Found]:
    """Read the answer to a range."""
    fields = _read(data, (2,))
    return header(fields), _found(fields)


def read_txn(data: bytes) -> Answer:
    """Read the answer to a transaction."""
    fields = _read(data, (3,))
    steps: list[Found | int] = []
    for item in fields[3]:
        step = _read(item)
        if 1 in step:
            steps.append(_found(_read(step[1], (2,))))
        elif 3 in step:
            steps.append(_read(step[3]).get(2, 0))
        else:
            steps.append(0)
    return Answer(header(fields), bool(fields.get(2)), steps)


def read_lease(data: bytes) -> tuple[Header, int]:
    """Read the ttl out of the answer to a grant, a keep-alive or a question for it; 0 or less if there is no such lease."""
    fields = _read(data)
    return header(fields), fields.get(3, 0)


def read_token(data: bytes) -> str:
    """Read the answer to a log-in."""
    return bytes(_read(data).get(2, b"")).decode()


def read_news(data: bytes) -> News:
    """Read what a watch says."""
    fields = _read(data, (11,))
    deleted = 0
    for item in fields[11]:
        event = _read(item)
        if event.get(1, 0) == DELETED:
            deleted = max(deleted, _pair(event.get(2, b"")).changed)
    reason = bytes(fields.get(6, b"")).decode(errors="replace")
    return News(
        fields.get(2, 0),
        header(fields).revision,
        bool(fields.get(3)),
        bool(fields.get(4)),
        fields.get(5, 0),
        reason,
        deleted,
    )


class Status(NamedTuple):
    """What a member says of itself."""

    header: Header
    version: str
    size: int
    leader: int
    errors: list[str]


def read_status(data: bytes) -> Status:
    """Read what a member says of itself."""
    fields = _read(data, (8,))
    errors = [bytes(item).decode(errors="replace") for item in fields[8]]
    version = bytes(fields.get(2, b"")).decode(errors="replace")
    return Status(header(fields), version, fields.get(3, 0), fields.get(4, 0), errors)
