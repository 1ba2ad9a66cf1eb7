"""The messages of etcd that we use, in protobuf's encoding: a dozen, made of numbers and bytes only.

The field numbers are those of etcd's `rpc.proto` and `kv.proto`, which never change. A protobuf library would take longer to
import than a short command takes to run, and it refuses code that was generated for another version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fencelock.errors import OutcomeUnknown

TXN, RANGE, DELETE = "/etcdserverpb.KV/Txn", "/etcdserverpb.KV/Range", "/etcdserverpb.KV/DeleteRange"
WATCH = "/etcdserverpb.Watch/Watch"
GRANT, REVOKE = "/etcdserverpb.Lease/LeaseGrant", "/etcdserverpb.Lease/LeaseRevoke"
KEEP_ALIVE, TIME_TO_LIVE = "/etcdserverpb.Lease/LeaseKeepAlive", "/etcdserverpb.Lease/LeaseTimeToLive"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"

NUMBER, BYTES = 0, 2
"""Protobuf's kinds of fields."""
ASCENDING, DESCENDING = 1, 2
BY_CREATION = 2
CREATE_REVISION, MOD_REVISION = 1, 2
NO_PUTS = 0
DELETED = 1


# ---------------------------------------------------------------------- requests


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


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with a prefix. The last byte of our prefixes is a slash, never 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def is_absent(key: bytes) -> bytes:
    """Compare: there is no such key."""
    return is_created_at(key, 0)


def is_created_at(key: bytes, revision: int) -> bytes:
    """Compare the revision at which a key was created; it is 0 for a key that does not exist."""
    return _int(2, CREATE_REVISION) + _bytes(3, key) + _int(5, revision)


def is_modified_at(key: bytes, revision: int) -> bytes:
    """Compare the revision at which a key was last written; it is 0 for a key that does not exist."""
    return _int(2, MOD_REVISION) + _bytes(3, key) + _int(6, revision)


def is_prefix_unused(prefix: bytes) -> bytes:
    """Compare: there is no key with this prefix."""
    return is_absent(prefix) + _bytes(64, prefix_end(prefix))


def get_key(key: bytes) -> bytes:
    """Return a range request for one key."""
    return _bytes(1, key)


def get_prefix(
    prefix: bytes,
    *,
    order: int = ASCENDING,
    limit: int = 0,
    keys_only: bool = False,
    until: int = 0,
    start: bytes = b"",
) -> bytes:
    """Return a range request for the keys with a prefix, sorted by creation, created at the revision `until` or before.

    With `start`, they are sorted by key, from there on.
    """
    out = _bytes(1, start or prefix) + _bytes(2, prefix_end(prefix))
    if limit:
        out += _int(3, limit)
    if not start:
        out += _int(5, order) + _int(6, BY_CREATION)
    if keys_only:
        out += _int(8, 1)
    if until:
        out += _int(13, until)
    return out


def serializable(body: bytes) -> bytes:
    """Make a range request one that the member answers by itself; it may lag behind the others."""
    return body + _int(7, 1)


def count_key(key: bytes) -> bytes:
    """Return the smallest range request: whether a key exists."""
    return _bytes(1, key) + _int(9, 1)


def do_range(body: bytes) -> bytes:
    """Return a range as a step of a transaction."""
    return _bytes(1, body)


def do_put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    """Return a put as a step of a transaction, attached to a lease if there is one."""
    return _bytes(2, _bytes(1, key) + _bytes(2, value) + (_int(3, lease) if lease else b""))


def do_delete(key: bytes) -> bytes:
    """Return the deletion of a key as a step of a transaction."""
    return _bytes(3, _bytes(1, key))


def do_txn(body: bytes) -> bytes:
    """Return a transaction as a step of another one: its compares decide about its own steps only."""
    return _bytes(4, body)


def txn(compares: Iterable[bytes], then: Iterable[bytes], otherwise: Iterable[bytes] = ()) -> bytes:
    """Return a transaction."""
    return (
        b"".join([_bytes(1, compare) for compare in compares])
        + b"".join([_bytes(2, step) for step in then])
        + b"".join([_bytes(3, step) for step in otherwise])
    )


def grant_lease(lease: int, ttl: int) -> bytes:
    """Return the request for a lease with this id."""
    return _int(1, ttl) + _int(2, lease)


def lease_request(lease: int) -> bytes:
    """Return a request whose only field is a lease's id."""
    return _int(1, lease)


def login(user: str, password: str) -> bytes:
    """Return a login."""
    return _bytes(1, user.encode()) + _bytes(2, password.encode())


def create_watch(id: int, key: bytes, end: bytes, revision: int, *, puts: bool) -> bytes:
    """Watch for deletions, with `puts` also for puts, from a revision on; 0 is now."""
    body = _bytes(1, key) + (_bytes(2, end) if end else b"") + (_int(3, revision) if revision else b"")
    return _bytes(1, body + (b"" if puts else _bytes(5, bytes((NO_PUTS,)))) + _int(7, id))


def cancel_watch(id: int) -> bytes:
    """End a watch."""
    return _bytes(2, _int(1, id))


# ---------------------------------------------------------------------- replies

Fields = dict[int, Any]


def _read(data: bytes, lists: Sequence[int] = ()) -> Fields:
    """Return the fields of a message, numbers and bytes; repeated fields (`lists`) as lists."""
    fields: Fields = {field: [] for field in lists}
    at, end = 0, len(data)
    try:
        while at < end:
            tag, at = _read_varint(data, at)
            field, kind = tag >> 3, tag & 7
            if kind not in (NUMBER, BYTES):
                raise OutcomeUnknown("etcd: a reply with a field that is neither a number nor bytes")
            number, at = _read_varint(data, at)
            value: int | bytes = number
            if kind == BYTES:
                value, at = data[at : at + number], at + number
            if field in lists:
                fields[field].append(value)
            else:
                fields[field] = value
    except IndexError as error:
        raise OutcomeUnknown("etcd: an incomplete reply") from error
    if at != end:
        raise OutcomeUnknown("etcd: an incomplete reply")
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
    """The header of every reply: the cluster that sent it, its revision and raft term."""

    cluster: int
    revision: int
    term: int


class KeyValue(NamedTuple):
    """A key, its value and lease, and etcd's revisions when the key was created and when it was last written."""

    key: bytes
    create_revision: int
    value: bytes
    lease: int
    mod_revision: int


class Range(NamedTuple):
    """The reply to a range; `more` says that the limit left some out."""

    pairs: list[KeyValue]
    more: bool


class TxnReply(NamedTuple):
    """The reply to a transaction, step by step: a range, the reply of a nested transaction, or None."""

    header: Header
    succeeded: bool
    steps: list[Range | TxnReply | None]

    def pairs(self, step: int) -> list[KeyValue]:
        """Return what the range at this step found."""
        found = self.steps[step] if step < len(self.steps) else None
        if not isinstance(found, Range):
            raise OutcomeUnknown("etcd: the reply to another transaction")
        return found.pairs


class WatchReport(NamedTuple):
    """A message about one watch. `changes` are the keys that were deleted or overwritten, with the revision of that."""

    id: int
    revision: int
    created: bool
    canceled: bool
    compacted: int
    changes: list[tuple[bytes, int]]


def _header(fields: Fields) -> Header:
    inner = _read(fields.get(1, b""))
    return Header(inner.get(1, 0), inner.get(3, 0), inner.get(4, 0))


def _key_value(data: bytes) -> KeyValue:
    fields = _read(data)
    return KeyValue(fields.get(1, b""), fields.get(2, 0), fields.get(5, b""), fields.get(6, 0), fields.get(3, 0))


def _range(fields: Fields) -> Range:
    return Range([_key_value(item) for item in fields[2]], bool(fields.get(3)))


def read_range(data: bytes) -> tuple[Header, Range]:
    """Read the reply to a range."""
    fields = _read(data, (2,))
    return _header(fields), _range(fields)


def read_txn(data: bytes) -> TxnReply:
    """Read the reply to a transaction."""
    fields = _read(data, (3,))
    steps: list[Range | TxnReply | None] = []
    for item in fields[3]:
        step = _read(item)
        if 1 in step:
            steps.append(_range(_read(step[1], (2,))))
        else:
            steps.append(read_txn(step[4]) if 4 in step else None)
    return TxnReply(_header(fields), bool(fields.get(2)), steps)


def read_lease(data: bytes) -> tuple[Header, int]:
    """Read the ttl in the reply to a grant, a keep-alive or a question for it; 0 or less if there is no such lease."""
    fields = _read(data)
    return _header(fields), fields.get(3, 0)


def read_token(data: bytes) -> str:
    """Read the auth token in the reply to a login."""
    return bytes(_read(data).get(2, b"")).decode()


def read_watch(data: bytes) -> WatchReport:
    """Read a message about a watch. Keys that were created are not among its changes."""
    fields = _read(data, (11,))
    changes = []
    for item in fields[11]:
        event = _read(item)
        pair = _key_value(event.get(2, b""))
        if event.get(1, 0) == DELETED or pair.mod_revision > pair.create_revision:
            changes.append((pair.key, pair.mod_revision))
    revision = _header(fields).revision
    return WatchReport(fields.get(2, 0), revision, bool(fields.get(3)), bool(fields.get(4)), fields.get(5, 0), changes)
