"""The bound: the fewest requests with which etcd can hand a lock over, to measure what the machine allows. Do not use it.

Each process has a raw socket, writes HTTP/2 frames by hand, and has one key. For each acquire and release it needs one
transaction, one watch event and one deletion, which every queued lock needs. It keeps a watch while the same claim stays
ahead. It does not renew, has no timeouts, and does not check that its own key still exists. It takes the deletion of the
claim ahead for a release: if a process in the middle of the queue dies, two processes hold the lock.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from types import TracebackType

from fencelock.engines.etcd import messages as m
from fencelock.engines.etcd.grpc import frame as message
from fencelock.engines.etcd.messages import WatchReport

PREFIX = b"/bare/contended/"
SECONDS = 600
_head = struct.Struct(">BHBBI")
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_HEADER_TABLE = struct.pack(">HI", 1, 0)
LARGE_WINDOW = 2**30


def block(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return headers as literals without indexing (RFC 7541), each shorter than 127 bytes."""
    fields = [(name.encode(), value.encode()) for name, value in headers]
    return b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _head.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


class BareLock:
    """A queue over the keys of one prefix, in the order of their create revisions."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("etcd://")
        host, _, port = self._address.partition(":")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = NO_HEADER_TABLE + struct.pack(">HI", 4, LARGE_WINDOW)
        window = struct.pack(">I", LARGE_WINDOW - 65535)
        self._sock.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(8, 0, 0, window))
        self._bytes = self._unread = self._pong = b""
        self._stream = 1
        self._parts: dict[int, bytes] = {}
        self._replies: dict[int, bytes] = {}
        self._watch = self._number = 0
        self._watched = b""
        self._reports: deque[WatchReport] = deque()
        lease = int.from_bytes(os.urandom(8), "big") >> 1
        self._request(m.GRANT, m.grant_lease(lease, SECONDS))
        key = PREFIX + os.urandom(16).hex().encode()
        queue = m.get_prefix(PREFIX, order=m.DESCENDING, limit=2, keys_only=True)
        self._enter = m.txn([m.is_absent(key)], [m.do_put(key, b"x somebody:123", lease), m.do_range(queue)])
        self._exit_block = m.get_key(key)

    def __enter__(self) -> BareLock:
        reply = m.read_txn(self._request(m.TXN, self._enter))
        mine = reply.header.revision
        ahead = [pair.key for pair in reply.pairs(1) if pair.create_revision < mine]
        if ahead:
            if ahead[0] != self._watched and self._begin(ahead[0]) > mine:
                body = m.get_prefix(PREFIX, order=m.DESCENDING, limit=2, keys_only=True, until=mine)
                if len(m.read_range(self._request(m.RANGE, body))[1].pairs) < 2:
                    return self
            while max((revision for _, revision in self._next().changes), default=0) <= mine:
                pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._request(m.DELETE, self._exit_block)

    def _begin(self, key: bytes) -> int:
        """Watch another key. Return the revision at which the watch was created: it reports only later changes."""
        self._number += 1
        data = message(m.create_watch(self._number, key, b"", 0, puts=False))
        if self._watch:
            data = _frame(DATA, 0, self._watch, message(m.cancel_watch(self._number - 1)) + data)
        else:
            self._watch, self._stream = self._stream, self._stream + 2
            data = self._headers(self._watch, m.WATCH) + _frame(DATA, 0, self._watch, data)
        self._watched = key
        self._sock.sendall(data)
        while not (report := self._next()).created:
            pass
        return report.revision

    def _next(self) -> WatchReport:
        """Return the next report of the current watch."""
        while True:
            while self._reports:
                if (report := self._reports.popleft()).id == self._number:
                    return report
            self._read()

    def _request(self, method: str, body: bytes) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        self._parts[stream] = b""
        pong, self._pong = self._pong, b""
        self._sock.sendall(pong + self._headers(stream, method) + _frame(DATA, END_STREAM, stream, message(body)))
        while stream not in self._replies:
            self._read()
        return self._replies.pop(stream)[5:]

    def _headers(self, stream: int, method: str) -> bytes:
        headers = (
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", self._address),
            ("te", "trailers"), ("content-type", "application/grpc"),
        )  # fmt: skip
        return _frame(HEADERS, END_HEADERS, stream, block(headers))

    def _read(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            raise ConnectionError("etcd closed the connection")
        self._bytes += data
        while len(self._bytes) >= 9:
            high, low, kind, flags, stream = _head.unpack_from(self._bytes)
            end = 9 + (high << 16 | low)
            if len(self._bytes) < end:
                break
            payload, self._bytes = self._bytes[9:end], self._bytes[end:]
            if kind == DATA and stream == self._watch:
                self._unread += payload
                while len(self._unread) >= 5 and len(self._unread) >= (
                    end := 5 + int.from_bytes(self._unread[1:5], "big")
                ):
                    self._reports.append(m.read_watch(self._unread[5:end]))
                    self._unread = self._unread[end:]
            elif kind == DATA:
                self._parts[stream] += payload
            elif kind == HEADERS and flags & END_STREAM:
                self._replies[stream] = self._parts.pop(stream)
            elif kind == PING and not flags & ACK:
                self._pong += _frame(PING, ACK, 0, payload)
            elif kind == SETTINGS and not flags & ACK:
                self._sock.sendall(_frame(SETTINGS, ACK, 0, b""))
