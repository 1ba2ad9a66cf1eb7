"""gRPC calls to one etcd member. The library `h2` encodes and decodes HTTP/2; the runtime's connection does the I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from fencelock.core.runtime import NO_REPLY, Connection, Event, NoReply, Runtime
from fencelock.engines.etcd.rpc_errors import PRECONDITION, UNAVAILABLE, RpcError
from fencelock.engines.etcd.watch import WatchStream
from fencelock.errors import OutcomeUnknown

Headers = list[tuple[bytes, bytes]]

RECEIVE_WINDOW = 2**24
"""Bytes that the server may send ahead: more than any reply that we request."""
MAX_STREAMS = 200
"""Calls in flight at most on one connection, as h2 visits all of them for each new one. More calls wait for their turn."""
MAX_STREAM_ID = 2**31 - 1
MEASURING_PING = bytes((2, 4, 16, 16, 9, 14, 7, 7))
"""The ping with which grpc-go measures the network after each message."""


class RawData:
    """`fencelock.core.runtime.Parser` that returns the bytes as they were read: h2 parses them."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes, /) -> None:
        """Store what was read."""
        self._data = data

    def gets(self) -> bytes | NoReply:
        """Return what was read, once."""
        data, self._data = self._data, b""
        return data or NO_REPLY


class Call:
    """One gRPC call: messages in both directions, and a status at the end."""

    def __init__(self, method: str, unsent: bytes, on_message: Callable[[], object], *, ends: bool) -> None:
        self.method = method
        self.stream = 0
        """0 while the call waits for its turn."""
        self.unsent = unsent
        self.ends = ends
        """Whether the first message is the last one that we send."""
        self.on_message = on_message
        """Called after each message, and at the end."""
        self.messages: deque[bytes] = deque()
        self.headers: dict[bytes, bytes] = {}
        self.closed = False
        self.reset: int | None = None
        """The HTTP/2 error code with which the server ended the call."""
        self._received = b""

    def receive(self, data: bytes) -> bool:
        """Store received bytes; return whether a message is complete."""
        received = self._received + data if self._received else data
        complete = False
        while len(received) >= 5:
            end = 5 + int.from_bytes(received[1:5], "big")
            if received[0]:
                raise ValueError("etcd: a compressed message, which nobody requested")
            if len(received) < end:
                break
            self.messages.append(received[5:end])
            received = received[end:]
            complete = True
        self._received = received
        return complete

    def close(self, reset: int | None = None) -> None:
        """End the call: no more messages will come."""
        self.closed, self.reset = True, reset
        self.on_message()


def frame(message: bytes) -> bytes:
    """Return a message with gRPC's prefix: not compressed, and its length."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class EtcdConnection:
    """A connection to one member. In the blocking runtime one thread at a time uses it; in asyncio all tasks share it."""

    def __init__(self, runtime: Runtime, address: str, endpoint: int, headers: Callable[[str], Headers]) -> None:
        self.address = address
        self.endpoint = endpoint
        """The number of its endpoint in the URL."""
        self.last_used = self.last_received = runtime.now()
        self.retired = False
        """Whether no new calls may start on it."""
        self.raw: Connection
        self.watches = WatchStream(self)
        self._runtime = runtime
        self._headers = headers
        self._calls: dict[int, Call] = {}
        self._queued: deque[Call] = deque()
        self._max_streams = 100  # until the server's settings arrive
        config = H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
        )
        self._h2 = H2Connection(config)

    def attach(self, raw: Connection) -> None:
        """Start HTTP/2 on a new connection."""
        self.raw = raw
        windows = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: RECEIVE_WINDOW}
        self._h2.local_settings = Settings(client=True, initial_values=windows)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(RECEIVE_WINDOW)
        self._flush()

    @property
    def usable(self) -> bool:
        """Whether new calls may start on it."""
        return not self.retired and self.raw.open

    @property
    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self._calls and not self._queued

    # ------------------------------------------------------------------ calls

    async def call(self, method: str, message: bytes, timeout: float) -> bytes:
        """Send a request and return its reply. Raises RpcError or OutcomeUnknown."""
        call, event = self.start(method, message)
        return await self.finish(call, event, timeout)

    def start(self, method: str, message: bytes) -> tuple[Call, Event]:
        """Send a request; return the call, and an event that its end sets."""
        event = self._runtime.event()
        return self.open(method, message, event.set), event

    async def finish(self, call: Call, event: Event, timeout: float) -> bytes:
        """Wait for the reply to a request that was started. Raises RpcError or OutcomeUnknown."""
        try:
            if not call.closed:
                await self._runtime.wait_for_push([self.raw], event, timeout)
        except BaseException:
            # A thread may be interrupted between any two bytes; a task is cancelled only at an await.
            if self._runtime.shares_connections:
                self.cancel(call)
            else:
                self.raw.close()
            raise
        if not call.closed:
            self.cancel(call)
            raise OutcomeUnknown(f"etcd at {self.address}: no reply within {timeout:.3g} s")
        return self.result(call)

    def result(self, call: Call) -> bytes:
        """Return the reply of a call that has ended. Raises RpcError or OutcomeUnknown."""
        status = call.headers.get(b"grpc-status")
        if status == b"0" and call.messages:
            return call.messages[0]
        if status is not None and status.isdigit() and status != b"0":
            message = unquote_to_bytes(call.headers.get(b"grpc-message", b"")).decode(errors="replace")
            raise RpcError(int(status), message)
        if call.reset == ErrorCodes.REFUSED_STREAM:
            raise RpcError(UNAVAILABLE, "not started: the server is about to stop")
        if (http := call.headers.get(b":status", b"200")) != b"200":
            raise RpcError(PRECONDITION, f"HTTP {http.decode(errors='replace')}: this is not an etcd server")
        raise OutcomeUnknown(f"etcd at {self.address}: the connection broke before the reply came")

    def open(self, method: str, message: bytes, on_message: Callable[[], object], *, ends: bool = True) -> Call:
        """Start a call; with `ends=False`, `send` may send more messages. It is closed at once if it cannot start."""
        call = Call(method, frame(message), on_message, ends=ends)
        if not self.usable:
            call.close(ErrorCodes.REFUSED_STREAM)
            return call
        with _close_on_error(self.raw):
            self._queued.append(call)
            self._start_queued()
            self._flush()
        return call

    def send(self, call: Call, message: bytes) -> None:
        """Send another message of a call."""
        if not call.closed:
            with _close_on_error(self.raw):
                call.unsent += frame(message)
                self._send_unsent(call)
                self._flush()

    def cancel(self, call: Call) -> None:
        """End a call whose reply nobody needs."""
        if call.closed:
            return
        call.closed = True
        if not call.stream:
            self._queued.remove(call)
        elif self._calls.pop(call.stream, None) is not None and self.raw.open:
            with _close_on_error(self.raw):
                self._h2.reset_stream(call.stream, ErrorCodes.CANCEL)
                self._start_queued()
                self._flush()

    def _start_queued(self) -> None:
        while self._queued and len(self._calls) < self._max_streams and not self.retired:
            call = self._queued.popleft()
            call.stream = self._h2.get_next_available_stream_id()
            self._calls[call.stream] = call
            self._h2.send_headers(call.stream, self._headers(call.method))
            self._send_unsent(call)
            if call.stream >= MAX_STREAM_ID - 2:
                self._retire(MAX_STREAM_ID)

    def _send_unsent(self, call: Call) -> None:
        """Send as much of a call's messages as the server has room for."""
        while call.unsent and call.stream:
            room = min(self._h2.local_flow_control_window(call.stream), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            part, call.unsent = call.unsent[:room], call.unsent[room:]
            self._h2.send_data(call.stream, part, end_stream=call.ends and not call.unsent)

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self.raw.send(data)

    # ------------------------------------------------------------------ what the server sends

    def receive(self, data: bytes) -> None:
        """Handle received bytes. Raises ValueError, which closes the connection, if they are not HTTP/2."""
        self.last_received = self._runtime.now()
        urgent = bool(self._queued)
        try:
            for event in self._h2.receive_data(data):
                urgent = self._handle(event) or urgent
            self._start_queued()
        except H2Error as error:
            raise ValueError(f"etcd: not HTTP/2: {error}") from error
        if urgent:
            self._flush()

    def _handle(self, event: Any) -> bool:
        """Handle an event; return whether h2 has something to send now rather than along with the next request."""
        kind = type(event)
        call = self._calls.get(getattr(event, "stream_id", None) or 0)
        if kind is events.DataReceived:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if call is not None and call.receive(event.data) and not call.ends:
                call.on_message()
            return False
        if kind is events.ResponseReceived or kind is events.TrailersReceived:
            if call is not None:
                call.headers.update(event.headers)
            return False
        if kind is events.StreamEnded or kind is events.StreamReset:
            if call is not None:
                del self._calls[event.stream_id]
                call.close(event.error_code if kind is events.StreamReset else None)
            return False
        if kind is events.WindowUpdated or kind is events.RemoteSettingsChanged:
            if kind is events.RemoteSettingsChanged:
                self._max_streams = min(MAX_STREAMS, self._h2.remote_settings.max_concurrent_streams)
            blocked = [other for other in self._calls.values() if other.unsent]
            for other in blocked:
                self._send_unsent(other)
            return bool(blocked) or kind is events.RemoteSettingsChanged
        if kind is events.ConnectionTerminated:
            self._retire(event.last_stream_id or 0)
        # Sent by itself, the answer to this ping would cost a tenth of the time of every call.
        return not (kind is events.PingReceived and event.ping_data == MEASURING_PING)

    def _retire(self, last_stream: int) -> None:
        """Start no more calls; those that the server has not started after its last stream are refused."""
        self.retired = True
        refused = [call for stream, call in self._calls.items() if stream > last_stream] + list(self._queued)
        self._queued.clear()
        for call in refused:
            self._calls.pop(call.stream, None)
            call.close(ErrorCodes.REFUSED_STREAM)
        self.watches.close()

    def ended(self) -> None:
        """End all calls: the connection is closed."""
        calls = [*self._calls.values(), *self._queued]
        self._calls.clear()
        self._queued.clear()
        for call in calls:
            call.close()
        self.watches.close()


@contextmanager
def _close_on_error(raw: Connection) -> Iterator[None]:
    """Close a connection if an error or Ctrl-C comes while h2 changes its state: the two would no longer agree."""
    try:
        yield
    except BaseException:
        raw.close()
        raise
