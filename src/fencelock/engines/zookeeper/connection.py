"""kazoo's connection, as far as we let it: it connects, logs in, and knows the messages. It never pings.

Its thread sends what could not be sent at once, and reads while nobody waits (`turns.py`). What is read is delivered right
there, without the two hops that kazoo's own results and callbacks take.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from ssl import SSLContext
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped, NoNodeError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import CLOSE_RESPONSE, DELETED_EVENT, WATCH_XID, ConnectionHandler
from kazoo.protocol.serialization import Close, Exists

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.engines.zookeeper.line import CHUNK, NOT_NOW, Asked, Line
from fencelock.engines.zookeeper.messages import HEAD, MALFORMED, error_of, fired
from fencelock.engines.zookeeper.turns import Turns

MALFORMED_MESSAGE = "the server sent a message that cannot be read"
AT_ONCE = 64
PATIENCE = 0.05
"""Seconds after which kazoo's thread looks whether it waits for a mutex in vain."""


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's way to threads, without the two that it would have call us: its connection's own does."""

    def __init__(self, patience: float, tls: SSLContext | None) -> None:
        super().__init__()
        self._patience = patience
        self._tls = tls
        self.host = ""
        """Who is being connected to, by the name that a certificate has to have."""
        self.rest: Callable[[], float] = lambda: 0.0
        """For how long others read: kazoo's thread then only listens to who calls it."""
        self.take_over: Callable[[], None] = lambda: None
        """Called when they have not read what was there."""

    def start(self) -> None:
        """There is nothing to start, and so nothing that an interpreter's exit has to wait for."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def dispatch_callback(self, callback: Any) -> None:
        """Call it right here."""
        callback.func(*callback.args)

    def select(self, readers: Sequence[Any], writers: Sequence[Any], _: Any, timeout: float) -> Any:
        """Wait as kazoo's own does, without an epoll descriptor for each time. Its loop listens to line and callers."""
        rest = self.rest() if len(readers) > 1 else 0.0
        if rest <= 0:
            return self._poll(readers, writers, timeout)
        found = self._poll(readers[1:], writers, min(rest, timeout))
        if not any(found) and any(found := self._poll(readers[:1], [], 0.0)):
            self.take_over()
        return found

    def _poll(self, readers: Sequence[Any], writers: Sequence[Any], timeout: float) -> Any:
        poll = select.poll()
        for sock in readers:
            poll.register(sock, select.POLLIN)
        for sock in writers:
            poll.register(sock, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(timeout * 1000)}
        return [s for s in readers if s.fileno() in ready], [s for s in writers if s.fileno() in ready], []

    def create_connection(self, address: tuple[str, int], timeout: float, **_: Any) -> Line:
        """Connect; a host that is out of reach must not use up the time that is left for the others."""
        sock = socket.create_connection(address, min(timeout, self._patience))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self.host)
            return Line(sock, self._tls is not None)
        except BaseException:
            sock.close()
            raise


class Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which tells when it was made, and of nodes that change: their path, and whether they are gone."""

    def __init__(
        self,
        client: KazooClient,
        now: Callable[[], float],
        made: Callable[[float, float], None],
        fired: Callable[[str, bool], None],
    ) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=client.logger)
        self._now = now
        self._made = made
        self._fired = fired
        self._last: Any = None
        """What kazoo's loop has to be told of the last message: that the session is closed."""
        self.turns = Turns(now, self.read, self.nudge)
        self.handler.rest, self.handler.take_over = self._rest, self.turns.take_over
        self.trouble = "it does not answer"
        """Why the last attempt to connect failed, for people."""

    # ------------------------------------------------------------------ any thread

    def post(self, *asked: Asked) -> None:
        """Send requests, after those before them; they stay in kazoo's queue while there is no connection.

        Not by way of kazoo's own function, which swallows whatever interrupts it, Ctrl-C too.
        """
        line, queue = self.turns.line, self.client._queue
        if line is None or queue or not line.shared or not line.send(*asked):
            queue.extend(asked)
            self.nudge()
        elif line.unsent or line.dead:
            self.nudge()

    def nudge(self) -> None:
        """Have kazoo's thread look at its queue, and at its line. Once too often does no harm."""
        sock = self._write_sock
        if sock is not None:
            try:
                sock.send(b"\0", socket.MSG_DONTWAIT)
            except OSError:
                pass  # closed; or full, so that it is heard in any case

    def read(self, line: Line) -> None:
        """Read what is there."""
        try:
            line.take_in(self._deliver)
        finally:
            if line.dead or self._last is not None:
                self.nudge()

    def _deliver(self, line: Line, message: bytes) -> None:
        """Deliver a message. One that cannot be read ends the connection: nobody knows what became of what was asked."""
        try:
            number, zxid, error = HEAD.unpack_from(message)
            kind, path = fired(message) if number == WATCH_XID else (0, "")
        except MALFORMED as problem:
            raise ConnectionResetError(MALFORMED_MESSAGE) from problem
        if number == WATCH_XID:
            self._fired(path, kind == DELETED_EVENT)
        elif number > 0:
            if not line.pending or line.pending[0][2] != number:
                raise ConnectionResetError("the server answered what was not asked")
            # It stays in line until it is answered: whatever interrupts this, it is told.
            request, answer, _ = line.pending[0]
            if zxid > 0:
                self.client.last_zxid = zxid
            if request.type == Close.type:
                self._last = CLOSE_RESPONSE
            elif error:
                absent = error == NoNodeError.code and request.type == Exists.type
                answer.set(None) if absent else answer.set_exception(error_of(error))
            else:
                try:
                    value = request.deserialize(message, HEAD.size)
                except MALFORMED as problem:
                    raise ConnectionResetError(MALFORMED_MESSAGE) from problem
                answer.set(value)
            line.pending.popleft()

    # ------------------------------------------------------------------ kazoo's thread

    def zk_loop(self) -> None:
        """Run, and give back the descriptors at the end."""
        try:
            super().zk_loop()
        finally:
            self.turns.line = self.turns.ear = self.turns.mouth = None
            self.close()
            # Else the thread would be garbage in a cycle, collected anywhere: a Ctrl-C in that moment is lost to Python.
            self._connection_routine = None

    def clean_up(self) -> None:
        """Give back the descriptors if there is no thread that would: whoever was about to start it was interrupted."""
        thread: Any = self._connection_routine
        if thread is None and self.connection_stopped.is_set():
            self.close()

    def _rest(self) -> float:
        line = self.turns.line
        return 0.0 if line is None or line.dead or self.client._stopped.is_set() else self.turns.rest()

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        begun = self._now()
        self.handler.host = host
        self._last = None
        try:
            read_timeout, connect_timeout = super()._connect(host, hostip, port)
        except Exception as error:
            self.trouble = f"{host}:{port}: {str(error) or type(error).__name__}"
            raise
        self.client._pending = self._socket.pending
        seconds = round(read_timeout * 1.5) / 1000
        # The ends of kazoo's pair of sockets the other way round, which wakes this thread.
        self.turns.begin(self._socket, self._write_sock, self._read_sock, seconds)
        self._made(begun, seconds)
        return read_timeout, connect_timeout

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        """Ask while logging in. kazoo would wait for a whole session, where the next attempt may well be answered."""
        return super()._invoke(min(timeout, MAX_REPLY_TIMEOUT), request, xid)

    def _read(self, length: int, timeout: float) -> bytes:
        """Wait for so many bytes, while logging in."""
        line = self._socket
        while len(line.unread) < length:
            with self._socket_error_handling():
                try:
                    chunk = line.sock.recv(CHUNK)
                except NOT_NOW:
                    self._until([line], [], timeout)
                    continue
            if not chunk:
                raise ConnectionDropped("the server closed the connection")
            line.unread += chunk
        message = bytes(line.unread[:length])
        del line.unread[:length]
        return message

    def _write(self, message: bytes, timeout: float) -> None:
        """Send these bytes, while logging in."""
        line = self._socket
        line.unsent += message
        while True:
            line.flush()
            if line.dead:
                raise ConnectionDropped("the connection broke")
            if not line.unsent:
                return
            self._until([], [line], timeout)

    def _until(self, readers: list[Any], writers: list[Any], timeout: float) -> None:
        if not any(self.handler.select(readers, writers, [], timeout)):
            self._drop()
            raise self.handler.timeout_exception("the server does not answer")

    def _read_socket(self, read_timeout: float) -> Any:  # noqa: ARG002
        if self._have(self._socket):
            try:
                self.read(self._socket)
            finally:
                self._socket.mutex.release()
        return self._look()

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:  # noqa: ARG002
        """Send what could not be sent at once, or was asked for while there was no connection."""
        self._read_sock.recv(AT_ONCE)
        line, queue = self._socket, self.client._queue
        while self._look() is None and (queue or line.unsent):
            if self._have(line):
                try:
                    line.add(tuple(queue.popleft() for _ in range(len(queue))))
                    line.flush()
                finally:
                    line.mutex.release()
                if line.unsent:
                    self._until([], [line], connect_timeout)

    def _send_ping(self, connect_timeout: float) -> None:  # noqa: ARG002
        """Say nothing: whether a session lives on is ours to decide. It is the moment to end what was given up."""
        if self.client._stopped.is_set():
            self._drop()
        self._look()

    def _look(self) -> Any:
        """Return what kazoo's loop has to be told; raise if the line is dead."""
        if self._last is None and not self._socket.dead:
            return None
        self._drop()
        if self._last is None:
            raise ConnectionDropped("the connection broke, or was given up")
        return self._last

    def _drop(self) -> None:
        """See to it that nobody is at the line any more: what was asked over it is about to be told that nobody knows."""
        self._socket.kill()
        if self._have(self._socket):
            self._socket.mutex.release()
        self.turns.wake()

    def _have(self, line: Line) -> bool:
        """Wait for the mutex; in vain if its thread was interrupted by something that waits for us."""
        while not line.mutex.acquire(timeout=PATIENCE):
            if line.deserted:
                line.kill()
                return False
        return True
