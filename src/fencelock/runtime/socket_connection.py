"""Connections of the blocking runtime: sockets that the waiting thread reads itself."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from ssl import SSLWantReadError, SSLWantWriteError
from threading import RLock
from typing import Any

from fencelock.core.clock import boottime
from fencelock.core.fork import FORKED, Forked, silence
from fencelock.core.runtime import NO_REPLY, Command, Connector, Endpoint, Event, PushHandler
from fencelock.errors import OutcomeUnknown

CHUNK = 65536
SEND_SECONDS = 5.0
"""Seconds for which a server may leave our send buffer full before the connection counts as broken."""


class SocketConnection:
    """`fencelock.core.runtime.Connection` over a non-blocking socket; threads wait in a poll."""

    __slots__ = (
        "_address",
        "_feed",
        "_forgotten",
        "_gets",
        "_on_end",
        "_on_push",
        "_pack",
        "_poll",
        "_pushes",
        "_retained",
        "_sock",
        "_tls_mutex",
        "_users",
        "open",
        "owed",
        "pace",
        "tls",
    )

    def __init__(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> None:
        sock = connector.connect(open_stream)
        parser = connector.parser()
        self._sock = sock
        self.tls = hasattr(sock, "pending")
        # OpenSSL does not allow a read and a write at the same time: one thread may read while another calls `tell`.
        self._tls_mutex: Any = RLock() if self.tls else nullcontext()
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
        self._forgotten = False
        self.owed: deque[tuple[float, list[Any], int]] = deque()
        self.open = True
        self.pace = 0.0

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest pending command was sent, or None."""
        return self.owed[0][0] if self.owed else None

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and read until the reply arrives."""
        data = command if isinstance(command, bytes) else self._pack(command)
        replies: list[Any] = [NO_REPLY]
        users = self._users
        try:
            users.append(None)  # inside the try: Ctrl-C may arrive right after it
            if self.open:
                sent = boottime()
                self.owed.append((sent, replies, 0))
                self._send_all(data)
                self._receive_until(lambda: replies[0] is not NO_REPLY, sent + timeout)
        except BaseException as error:
            # Also after Ctrl-C: bytes may be lost between the socket and the parser.
            self._shut_down()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()
        if replies[0] is NO_REPLY:
            self.check_forked()
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._address}: {why}")
        return replies[0]

    def post(self, command: Command | bytes, replies: list[Any], place: int) -> bool:
        """Send without waiting; `read_available` stores the reply at its place. Return whether the connection is open."""
        self.tell(command if isinstance(command, bytes) else self._pack(command), (boottime(), replies, place))
        return self.open

    def tell(self, data: bytes, pending: tuple[float, list[Any], int] | None = None) -> None:
        """Send bytes; with `pending`, the server will reply to them."""
        users = self._users
        try:
            users.append(None)  # inside the try: Ctrl-C may arrive right after it
            if self.open:
                if pending is not None:
                    self.owed.append(pending)
                self._send_all(data)
        except BaseException as error:
            self._shut_down()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()

    def _send_all(self, data: bytes) -> None:
        """Send all bytes; wait while the send buffer is full."""
        if (sent := self._send(data)) == len(data):
            return
        room = select.poll()
        room.register(self._sock.fileno(), select.POLLOUT)
        until = boottime() + SEND_SECONDS
        while sent < len(data):
            left = until - boottime()
            if left <= 0 or not room.poll(left * 1000):
                raise TimeoutError(f"the server has not read what it was sent for {SEND_SECONDS:g} s")
            sent += self._send(memoryview(data)[sent:])

    def _send(self, data: bytes | memoryview) -> int:
        """Send as many bytes as fit into the send buffer; return their number."""
        try:
            with self._tls_mutex:
                return int(self._sock.send(data))
        except (BlockingIOError, SSLWantWriteError):
            return 0

    def fileno(self) -> int:
        """Return the descriptor to poll; -1 once it is closed."""
        return int(self._sock.fileno())

    def has_buffered(self) -> bool:
        """Return whether TLS has decrypted data that a poll of the socket does not report."""
        if not self.tls or not self.open:
            return False
        with self._tls_mutex:
            return bool(self._sock.pending())

    def read_available(self, done: Callable[[], bool] | None = None, until: float = 0.0) -> None:
        """Read once, or until `done()` or the time `until`; store every reply at its place."""
        # A close() in another thread leaves the descriptor open until this poll ends: its number could be reused.
        users = self._users
        try:
            users.append(None)
            if done is not None:
                self._receive_until(done, until)
            elif self.open:
                self._receive()
        except BaseException as error:
            self._shut_down()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()

    def _receive_until(self, done: Callable[[], bool], until: float) -> None:
        """Poll and read until `done()`, the time `until`, or the end of the connection."""
        while self.open and not done():
            # Poll once more after the timeout: if the process was stopped meanwhile, the reply is there.
            left = until - boottime()
            if (self.tls and self.has_buffered()) or self._poll.poll(max(0.0, left) * 1000):
                self._receive()
            elif left <= 0:
                break

    def _receive(self) -> None:
        try:
            with self._tls_mutex:
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
            if self.owed:
                sent, replies, place = self.owed.popleft()
                self.pace = boottime() - sent
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
        """Read what is available, and return whether the server has not closed it. Late replies do not change `pace`."""
        pace = self.pace
        self.read_available(lambda: False)
        self.pace = pace
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
        if self._forgotten:
            raise Forked(FORKED)

    def _shut_down(self) -> None:
        if self.open:
            self.open = False
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._on_end()

    def forget(self) -> None:
        """Detach a forked child from its copy."""
        self.open, self._forgotten = False, True
        silence(self._sock)
        self._sock.close()


def request_all(
    asked: Sequence[tuple[SocketConnection, Command | bytes]], timeout: float, enough: Callable[[Sequence[Any]], bool]
) -> list[Any]:
    """Send to all, then read from all."""
    replies: list[Any] = [NO_REPLY] * len(asked)
    until = boottime() + timeout
    poll = select.poll()
    connections: dict[int, SocketConnection] = {}
    try:
        for place, (connection, command) in enumerate(asked):
            connection.retain()
            if connection.post(command, replies, place):
                descriptor = connection.fileno()
                connections[descriptor] = connection
                poll.register(descriptor, select.POLLIN)
        reads_ahead = any(connection.tls for connection in connections.values())
        while connections and not enough(replies):
            ready = (
                [descriptor for descriptor, connection in connections.items() if connection.has_buffered()]
                if reads_ahead
                else []
            )
            if not ready:
                # Poll once more after the timeout: if the process was stopped meanwhile, the replies are there.
                left = until - boottime()
                ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
                if not ready and left <= 0:
                    break
            for descriptor in ready:
                connection = connections[descriptor]
                connection.read_available()
                if not connection.owed or not connection.open:
                    poll.unregister(descriptor)
                    del connections[descriptor]
    finally:
        for connection, _ in asked:
            connection.end_retain()
    for connection, _ in asked:
        connection.check_forked()
    return replies


def open_stream(endpoint: Endpoint) -> socket.socket:
    """Open a socket, for engines without a driver that connects."""
    if endpoint.name.startswith("/"):
        return _open_unix(endpoint)
    sock = socket.create_connection((endpoint.name, endpoint.port), endpoint.seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.before_tls is not None:
            _send_preamble(sock, endpoint.before_tls)
        return sock if endpoint.tls is None else endpoint.tls.wrap_socket(sock, server_hostname=endpoint.name)
    except BaseException:
        sock.close()
        raise


def _open_unix(endpoint: Endpoint) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(endpoint.seconds)
        sock.connect(endpoint.name)
    except BaseException:
        sock.close()
        raise
    return sock


def _send_preamble(sock: socket.socket, before_tls: Callable[[bytes], bytes | None]) -> None:
    """Exchange what the protocol requires before TLS. The server then sends nothing until it gets this reply."""
    received = b""
    while (reply := before_tls(received)) is None:
        data = sock.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        received += data
    sock.sendall(reply)


def wait_for_push(
    connections: Sequence[SocketConnection], event: Event, timeout: float, wakeup_fd: int | None = None
) -> bool:
    """Read all connections until a push sets the event; end early if `wakeup_fd` becomes readable."""
    until = boottime() + timeout
    if len(connections) == 1 and wakeup_fd is None:
        (connection,) = connections
        connection.read_available(event.is_set, until)
        connection.check_forked()
        return event.is_set()
    while not event.is_set():
        left = until - boottime()
        if left <= 0:
            break
        ready = [connection for connection in connections if not connection.open or connection.has_buffered()]
        if not ready:
            poll = (
                select.poll()
            )  # a new one each time: a connection may be closed, and its number reused, at any moment
            for descriptor in (
                *(connection.fileno() for connection in connections),
                -1 if wakeup_fd is None else wakeup_fd,
            ):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            received = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            if wakeup_fd in received:
                break
            ready = [connection for connection in connections if connection.fileno() in received]
        for connection in ready:
            if connection.open:
                connection.read_available()
        if not all(connection.open for connection in connections):
            break
    for connection in connections:
        connection.check_forked()
    return event.is_set()
