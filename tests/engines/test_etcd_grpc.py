"""Calls over HTTP/2, with the server side of h2 at the other end, byte by byte, without a socket."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest

from fencelock.core.runtime import Connection
from fencelock.engines.etcd.grpc import Call, EtcdConnection, frame
from fencelock.engines.etcd.rpc_errors import RpcError
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.blocking import BlockingRuntime

HEADERS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"h" * 300)]


class FakeConnection:
    """Stands for the runtime's connection: it keeps what is sent."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.open = True
        self.sent = b""
        self._ended = ended

    def send(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        if self.open:
            self.open = False
            self._ended()


class Pair:
    """Both ends. What the server sends arrives in pieces of random size."""

    def __init__(self, seed: int = 0, **settings: int) -> None:
        self.rng = random.Random(seed)
        self.ours = EtcdConnection(BlockingRuntime(), "h:1", 0, lambda _: HEADERS)
        self.connection = FakeConnection(self.ours.ended)
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.server = h2.connection.H2Connection(config)
        self.server.initiate_connection()
        self.server.update_settings(
            {getattr(h2.settings.SettingCodes, name): value for name, value in settings.items()}
        )
        self.events: list[h2.events.Event] = []
        self.bodies: dict[int, bytes] = {}
        self.ours.attach(cast("Connection", self.connection))
        self.exchange()

    def exchange(self) -> None:
        """Deliver what both ends send, until neither has anything left."""
        while True:
            data, self.connection.sent = self.connection.sent, b""
            for event in self.server.receive_data(data) if data else []:
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived):
                    assert event.data is not None
                    self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                    self.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            reply = self.server.data_to_send()
            if not reply and not self.connection.sent:
                return
            while reply:
                size = self.rng.randint(1, 40)
                self.ours.receive(reply[:size])
                reply = reply[size:]

    def request(self, body: bytes, **options: Any) -> Call:
        """Start a call of ours."""
        call = self.ours.open("/a/B", body, lambda: None, **options)
        self.exchange()
        return call

    def reply(self, call: Call, *bodies: bytes, status: int = 0) -> None:
        """Let the server reply, in small frames."""
        self.server.send_headers(call.stream, [(":status", "200"), ("content-type", "application/grpc")])
        for body in bodies:
            data = frame(body)
            while data:
                size = self.rng.randint(1, 5000)
                self.server.send_data(call.stream, data[:size])
                data = data[size:]
        trailers = [("grpc-status", str(status)), ("grpc-message", "some%20words")]
        self.server.send_headers(call.stream, trailers, end_stream=True)
        self.exchange()


@pytest.mark.parametrize("seed", range(5))
def test_replies_in_any_order(seed: int) -> None:
    """Calls are answered in any order, each with its message or its status, whatever pieces arrive."""
    pair = Pair(seed)
    bodies = [pair.rng.randbytes(pair.rng.randint(0, 3000)) for _ in range(30)]
    calls = [pair.request(body) for body in bodies]
    assert [pair.bodies[call.stream] for call in calls] == [frame(body) for body in bodies]
    order = list(range(30))
    pair.rng.shuffle(order)
    for at in order:
        pair.reply(calls[at], bodies[at], status=at % 3)
    for at, call in enumerate(calls):
        if at % 3:
            with pytest.raises(RpcError, match="some words") as caught:
                pair.ours.result(call)
            assert caught.value.code == at % 3
        else:
            assert pair.ours.result(call) == bodies[at]
    assert pair.ours.idle


def test_more_than_the_window_is_sent_as_the_server_makes_room() -> None:
    """Requests larger than the connection's window arrive whole and in order."""
    pair = Pair()
    bodies = [bytes(1_000_000), b"small", bytes(1_000_000)]
    calls = [pair.request(body) for body in bodies]
    assert [pair.bodies[call.stream] for call in calls] == [frame(body) for body in bodies]


def test_small_window_of_the_server() -> None:
    """The server's own limits hold from when they arrive."""
    pair = Pair(INITIAL_WINDOW_SIZE=10)
    call = pair.request(b"x" * 1000)
    assert pair.bodies[call.stream] == frame(b"x" * 1000)


def test_large_replies_do_not_stop_the_connection() -> None:
    """Replies that together exceed our receive window keep coming."""
    pair = Pair()
    for _ in range(20):
        call = pair.request(b"?")
        pair.server.send_headers(call.stream, [(":status", "200")])
        data = frame(bytes(1_500_000))
        while data:
            pair.server.send_data(call.stream, data[:16384])
            data = data[16384:]
        pair.server.send_headers(call.stream, [("grpc-status", "0")], end_stream=True)
        reply = pair.server.data_to_send()
        pair.ours.receive(reply)
        pair.exchange()
        assert len(pair.ours.result(call)) == 1_500_000


def test_more_calls_than_streams() -> None:
    """More calls than the server allows at once wait for their turn; one that is cancelled meanwhile is never sent."""
    pair = Pair(MAX_CONCURRENT_STREAMS=2)
    calls = [pair.request(b"%d" % at) for at in range(5)]
    assert [bool(call.stream) for call in calls] == [True, True, False, False, False]
    pair.ours.cancel(calls[2])
    pair.reply(calls[0])
    assert calls[3].stream
    assert not calls[4].stream
    pair.ours.cancel(calls[1])
    pair.exchange()
    assert calls[4].stream
    assert any(isinstance(event, h2.events.StreamReset) for event in pair.events)
    for call in calls[3:]:
        pair.reply(call, b"yes")
        assert pair.ours.result(call) == b"yes"


def test_stream_with_many_messages() -> None:
    """A call whose end is left open takes more messages, and reports each one that arrives."""
    pair = Pair()
    reported: list[int] = []
    call = pair.ours.open("/a/B", b"one", lambda: reported.append(len(call.messages)), ends=False)
    pair.ours.send(call, b"two")
    pair.exchange()
    assert pair.bodies[call.stream] == frame(b"one") + frame(b"two")
    pair.server.send_headers(call.stream, [(":status", "200")])
    for body in (b"a", b"b"):
        pair.server.send_data(call.stream, frame(body))
        pair.exchange()
    assert reported == [1, 2]
    pair.ours.cancel(call)
    assert call.closed
    pair.ours.send(call, b"three")
    pair.exchange()
    assert b"three" not in pair.bodies[call.stream]


def test_calls_that_a_leaving_server_has_not_started_are_refused() -> None:
    """After GOAWAY, a call that the server has not started is refused, not lost; the others may still be answered."""
    pair = Pair()
    first, second = pair.request(b"1"), pair.request(b"2")
    pair.server.close_connection(last_stream_id=first.stream)
    pair.ours.receive(pair.server.data_to_send())
    assert not pair.ours.usable
    assert not first.closed
    with pytest.raises(RpcError, match="not started") as caught:
        pair.ours.result(second)
    assert not caught.value.may_have_run


def test_reset_or_broken_calls_have_an_unknown_outcome() -> None:
    """A call that the server resets, and all calls when the connection breaks, end without a result."""
    pair = Pair()
    first, second = pair.request(b"1"), pair.request(b"2")
    pair.server.reset_stream(first.stream, h2.errors.ErrorCodes.INTERNAL_ERROR)
    pair.exchange()
    pair.connection.close()
    for call in (first, second):
        assert call.closed
        with pytest.raises(OutcomeUnknown):
            pair.ours.result(call)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\xff",
        b"\x00\x00\x04\x05\x04\x00\x00\x00\x01\x00\x00\x00\x02",
    ],
)
def test_broken_frames_are_refused(data: bytes) -> None:
    """A frame that HTTP/2 does not allow is a ValueError, which closes the connection: no reply is made up."""
    pair = Pair()
    pair.request(b"")
    with pytest.raises(ValueError, match="HTTP/2"):
        pair.ours.receive(data)


def test_compressed_message_is_refused() -> None:
    """A compressed message, which no request asks for, closes the connection."""
    pair = Pair()
    call = pair.request(b"?")
    pair.server.send_headers(call.stream, [(":status", "200")])
    pair.server.send_data(call.stream, b"\x01\x00\x00\x00\x01x")
    with pytest.raises(ValueError, match="compressed"):
        pair.ours.receive(pair.server.data_to_send())
