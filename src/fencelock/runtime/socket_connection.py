"""Wires of the blocking world: plain sockets, read by whoever waits for an answer."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLWantReadError, SSLWantWriteError
from typing import Any

from fencelock.core.clock import boottime
from fencelock.core.fork import FORKED, Forked, silence
from fencelock.core.runtime import NO_REPLY, Command, Connector, Endpoint, Event, PushHandler
from fencelock.errors import OutcomeUnknown

CHUNK = 65536
SEND_SECONDS = 5.0
"""How long a server may leave us with full buffers before it counts as gone."""


class SocketConnection:
    """`fencelock.core.runtime.Wire` over a socket that never blocks: who waits for it does so in a poll."""

    __slots__ = (
        "_address",
        "_feed",
        "_forgotten",
        "_gets",
        "_held",
        "_on_end",
        "_on_push",
        "_pack",
        "_poll",
        "_pushes",
        "_sock",
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
        self._address = connector.address
        self._feed, self._gets, self._pack, self._pushes = parser.feed, parser.gets, connector.pack, connector.pushes
        self._on_push, self._on_end = on_push, on_end
        sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        # Who uses the descriptor at this moment, in whatever thread: the last of them closes it, if the wire was closed
        # meanwhile, as its number may belong to another file right after that. `fan` holds it; everybody else is in the list,
        # which grows and shrinks in one step.
        self._held = False
        self._users: list[None] = []
        self._forgotten = False
        self.owed: deque[tuple[float, list[Any], int]] = deque()
        self.open = True
        self.pace = 0.0

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest command that is not answered yet was sent."""
        return self.owed[0][0] if self.owed else None

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and read until the answer is there."""
        data = command if isinstance(command, bytes) else self._pack(command)
        answers: list[Any] = [NO_REPLY]
        users = self._users
        try:
            users.append(None)  # in here: the next interrupt may come right after it
            if self.open:
                sent = boottime()
                self.owed.append((sent, answers, 0))
                self._send_all(data)
                self._receive_until(lambda: answers[0] is not NO_REPLY, sent + timeout)
        except BaseException as error:
            # Whatever it was, an interrupt even: bytes may have been lost on the way from the socket to the parser.
            self._broken()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()
        if answers[0] is NO_REPLY:
            self.check_forked()
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._address}: {why}")
        return answers[0]

    def post(self, command: Command | bytes, answers: list[Any], place: int) -> bool:
        """Send, and leave it to `take_in` to put the answer in its place; return whether one may come."""
        self.tell(command if isinstance(command, bytes) else self._pack(command), (boottime(), answers, place))
        return self.open

    def tell(self, data: bytes, debt: tuple[float, list[Any], int] | None = None) -> None:
        """Send bytes as they are; the server owes an answer for them, if there is a debt."""
        users = self._users
        try:
            users.append(None)  # in here: the next interrupt may come right after it
            if self.open:
                if debt is not None:
                    self.owed.append(debt)
                self._send_all(data)
        except BaseException as error:
            self._broken()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()

    def _send_all(self, data: bytes) -> None:
        """Send it all, and wait until there is room for what does not fit."""
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
        """Send as much as there is room for; return how much that was."""
        try:
            return int(self._sock.send(data))
        except (BlockingIOError, SSLWantWriteError):
            return 0

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 once it is closed."""
        return int(self._sock.fileno())

    def has_more(self) -> bool:
        """Return whether there is something to read that no poll would show: TLS reads ahead."""
        return self.tls and self.open and bool(self._sock.pending())

    def take_in(self, done: Callable[[], bool] | None = None, until: float = 0.0) -> None:
        """Read once, or until that is done or the time is over; put every answer in its place."""
        # Whoever closes it meanwhile leaves the descriptor to us: its number could be another's before we wait for it.
        users = self._users
        try:
            users.append(None)
            if done is not None:
                self._receive_until(done, until)
            elif self.open:
                self._receive()
        except BaseException as error:
            self._broken()
            if not isinstance(error, OSError | ValueError):
                raise
        finally:
            users.pop()
            if not self.open:
                self._release()

    def _receive_until(self, done: Callable[[], bool], until: float) -> None:
        while self.open and not done():
            # Once more at the end: if the process was stopped meanwhile, the answer is there.
            left = until - boottime()
            if (self.tls and self._sock.pending()) or self._poll.poll(max(0.0, left) * 1000):
                self._receive()
            elif left <= 0:
                break

    def _receive(self) -> None:
        try:
            data = self._sock.recv(CHUNK)
        except (BlockingIOError, SSLWantReadError):
            return
        if not data:
            self._broken()
            return
        self._feed(data)
        while (answer := self._gets()) is not NO_REPLY:
            if isinstance(answer, self._pushes) and not self._on_push(answer):
                continue
            if self.owed:
                sent, answers, place = self.owed.popleft()
                self.pace = boottime() - sent
                answers[place] = answer

    def hold(self) -> None:
        """Keep the descriptor ours until `let_go`: whoever closes the wire meanwhile leaves that to us."""
        self._held = True

    def let_go(self) -> None:
        """End it."""
        self._held = False
        if not self.open:
            self._release()

    def alive(self) -> bool:
        """Look whether the server has hung up meanwhile, and take in what nobody has read: that says nothing of its pace."""
        pace = self.pace
        self.take_in(lambda: False)
        self.pace = pace
        return self.open

    def close(self) -> None:
        """Close it. Whoever reads from it in another thread is woken, and is the one to give back the descriptor."""
        self._broken()
        self._release()

    def _release(self) -> None:
        """Give back the descriptor of a wire that is closed, unless somebody still uses it."""
        if not self._held and not self._users:
            self._sock.close()

    def check_forked(self) -> None:
        """Raise Forked if whoever waits here was forked meanwhile."""
        if self._forgotten:
            raise Forked(FORKED)

    def _broken(self) -> None:
        if self.open:
            self.open = False
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._on_end()

    def forget(self) -> None:
        """Let go of our copy."""
        self.open, self._forgotten = False, True
        silence(self._sock)
        self._sock.close()


def request_all(
    asked: Sequence[tuple[SocketConnection, Command | bytes]], timeout: float, enough: Callable[[Sequence[Any]], bool]
) -> list[Any]:
    """Send to all, then read from all."""
    answers: list[Any] = [NO_REPLY] * len(asked)
    until = boottime() + timeout
    poll = select.poll()
    connections: dict[int, SocketConnection] = {}
    try:
        for place, (connection, command) in enumerate(asked):
            connection.hold()
            if connection.post(command, answers, place):
                descriptor = connection.fileno()
                connections[descriptor] = connection
                poll.register(descriptor, select.POLLIN)
        reads_ahead = any(connection.tls for connection in connections.values())
        while connections and not enough(answers):
            ready = (
                [descriptor for descriptor, connection in connections.items() if connection.has_more()]
                if reads_ahead
                else []
            )
            if not ready:
                # Once more at the end: if the process was stopped meanwhile, the answers are there.
                left = until - boottime()
                ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
                if not ready and left <= 0:
                    break
            for descriptor in ready:
                connection = connections[descriptor]
                connection.take_in()
                if not connection.owed or not connection.open:
                    poll.unregister(descriptor)
                    del connections[descriptor]
    finally:
        for connection, _ in asked:
            connection.let_go()
    for connection, _ in asked:
        connection.check_forked()
    return answers


def open_stream(host: Endpoint) -> socket.socket:
    """Connect to a server that no driver connects to."""
    if host.name.startswith("/"):
        return _reach_local(host)
    sock = socket.create_connection((host.name, host.port), host.seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if host.before_tls is not None:
            _greet(sock, host.before_tls)
        return sock if host.tls is None else host.tls.wrap_socket(sock, server_hostname=host.name)
    except BaseException:
        sock.close()
        raise


def _reach_local(host: Endpoint) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(host.seconds)
        sock.connect(host.name)
    except BaseException:
        sock.close()
        raise
    return sock


def _greet(sock: socket.socket, before_tls: Callable[[bytes], bytes | None]) -> None:
    """Say what comes before TLS; the server says no more until it is answered."""
    heard = b""
    while (answer := before_tls(heard)) is None:
        data = sock.recv(CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        heard += data
    sock.sendall(answer)


def wait_for_push(
    connections: Sequence[SocketConnection], bell: Event, timeout: float, besides: int | None = None
) -> bool:
    """Read from all until what is pushed sets the bell; end early if there is something to read `besides`."""
    until = boottime() + timeout
    if len(connections) == 1 and besides is None:
        (connection,) = connections
        connection.take_in(bell.is_set, until)
        connection.check_forked()
        return bell.is_set()
    while not bell.is_set():
        left = until - boottime()
        if left <= 0:
            break
        ready = [connection for connection in connections if not connection.open or connection.has_more()]
        if not ready:
            poll = select.poll()  # anew each time: a wire may be closed, and its number given to another, at any moment
            for descriptor in (
                *(connection.fileno() for connection in connections),
                -1 if besides is None else besides,
            ):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            heard = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            if besides in heard:
                break
            ready = [connection for connection in connections if connection.fileno() in heard]
        for connection in ready:
            if connection.open:
                connection.take_in()
        if not all(connection.open for connection in connections):
            break
    for connection in connections:
        connection.check_forked()
    return bell.is_set()
