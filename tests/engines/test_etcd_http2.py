"""Our end of HTTP/2, spoken with a server of another make (the package `h2`), byte by byte, without a socket."""

from __future__ import annotations

import random

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest

from fencelock.engines.etcd.http2 import (
    DATA,
    END_HEADERS,
    GOAWAY,
    MEASURING,
    PADDED,
    REFUSED,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    Frames,
    Http2Connection,
    Stream,
    block,
    message,
)
from fencelock.engines.etcd.http2 import HEADERS as HEADERS_FRAME

HEADERS = block(
    ((":method", "POST"), (":scheme", "http"), (":path", "/a/B"), (":authority", "h" * 300), ("te", "trailers"))
)


class Pair:
    """Both ends. What one says is cut at random into pieces for the other."""

    def __init__(self, seed: int = 0, **settings: int) -> None:
        self.chance = random.Random(seed)
        self.ours, self.frames = Http2Connection(), Frames()
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.theirs = h2.connection.H2Connection(config)
        self.theirs.initiate_connection()
        self.theirs.update_settings(
            {getattr(h2.settings.SettingCodes, name): value for name, value in settings.items()}
        )
        self.events: list[h2.events.Event] = []
        self.bodies: dict[int, bytes] = {}
        self.to_server(self.ours.hello())

    def to_server(self, data: bytes) -> None:
        """Have the server read, and us what it says to that, and so on until nobody has anything to say."""
        while True:
            if data:
                for event in self.theirs.receive_data(data):
                    self.events.append(event)
                    if isinstance(event, h2.events.DataReceived):
                        assert event.data is not None
                        self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                        self.theirs.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            back = self.theirs.data_to_send()
            if not back:
                return
            data = self.from_server(back)

    def from_server(self, data: bytes) -> bytes:
        """Read what the server says, in pieces; return what we say to it."""
        out = b""
        while data:
            size = self.chance.randint(1, 40)
            self.frames.feed(data[:size])
            data = data[size:]
            while isinstance(frame := self.frames.gets(), Frame):
                out += self.ours.take(frame)
        return out

    def request(self, body: bytes, *, end: bool = True) -> Stream:
        """Open a stream of ours."""
        stream = Stream(lambda: None)
        self.to_server(self.ours.open(stream, HEADERS, body, end=end))
        return stream

    def answer(self, stream: Stream, *bodies: bytes, status: int = 0) -> None:
        """Have the server answer, in small frames."""
        self.theirs.send_headers(stream.id, [(":status", "200"), ("content-type", "application/grpc")])
        for body in bodies:
            data = message(body)
            while data:
                size = self.chance.randint(1, 5000)
                self.theirs.send_data(stream.id, data[:size])
                data = data[size:]
        trailers = [("grpc-status", str(status)), ("grpc-message", "words " * 50)]
        self.theirs.send_headers(stream.id, trailers, end_stream=True)
        self.to_server(b"")


@pytest.mark.parametrize("seed", range(5))
def test_calls(seed: int) -> None:
    """Calls are answered in any order, each with its messages and its status, whatever pieces they come in."""
    pair = Pair(seed)
    bodies = [bytes(pair.chance.randrange(256) for _ in range(pair.chance.randint(0, 3000))) for _ in range(30)]
    streams = [pair.request(body) for body in bodies]
    for stream, body in zip(streams, bodies, strict=True):
        assert pair.bodies[stream.id] == message(body)
    order = list(range(30))
    pair.chance.shuffle(order)
    for at in order:
        pair.answer(streams[at], bodies[at], b"more", status=at % 3)
    for at, stream in enumerate(streams):
        assert list(stream.messages) == [bodies[at], b"more"]
        assert (stream.closed, stream.status) == (True, at % 3)
        assert stream.headers[":status"] == "200"
    assert not pair.ours.streams


def test_window_of_the_connection() -> None:
    """More than the server has room for waits until it has, and arrives whole and in order."""
    pair = Pair()
    body = bytes(1_000_000)
    streams = [pair.request(body), pair.request(b"small"), pair.request(body)]
    for stream, wanted in zip(streams, (body, b"small", body), strict=True):
        assert pair.bodies[stream.id] == message(wanted)


def test_windows_and_frames_of_any_size() -> None:
    """The server's own limits hold from when it tells us of them."""
    pair = Pair(INITIAL_WINDOW_SIZE=10, MAX_FRAME_SIZE=16384)
    stream = pair.request(b"x" * 1000)
    assert pair.bodies[stream.id] == message(b"x" * 1000)


def test_limit_of_streams() -> None:
    """More calls than the server takes at once wait for their turn; one that is given up meanwhile is never sent."""
    pair = Pair(MAX_CONCURRENT_STREAMS=2)
    streams = [pair.request(b"%d" % at) for at in range(5)]
    assert [bool(stream.id) for stream in streams] == [True, True, False, False, False]
    assert pair.ours.cancel(streams[2]) == b""
    pair.answer(streams[0])
    assert streams[3].id
    assert not streams[4].id
    pair.to_server(pair.ours.cancel(streams[1]))
    assert streams[4].id
    assert any(isinstance(event, h2.events.StreamReset) for event in pair.events)
    for stream in streams[3:]:
        pair.answer(stream, b"yes")
        assert list(stream.messages) == [b"yes"]


def test_stream_that_stays_open() -> None:
    """A stream whose end is left open takes more messages, and tells of each that comes."""
    pair = Pair()
    news: list[int] = []
    stream = Stream(lambda: news.append(len(stream.messages)))
    pair.to_server(pair.ours.open(stream, HEADERS, b"one", end=False))
    pair.to_server(pair.ours.say(stream, b"two"))
    assert pair.bodies[stream.id] == message(b"one") + message(b"two")
    pair.theirs.send_headers(stream.id, [(":status", "200")])
    for body in (b"a", b"b"):
        pair.theirs.send_data(stream.id, message(body))
        pair.to_server(b"")
    assert news == [1, 2]
    pair.to_server(pair.ours.cancel(stream))
    assert stream.closed
    assert pair.ours.say(stream, b"three") == b""


def test_pings_and_settings() -> None:
    """Pings and settings are acknowledged, at any time."""
    pair = Pair()
    pair.theirs.ping(b"12345678")
    pair.theirs.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 7})
    pair.to_server(b"")
    kinds = [type(event) for event in pair.events]
    assert h2.events.PingAckReceived in kinds
    assert kinds.count(h2.events.SettingsAcknowledged) == 3


def test_ping_that_only_measures() -> None:
    """What grpc-go's server measures its way with is answered along with the next message, not in a segment of its own."""
    pair = Pair()
    pair.theirs.ping(MEASURING)
    pair.to_server(b"")
    assert h2.events.PingAckReceived not in map(type, pair.events)
    pair.request(b"1")
    pair.request(b"2")
    assert [type(event) for event in pair.events].count(h2.events.PingAckReceived) == 1


def test_server_that_leaves() -> None:
    """What a server has not begun with when it leaves is refused, not lost; the rest may still be answered."""
    pair = Pair()
    first, second = pair.request(b"1"), pair.request(b"2")
    pair.theirs.close_connection(last_stream_id=first.id)
    pair.from_server(pair.theirs.data_to_send())
    assert pair.ours.retiring
    assert not first.closed
    assert (second.closed, second.reset) == (True, REFUSED)


def test_reset_and_break() -> None:
    """A stream that the server resets, and all when the connection breaks, are closed without a status."""
    pair = Pair()
    first, second = pair.request(b"1"), pair.request(b"2")
    pair.theirs.reset_stream(first.id, h2.errors.ErrorCodes.INTERNAL_ERROR)
    pair.to_server(b"")
    assert (first.closed, first.reset, first.status) == (True, h2.errors.ErrorCodes.INTERNAL_ERROR, None)
    pair.ours.broken()
    assert (second.closed, second.status) == (True, None)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+PONG\r\n" * 10,
        b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\xff",
        b"\x00\x00\x04\x05\x04\x00\x00\x00\x01\x00\x00\x00\x02",
    ],
)
def test_what_no_server_says(data: bytes) -> None:
    """Anything else is a ValueError, on which the wire is closed: no answer is made up."""
    ours, frames = Http2Connection(), Frames()
    stream = Stream(lambda: None)
    ours.open(stream, HEADERS, b"", end=True)
    frames.feed(data)
    with pytest.raises(ValueError):
        while isinstance(frame := frames.gets(), Frame):
            ours.take(frame)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(RST_STREAM, 0, 1, b"abc"),
        Frame(GOAWAY, 0, 0, b"ab"),
        Frame(WINDOW_UPDATE, 0, 0, b"a"),
        Frame(SETTINGS, 0, 0, b"abcde"),
        Frame(DATA, PADDED, 1, b""),
        Frame(DATA, PADDED, 1, b"\x09abc"),
        Frame(HEADERS_FRAME, PADDED | END_HEADERS, 1, b""),
    ],
)
def test_frames_that_break_off(frame: Frame) -> None:
    """A frame that is shorter than it must be is an error that closes the wire."""
    ours = Http2Connection()
    ours.open(Stream(lambda: None), HEADERS, b"", end=True)
    with pytest.raises(ValueError, match=r"HTTP/2"):
        ours.take(frame)
