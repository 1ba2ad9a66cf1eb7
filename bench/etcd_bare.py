"""The bound: the leanest hand-over that etcd allows, to see what a machine can do at all. It is no lock to use.

A raw socket and frames written by hand; one key and one connection for each process; per turn one transaction, one event
and one deletion, which is what any lock in line has to send. A watch is kept for as long as the same one stands ahead. There
is no renewal, no time-out, no look whether the place in line still stands, and the claim ahead is believed to have had its
turn when its key goes: with a process that dies, two would be in.
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
    """Return headers as literals, each shorter than 127 bytes, that nobody keeps in a table."""
    fields = [(name.encode(), value.encode()) for name, value in headers]
    return b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _head.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


class Baton:
    """A place in line that is taken again and again."""

    def __init__(self, url: str) -> None:
        self._address = url.removeprefix("etcd://")
        host, _, port = self._address.partition(":")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = NO_HEADER_TABLE + struct.pack(">HI", 4, LARGE_WINDOW)
        window = struct.pack(">I", LARGE_WINDOW - 65535)
        self._sock.sendall(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(8, 0, 0, window))
        self._bytes = self._told = self._pong = b""
        self._stream = 1
        self._parts: dict[int, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._watch = self._number = 0
        self._watched = b""
        self._news: deque[WatchReport] = deque()
        lease = int.from_bytes(os.urandom(8), "big") >> 1
        self._ask(m.GRANT, m.grant_lease(lease, SECONDS))
        key = PREFIX + os.urandom(16).hex().encode()
        line = m.get_prefix(PREFIX, order=m.DESCENDING, limit=2, keys_only=True)
        self._enter = m.txn([m.is_absent(key)], [m.do_put(key, b"x somebody:123", lease), m.do_range(line)])
        self._exit_block = m.get_key(key)

    def __enter__(self) -> Baton:
        answer = m.read_txn(self._ask(m.TXN, self._enter))
        mine = answer.header.revision
        ahead = [pair.key for pair in answer.pairs(1) if pair.created < mine]
        if ahead:
            if ahead[0] != self._watched and self._begin(ahead[0]) > mine:
                body = m.get_prefix(PREFIX, order=m.DESCENDING, limit=2, keys_only=True, until=mine)
                if len(m.read_range(self._ask(m.RANGE, body))[1].pairs) < 2:
                    return self
            while max((revision for _, revision in self._next().changes), default=0) <= mine:
                pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ask(m.DELETE, self._exit_block)

    def _begin(self, key: bytes) -> int:
        """Watch another one; return the last revision that is not seen."""
        self._number += 1
        said = message(m.create_watch(self._number, key, b"", 0, puts=False))
        if self._watch:
            said = _frame(DATA, 0, self._watch, message(m.cancel_watch(self._number - 1)) + said)
        else:
            self._watch, self._stream = self._stream, self._stream + 2
            said = self._headers(self._watch, m.WATCH) + _frame(DATA, 0, self._watch, said)
        self._watched = key
        self._sock.sendall(said)
        while not (news := self._next()).created:
            pass
        return news.revision

    def _next(self) -> WatchReport:
        """Return what the current watch says next."""
        while True:
            while self._news:
                if (news := self._news.popleft()).id == self._number:
                    return news
            self._read()

    def _ask(self, method: str, body: bytes) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        self._parts[stream] = b""
        pong, self._pong = self._pong, b""
        self._sock.sendall(pong + self._headers(stream, method) + _frame(DATA, END_STREAM, stream, message(body)))
        while stream not in self._answers:
            self._read()
        return self._answers.pop(stream)[5:]

    def _headers(self, stream: int, method: str) -> bytes:
        headers = (
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", self._address),
            ("te", "trailers"), ("content-type", "application/grpc"),
        )  # fmt: skip
        return _frame(HEADERS, END_HEADERS, stream, block(headers))

    def _read(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            raise ConnectionError("etcd hung up")
        self._bytes += data
        while len(self._bytes) >= 9:
            high, low, kind, flags, stream = _head.unpack_from(self._bytes)
            end = 9 + (high << 16 | low)
            if len(self._bytes) < end:
                break
            payload, self._bytes = self._bytes[9:end], self._bytes[end:]
            if kind == DATA and stream == self._watch:
                self._told += payload
                while len(self._told) >= 5 and len(self._told) >= (end := 5 + int.from_bytes(self._told[1:5], "big")):
                    self._news.append(m.read_watch(self._told[5:end]))
                    self._told = self._told[end:]
            elif kind == DATA:
                self._parts[stream] += payload
            elif kind == HEADERS and flags & END_STREAM:
                self._answers[stream] = self._parts.pop(stream)
            elif kind == PING and not flags & ACK:
                self._pong += _frame(PING, ACK, 0, payload)
            elif kind == SETTINGS and not flags & ACK:
                self._sock.sendall(_frame(SETTINGS, ACK, 0, b""))
