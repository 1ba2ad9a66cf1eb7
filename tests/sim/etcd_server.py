"""A small simulated etcd: keys with revisions, transactions, leases and watches, in etcd's own messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from fencelock.engines.etcd import client as client_module
from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.grpc import Call, EtcdConnection, Headers
from fencelock.engines.etcd.messages import _bytes, _int, _read
from fencelock.engines.etcd.rpc_errors import NOT_FOUND
from tests.sim.token_lab import ByteConnection

START = 100
"""The first revision."""


class SimulatedEtcdConnection(EtcdConnection):
    """The production connection without HTTP/2: it sends (stream, method, message) and gets (stream, message, status)."""

    raw: ByteConnection

    def attach(self, raw: Any) -> None:
        """Use a new connection."""
        self.raw = raw
        self._last_stream = 0

    def open(self, method: str, message: bytes, on_message: Callable[[], object], *, ends: bool = True) -> Call:
        """Start a call."""
        call = Call(method, b"", on_message, ends=ends)
        if not self.usable:
            call.close()
            return call
        self._last_stream += 1
        call.stream = self._last_stream
        self._calls[call.stream] = call
        self.raw.send((call.stream, method, message))
        return call

    def send(self, call: Call, message: bytes) -> None:
        """Send another message of a call."""
        if not call.closed:
            self.raw.send((call.stream, call.method, message))

    def cancel(self, call: Call) -> None:
        """End a call; a watch ends with its connection."""
        call.closed = True
        self._calls.pop(call.stream, None)

    def receive(self, data: Any) -> None:
        """Handle a message of the server; a status ends the call."""
        self.last_received = self._runtime.now()
        stream, message, status = data
        call = self._calls.get(stream)
        if call is None:
            return
        if message is not None:
            call.messages.append(message)
        if status is None:
            call.on_message()
            return
        del self._calls[stream]
        code, text = status
        call.headers = {b"grpc-status": b"%d" % code, b"grpc-message": text}
        call.close()


def simulated_connections() -> AbstractContextManager[object]:
    """Let the client make simulated connections."""

    def make(runtime: Any, address: str, endpoint: int, headers: Callable[[str], Headers]) -> EtcdConnection:
        return SimulatedEtcdConnection(runtime, address, endpoint, headers)

    return patch.object(client_module, "EtcdConnection", make)


class LeaseNotFound(Exception):
    """A put names a lease that does not exist."""


class WatchKey(NamedTuple):
    """One watch: the keys from `start` up to `end`, on a stream of a connection."""

    session: Any
    stream: int
    id: int
    start: bytes
    end: bytes
    puts: bool


class SimulatedEtcd:
    """One server. Requests are carried out one after the other, so every reply is linearizable."""

    def __init__(self, wall: Callable[[], int], run_id: str) -> None:
        self._wall = wall
        self.bases: list[int] = []
        self.revision = START
        self._term = 0
        self._keys: dict[bytes, m.KeyValue] = {}
        self._leases: dict[int, tuple[int, int]] = {}
        """The ttl in seconds and the end in µs of each lease."""
        self._history: list[tuple[m.KeyValue, bool]] = []
        """Each change: the pair after it, and whether that deleted it."""
        self.start(run_id)

    @property
    def transactions(self) -> int:
        """How far revisions have advanced."""
        return self.revision - START

    def start(self, _: str) -> None:
        """Start or restart. The new leader gives every lease its whole ttl again."""
        self._term += 1
        self._watches: list[WatchKey] = []
        for lease, (ttl, _end) in self._leases.items():
            self._leases[lease] = ttl, self._wall() + ttl * 1_000_000

    def forget(self, session: Any) -> None:
        """End the watches of a connection that has ended."""
        self._watches = [watch for watch in self._watches if watch.session is not session]

    def request(self, command: Any, session: Any) -> list[bytes]:
        """Carry out a request and push its reply."""
        stream, method, message = command
        for lease in [lease for lease, (_, end) in self._leases.items() if end <= self._wall()]:
            self._revoke(lease)
        if method == m.WATCH:
            self._watch(stream, _read(message), session)
            return [b""]
        try:
            fields = _read(message, (1, 2, 3)) if method == m.TXN else _read(message)
            session.push((stream, METHODS[method](self, fields), (0, b"")))
        except LeaseNotFound:
            session.push((stream, None, (NOT_FOUND, b"etcdserver: requested lease not found")))
        return [b""]

    # ------------------------------------------------------------------ keys

    def _header(self) -> bytes:
        return _bytes(1, _int(1, 7) + _int(2, 8) + _int(3, self.revision) + _int(4, self._term))

    def _range(self, fields: Any) -> bytes:
        return self._header() + self._range_body(fields)

    def _select(self, start: bytes, end: bytes) -> list[m.KeyValue]:
        return [pair for key, pair in sorted(self._keys.items()) if (start <= key < end if end else key == start)]

    def _range_body(self, fields: Any) -> bytes:
        pairs = self._select(fields[1], fields.get(2, b""))
        if until := fields.get(13):
            pairs = [pair for pair in pairs if pair.create_revision <= until]
        if fields.get(6) == m.BY_CREATION:
            pairs.sort(key=lambda pair: pair.create_revision, reverse=fields.get(5) == m.DESCENDING)
        limit = fields.get(3) or len(pairs)
        if fields.get(9):
            return b""
        body = b"".join(_bytes(2, _pair(pair, keys_only=bool(fields.get(8)))) for pair in pairs[:limit])
        return body + _int(3, int(len(pairs) > limit))

    def _txn(self, fields: Any) -> bytes:
        self._check_leases(fields)
        self.revision += 1
        before = len(self._history)
        body = self._txn_body(fields)
        if len(self._history) == before:
            self.revision -= 1  # it wrote nothing
        reply = self._header() + body
        for pair, deleted in self._history[before:]:
            self._notify(pair, deleted)
        return reply

    def _check_leases(self, fields: Any) -> None:
        for step in map(_read, fields[2] if self._holds(fields) else fields[3]):
            if 2 in step and (lease := _read(step[2]).get(3)) and lease not in self._leases:
                raise LeaseNotFound

    def _holds(self, fields: Any) -> bool:
        return all(self._compare(_read(compare)) for compare in fields[1])

    def _txn_body(self, fields: Any) -> bytes:
        succeeded = self._holds(fields)
        steps = [self._step(_read(step)) for step in (fields[2] if succeeded else fields[3])]
        return _int(2, int(succeeded)) + b"".join(_bytes(3, step) for step in steps)

    def _compare(self, fields: Any) -> bool:
        pairs = self._select(fields[3], fields.get(64, b"")) or [m.KeyValue(fields[3], 0, b"", 0, 0)]
        if fields[2] == m.CREATE_REVISION:
            return all(pair.create_revision == fields.get(5, 0) for pair in pairs)
        return all(pair.mod_revision == fields.get(6, 0) for pair in pairs)

    def _step(self, step: Any) -> bytes:
        if 1 in step:
            return _bytes(1, self._range_body(_read(step[1])))
        if 2 in step:
            put = _read(step[2])
            self._put(put[1], put.get(2, b""), put.get(3, 0))
            return _bytes(2, b"")
        if 3 in step:
            self._delete(_read(step[3])[1])
            return _bytes(3, b"")
        return _bytes(4, self._txn_body(_read(step[4], (1, 2, 3))))

    def _put(self, key: bytes, value: bytes, lease: int) -> None:
        old = self._keys.get(key)
        pair = m.KeyValue(key, self.revision if old is None else old.create_revision, value, lease, self.revision)
        self._keys[key] = pair
        self._history.append((pair, False))
        if key.endswith(b"/about"):
            self.bases.append(int(value.split()[1]))

    def _delete(self, key: bytes) -> None:
        if self._keys.pop(key, None) is not None:
            self._history.append((m.KeyValue(key, 0, b"", 0, self.revision), True))

    # ------------------------------------------------------------------ leases

    def _grant(self, fields: Any) -> bytes:
        ttl, lease = fields[1], fields[2]
        self._leases[lease] = ttl, self._wall() + ttl * 1_000_000
        return self._header() + _int(2, lease) + _int(3, ttl)

    def _keep_alive(self, fields: Any) -> bytes:
        lease = fields[1]
        if lease not in self._leases:
            return self._header() + _int(2, lease)
        ttl, _ = self._leases[lease]
        self._leases[lease] = ttl, self._wall() + ttl * 1_000_000
        return self._header() + _int(2, lease) + _int(3, ttl)

    def _time_to_live(self, fields: Any) -> bytes:
        ttl, _ = self._leases.get(fields[1], (0, 0))
        return self._header() + _int(2, fields[1]) + _int(3, ttl)

    def _revoke_request(self, fields: Any) -> bytes:
        if fields[1] not in self._leases:
            raise LeaseNotFound
        self._revoke(fields[1])
        return self._header()

    def _revoke(self, lease: int) -> None:
        del self._leases[lease]
        keys = [key for key, pair in self._keys.items() if pair.lease == lease]
        self.revision += bool(keys)
        for key in keys:
            self._delete(key)
            self._notify(*self._history[-1])

    # ------------------------------------------------------------------ watches

    def _watch(self, stream: int, fields: Any, session: Any) -> None:
        if 1 not in fields:  # cancelled
            id = _read(fields[2])[1]
            self._watches = [watch for watch in self._watches if (watch.session, watch.id) != (session, id)]
            return
        wanted = _read(fields[1])
        watch = WatchKey(session, stream, wanted[7], wanted[1], wanted.get(2, b""), puts=5 not in wanted)
        self._watches.append(watch)
        session.push((stream, self._header() + _int(2, watch.id) + _int(3, 1), None))
        if since := wanted.get(3):
            for pair, deleted in self._history:
                if pair.mod_revision >= since:
                    self._tell(watch, pair, deleted)

    def _notify(self, pair: m.KeyValue, deleted: bool) -> None:
        for watch in self._watches:
            self._tell(watch, pair, deleted)

    def _tell(self, watch: WatchKey, pair: m.KeyValue, deleted: bool) -> None:
        covered = watch.start <= pair.key < watch.end if watch.end else pair.key == watch.start
        if covered and (deleted or watch.puts):
            event = _bytes(11, _int(1, int(deleted)) + _bytes(2, _pair(pair)))
            watch.session.push((watch.stream, self._header() + _int(2, watch.id) + event, None))


METHODS: dict[str, Callable[[SimulatedEtcd, Any], bytes]] = {
    m.RANGE: SimulatedEtcd._range,
    m.TXN: SimulatedEtcd._txn,
    m.GRANT: SimulatedEtcd._grant,
    m.KEEP_ALIVE: SimulatedEtcd._keep_alive,
    m.TIME_TO_LIVE: SimulatedEtcd._time_to_live,
    m.REVOKE: SimulatedEtcd._revoke_request,
}


def _pair(pair: m.KeyValue, *, keys_only: bool = False) -> bytes:
    value = b"" if keys_only else pair.value
    return (
        _bytes(1, pair.key)
        + _int(2, pair.create_revision)
        + _int(3, pair.mod_revision)
        + _bytes(5, value)
        + _int(6, pair.lease)
    )
