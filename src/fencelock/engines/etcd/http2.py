"""As much of HTTP/2 as gRPC to one server needs (RFC 9113), without I/O: frames come in, bytes to send go out.

We tell the server to keep no table of headers (SETTINGS_HEADER_TABLE_SIZE 0), so that a block of headers means the same
whenever it comes: most are found in a cache, and ours are written once. See docs/decisions/0008.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

from fencelock.core.runtime import NO_REPLY, NoReply

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME = 1, 2, 3, 4, 5
CANCEL, REFUSED = 8, 7
"""Codes for a stream that is broken off: by whom it is of no more use to; by a server that has not begun with it."""

MEASURING = bytes((2, 4, 16, 16, 9, 14, 7, 7))
"""What grpc-go's server pings with after each message, to find out how much it may have on its way: no sign of life."""

OUR_MAX_FRAME = 16384
OUR_WINDOW = 2**30
"""What the server may send before we say that there is room: more than any answer that we ask for."""
DEFAULT_WINDOW = 65535

_head = struct.Struct(">BHBBI")
_setting = struct.Struct(">HI")
_number = struct.Struct(">I")


class Frame(NamedTuple):
    """One frame, whole."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _head.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _number_in(payload: bytes) -> int:
    if len(payload) != _number.size:
        raise ValueError("a frame of HTTP/2 that has the wrong length")
    return int.from_bytes(payload, "big")


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ValueError("a frame of HTTP/2 with more padding than it is long")
    return payload[1 : len(payload) - payload[0]]


class Frames:
    """`fencelock.core.runtime.Parser`: makes frames of bytes."""

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def feed(self, data: bytes, /) -> None:
        """Take in what was read."""
        self._bytes = self._bytes[self._at :] + data if self._at < len(self._bytes) else data
        self._at = 0

    def gets(self) -> Frame | NoReply:
        """Return the next whole frame."""
        start, data = self._at + 9, self._bytes
        if start > len(data):
            return NO_REPLY
        high, low, kind, flags, stream = _head.unpack_from(data, self._at)
        size = high << 16 | low
        if size > OUR_MAX_FRAME:
            raise ValueError("a frame of HTTP/2 is longer than we allow: this is no etcd")
        end = start + size
        if end > len(data):
            return NO_REPLY
        self._at = end
        return Frame(kind, flags, stream & 0x7FFFFFFF, data[start:end])


def _text(text: str, prefix: int) -> bytes:
    """Return a string as HPACK writes it, or a number's rest behind its prefix."""
    data = text.encode()
    size, limit = len(data), (1 << prefix) - 1
    if size < limit:
        return bytes((size,)) + data
    out = bytearray((limit,))
    size -= limit
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    out.append(size)
    return bytes(out) + data


def block(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return headers as literals that nobody keeps in a table."""
    return b"".join(b"\0" + _text(name, 7) + _text(value, 7) for name, value in headers)


@lru_cache(256)
def _headers(data: bytes) -> dict[str, str]:
    """Read a block of headers. It refers to no table that changes, as we have forbidden that."""
    decoder = Decoder()
    decoder.header_table_size = decoder.max_allowed_table_size = 0
    try:
        return {str(name): str(value) for name, value in decoder.decode(data)}
    except (HPACKError, UnicodeDecodeError) as error:
        raise ValueError(f"headers that cannot be read: {error}") from error


class Stream:
    """One call of gRPC: messages there, messages back, and a status in the end."""

    __slots__ = ("_part", "_received", "_window", "closed", "headers", "id", "messages", "on_news", "reset")

    def __init__(self, on_news: Callable[[], object]) -> None:
        self.id = 0
        """0 while it waits for the server to have room for one more."""
        self.on_news = on_news
        """Called after each message, and at the end."""
        self.messages: deque[bytes] = deque()
        self.headers: dict[str, str] = {}
        self.closed = False
        self.reset: int | None = None
        """The code of HTTP/2 with which the server broke it off."""
        self._part = b""
        self._received = 0
        self._window = 0

    @property
    def status(self) -> int | None:
        """gRPC's status once it is over, or None if there is none: it broke off."""
        found = self.headers.get("grpc-status", "")
        return int(found) if self.closed and found.isdecimal() else None

    def _take(self, data: bytes) -> bool:
        """Take in some bytes; return whether a message is whole."""
        self._part += data
        some = False
        while len(self._part) >= 5:
            end = 5 + int.from_bytes(self._part[1:5], "big")
            if self._part[0]:
                raise ValueError("a compressed message, which was not asked for")
            if len(self._part) < end:
                break
            self.messages.append(self._part[5:end])
            self._part = self._part[end:]
            some = True
        return some


class Unsent(NamedTuple):
    """What waits for the server to have room."""

    stream: Stream
    data: bytes
    end: bool


def message(body: bytes) -> bytes:
    """Return a message as gRPC frames it, not compressed."""
    return b"\0" + _number.pack(len(body)) + body


class Http2Connection:
    """The client's end of one connection. Whatever returns bytes wants them sent, in that order."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.retiring = False
        """Whether the server takes no new streams on it."""
        self._next = 1
        self._window = DEFAULT_WINDOW
        self._stream_window = DEFAULT_WINDOW
        self._max_frame = 16384
        self._max_streams = 100  # until the server says how many; without a word, as many as one likes
        self._greeted = False
        self._unopened: deque[tuple[Stream, bytes, bytes, bool]] = deque()
        self._unsent: deque[Unsent] = deque()
        self._received = 0
        self._pong = b""
        """An answer that may wait for the next message: sent by itself, it would wake the server once more for each call."""
        self._continued: tuple[int, int, bytes] | None = None

    def hello(self) -> bytes:
        """Return what a client says first."""
        settings = ((HEADER_TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW, OUR_WINDOW))
        return (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, 0, b"".join(_setting.pack(*setting) for setting in settings))
            + _frame(WINDOW_UPDATE, 0, 0, _number.pack(OUR_WINDOW - DEFAULT_WINDOW))
        )

    # ------------------------------------------------------------------ what we say

    def open(self, stream: Stream, headers: bytes, body: bytes, *, end: bool) -> bytes:
        """Open a stream with a first message, and end our side of it."""
        data = message(body)
        if len(self.streams) >= self._max_streams or self._unopened:
            self._unopened.append((stream, headers, data, end))
            return b""
        return self._open(stream, headers, data, end)

    def _open(self, stream: Stream, headers: bytes, data: bytes, end: bool) -> bytes:
        stream.id, self._next = self._next, self._next + 2
        stream._window = self._stream_window
        self.streams[stream.id] = stream
        if self._next >= 2**31 - 1:
            self.retiring = True
        return _frame(HEADERS, END_HEADERS, stream.id, headers) + self._send(stream, data, end)

    def say(self, stream: Stream, *bodies: bytes) -> bytes:
        """Send more messages on a stream whose end was left open."""
        if stream.closed:
            return b""
        more = b"".join(map(message, bodies))
        if not stream.id:
            for place, (other, headers, data, end) in enumerate(self._unopened):
                if other is stream:
                    self._unopened[place] = stream, headers, data + more, end
            return b""
        return self._send(stream, more, False)

    def cancel(self, stream: Stream) -> bytes:
        """Break a stream off: its answer is of no more use."""
        if stream.closed:
            return b""
        stream.closed = True
        if not stream.id:
            self._unopened = deque(item for item in self._unopened if item[0] is not stream)
            return b""
        self.streams.pop(stream.id, None)
        self._unsent = deque(item for item in self._unsent if item.stream is not stream)
        return _frame(RST_STREAM, 0, stream.id, _number.pack(CANCEL)) + self._go_on()

    def _send(self, stream: Stream, data: bytes, end: bool) -> bytes:
        size = len(data)
        if not self._unsent and size <= self._max_frame and size <= self._window and size <= stream._window:
            self._window -= size
            stream._window -= size
            pong, self._pong = self._pong, b""
            return pong + _frame(DATA, END_STREAM if end else 0, stream.id, data)
        self._unsent.append(Unsent(stream, data, end))
        return self._go_on()

    def _go_on(self) -> bytes:
        """Return what there is room for now, of the streams that wait."""
        out = []
        waiting: deque[Unsent] = deque()
        blocked: set[Stream] = set()
        while self._unsent and self._window > 0:
            item = self._unsent.popleft()
            stream, data, end = item
            if stream in blocked:
                waiting.append(item)
                continue
            while True:
                size = min(len(data), self._max_frame, max(0, self._window), max(0, stream._window))
                if not size and data:
                    waiting.append(Unsent(stream, data, end))
                    blocked.add(stream)
                    break
                part, data = data[:size], data[size:]
                self._window -= size
                stream._window -= size
                out.append(_frame(DATA, END_STREAM if end and not data else 0, stream.id, part))
                if not data:
                    break
        self._unsent.extendleft(reversed(waiting))
        while self._unopened and len(self.streams) < self._max_streams and not self._unsent:
            out.append(self._open(*self._unopened.popleft()))
        return b"".join(out)

    # ------------------------------------------------------------------ what the server says

    def take(self, frame: Frame) -> bytes:
        """Take in a frame; return what has to be said to it. Raise ValueError if no server of HTTP/2 says that."""
        kind, flags, id, payload = frame
        if self._continued is not None and (kind != CONTINUATION or id != self._continued[0]):
            raise ValueError("a frame amid the headers of another")
        if kind == DATA:
            return self._data(id, flags, payload)
        if kind == HEADERS:
            if flags & PADDED:
                payload = _unpadded(payload)
            if flags & PRIORITY:
                payload = payload[5:]
            return self._head(id, flags, payload)
        if kind == CONTINUATION and self._continued is not None:
            _, first, before = self._continued
            self._continued = None
            return self._head(id, first | flags & END_HEADERS, before + payload)
        if kind == SETTINGS:
            return b"" if flags & ACK else self._settings(payload)
        if kind == PING:
            if payload == MEASURING and not flags & ACK:
                self._pong = _frame(PING, ACK, 0, payload)
                return b""
            return b"" if flags & ACK else _frame(PING, ACK, 0, payload)
        if kind == WINDOW_UPDATE:
            more = _number_in(payload) & 0x7FFFFFFF
            if not id:
                self._window += more
            elif (stream := self.streams.get(id)) is not None:
                stream._window += more
            return self._go_on() if self._unsent else b""
        if kind == RST_STREAM:
            if (stream := self.streams.get(id)) is not None:
                stream.reset = _number_in(payload)
                return self._over(stream)
            return b""
        if kind == GOAWAY:
            self._leave(_number_in(payload[:4]) & 0x7FFFFFFF)
        elif kind == PUSH_PROMISE:
            raise ValueError("a pushed stream, which was forbidden")
        return b""

    def _data(self, id: int, flags: int, payload: bytes) -> bytes:
        size = len(payload)
        self._received += size
        out = b""
        if self._received >= OUR_WINDOW // 2:
            out = _frame(WINDOW_UPDATE, 0, 0, _number.pack(self._received))
            self._received = 0
        stream = self.streams.get(id)
        if stream is None:
            return out
        if flags & PADDED:
            payload = _unpadded(payload)
        some = stream._take(payload)
        if flags & END_STREAM:
            return out + self._over(stream)
        stream._received += size
        if stream._received >= OUR_WINDOW // 2:
            out += _frame(WINDOW_UPDATE, 0, id, _number.pack(stream._received))
            stream._received = 0
        if some:
            stream.on_news()
        return out

    def _head(self, id: int, flags: int, data: bytes) -> bytes:
        if not flags & END_HEADERS:
            self._continued = id, flags, data
            return b""
        headers = _headers(data)
        stream = self.streams.get(id)
        if stream is None:
            return b""
        stream.headers = {**stream.headers, **headers} if stream.headers else headers
        return self._over(stream) if flags & END_STREAM else b""

    def _settings(self, payload: bytes) -> bytes:
        if len(payload) % _setting.size:
            raise ValueError("settings of HTTP/2 that break off")
        if not self._greeted:
            self._greeted, self._max_streams = True, 2**31
        for name, value in _setting.iter_unpack(payload):
            if name == MAX_STREAMS:
                self._max_streams = value
            elif name == MAX_FRAME:
                self._max_frame = value
            elif name == INITIAL_WINDOW:
                for stream in self.streams.values():
                    stream._window += value - self._stream_window
                self._stream_window = value
        return _frame(SETTINGS, ACK, 0) + self._go_on()

    def _over(self, stream: Stream) -> bytes:
        self.streams.pop(stream.id, None)
        stream.closed = True
        if self._unsent:
            self._unsent = deque(item for item in self._unsent if item.stream is not stream)
        stream.on_news()
        return self._go_on() if self._unopened else b""

    def _leave(self, last: int) -> None:
        """Take in that the server is about to go: what it has not begun it will not begin."""
        self.retiring = True
        late = [stream for id, stream in self.streams.items() if id > last] + [item[0] for item in self._unopened]
        self._unopened.clear()
        for stream in late:
            self.streams.pop(stream.id, None)
            stream.closed, stream.reset = True, REFUSED
            stream.on_news()

    def broken(self) -> None:
        """End all streams: the connection is gone."""
        left = [*self.streams.values(), *(item[0] for item in self._unopened)]
        self.streams.clear()
        self._unopened.clear()
        self._unsent.clear()
        for stream in left:
            stream.closed = True
            stream.on_news()
