"""Connections of the blocking runtime: sockets that the waiting thread reads itself."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLWantReadError, SSLWantWriteError
from threading import RLock
from typing import Any, TypeVarTuple

from fencelock.core.clock import boottime
from fencelock.core.fork import FORKED, Forked, detach_after_fork
from fencelock.core.runtime import NO_REPLY, Command, Connector, PushHandler
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.socket_stream import CHUNK, open_stream

Ts = TypeVarTuple("Ts")

Pending = tuple[float, list[Any], int]
"""A request without a reply so far: when it was sent, and the list and place for its reply."""

SEND_SECONDS = 5.0
"""Seconds for which a server may leave our send buffer full before the connection counts as broken."""


class SocketConnection:
    """`fencelock.core.runtime.Connection` over a non-blocking socket; threads wait in a poll."""

    __slots__ = (
        "_address",
        "_detached",
        "_feed",
        "_gets",
        "_on_end",
        "_on_push",
        "_pack",
        "_poll",
        "_pushes",
        "_retained",
        "_sock",
        "_sock_mutex",
        "_users",
        "last_latency",
        "open",
        "pending",
        "tls",
    )

    def __init__(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> None:
        sock = connector.connect(open_stream)
        parser = connector.parser()
        self._sock = sock
        self.tls = hasattr(sock, "pending")
        # OpenSSL does not allow a read and a write at the same time: one thread may read while another calls `send`.
        self._sock_mutex = RLock()
        self._address = connector.address
        self._feed, self._gets, self._pack, self._pushes = parser.feed, parser.gets, connector.pack, connector.pushes
        self._on_push, self._on_end = on_push, on_end
        sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        # The users of the descriptor at this moment, in all threads. If the connection is closed meanwhile, the last user
        # closes the descriptor, as the system may give its number to another file. `request_all` sets `_retained`; all others
        # are in the list, whose append and pop are atomic.
        self._retained = False
        self._users: list[None] = []
        self._detached = False
        self.pending: deque[Pending] = deque()
        self.open = True
        self.last_latency = 0.0

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest pending command was sent, or None."""
        return self.pending[0][0] if self.pending else None

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and read until the reply arrives."""
        data = command if isinstance(command, bytes) else self._pack(command)
        replies: list[Any] = [NO_REPLY]
        sent = boottime()
        self._use(self._exchange, data, replies, sent, sent + timeout)
        if replies[0] is NO_REPLY:
            self.check_forked()
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._address}: {why}")
        return replies[0]

    def post(self, command: Command | bytes, replies: list[Any], place: int) -> bool:
        """Send without waiting; `read_once` stores the reply at its place. Return whether the connection is open."""
        data = command if isinstance(command, bytes) else self._pack(command)
        self._use(self._post, data, (boottime(), replies, place))
        return self.open

    def send(self, data: bytes) -> None:
        """Send bytes that have no reply."""
        self._use(self._send_all, data)

    def _use(self, step: Callable[[*Ts], None], *args: *Ts) -> None:
        """Run a step that uses the socket, if it is open. Close the connection if the step fails or is interrupted.

        If another thread closes the connection meanwhile, the descriptor stays open until the step ends: its number could
        be reused.
        """
        users = self._users
        try:
            users.append(None)  # inside the try: Ctrl-C may arrive right after it
            if self.open:
                step(*args)
        except BaseException as error:
            # Also after Ctrl-C: bytes may be lost between the socket and the parser.
            self._shut_down()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()

    def _exchange(self, data: bytes, replies: list[Any], sent: float, until: float) -> None:
        """Send a request, and read until its reply arrives, or until that time."""
        self._post(data, (sent, replies, 0))
        while replies[0] is NO_REPLY and self.open and self._receive_by(until):
            pass

    def _post(self, data: bytes, request: Pending) -> None:
        """Send a request."""
        self.pending.append(request)
        self._send_all(data)

    def _send_all(self, data: bytes | memoryview) -> None:
        """Send all bytes; wait while the send buffer is full."""
        until: float | None = None
        while True:
            try:
                with self._sock_mutex:
                    sent = self._sock.send(data)
            except (BlockingIOError, SSLWantWriteError):
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            until = until or boottime() + SEND_SECONDS
            room = select.poll()
            room.register(self._sock.fileno(), select.POLLOUT)
            if not room.poll(max(0.0, until - boottime()) * 1000):
                raise TimeoutError(f"the server has not read what it was sent for {SEND_SECONDS:g} s")

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once it is closed."""
        return int(self._sock.fileno())

    def has_buffered(self) -> bool:
        """Return whether TLS has decrypted data that a poll of the socket does not report."""
        if not self.tls or not self.open:
            return False
        with self._sock_mutex:
            return bool(self._sock.pending())

    def read_once(self) -> None:
        """Read what is there; store every reply at its place."""
        self._use(self._receive)

    def read_until(self, done: Callable[[], bool], until: float) -> None:
        """Read until `done()` or the time `until`; store every reply at its place."""
        self._use(self._receive_until, done, until)

    def _receive_until(self, done: Callable[[], bool], until: float) -> None:
        """Poll and read until `done()`, the time `until`, or the end of the connection."""
        while self.open and not done() and self._receive_by(until):
            pass

    def _receive_by(self, until: float) -> bool:
        """Wait for data until that time, and read it. Return False if the time was over before."""
        # Poll once more after the timeout: if the process was stopped meanwhile, the reply is there.
        left = until - boottime()
        if (self.tls and self.has_buffered()) or self._poll.poll(max(0.0, left) * 1000):
            self._receive()
            return True
        return left > 0

    def _receive(self) -> None:
        try:
            with self._sock_mutex:
                data = self._sock.recv(CHUNK)
        except (BlockingIOError, SSLWantReadError):
            return
        if not data:
            self._shut_down()
            return
        self._feed(data)
        while (reply := self._gets()) is not NO_REPLY:
            if isinstance(reply, self._pushes) and not self._on_push(reply):
                continue
            if self.pending:
                sent, replies, place = self.pending.popleft()
                self.last_latency = boottime() - sent
                replies[place] = reply

    def retain(self) -> None:
        """Keep the descriptor open until `end_retain`, even if another thread closes the connection."""
        self._retained = True

    def end_retain(self) -> None:
        """Allow the descriptor to be closed again."""
        self._retained = False
        if not self.open:
            self._release()

    def alive(self) -> bool:
        """Read what is available, and return whether the server has not closed it. Late replies do
        not change `last_latency`."""
        last_latency = self.last_latency
        self.read_until(lambda: False, 0.0)
        self.last_latency = last_latency
        return self.open

    def close(self) -> None:
        """Close it. A thread that reads it is woken, and closes the descriptor."""
        self._shut_down()
        self._release()

    def _release(self) -> None:
        """Close the descriptor of a closed connection, unless a thread still uses it."""
        if not self._retained and not self._users:
            self._sock.close()

    def check_forked(self) -> None:
        """Raise Forked if this process was forked while it waited here."""
        if self._detached:
            raise Forked(FORKED)

    def _shut_down(self) -> None:
        if self.open:
            self.open = False
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._on_end()

    def detach_after_fork(self) -> None:
        """Detach a forked child from its copy."""
        self.open, self._detached = False, True
        detach_after_fork(self._sock)
        self._sock.close()
