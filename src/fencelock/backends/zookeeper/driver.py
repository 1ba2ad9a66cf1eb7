"""kazoo, as far as we use it: its connection, its requests, and its errors. All that we know of its inside is here.

kazoo keeps a connection, reconnects, and packs and unpacks messages, in one thread. What we do not let it do is to speak for
us: it would keep a session alive, by pings of its own, for a program that hangs. Requests go straight to its queue, and
answers come straight from its thread, without the two hops that its own results and callbacks take.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ssl import SSLContext, SSLWantReadError, SSLWantWriteError, create_default_context
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionDropped
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Create2
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from fencelock.backends.zookeeper.address import Address
from fencelock.backends.zookeeper.answers import Answer
from fencelock.core.inherited import silence
from fencelock.errors import EngineUnavailable

EPHEMERAL_SEQUENTIAL = 3
CONTAINER = 4
CHUNK = 65536
AT_ONCE = 64
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two rounds of connecting to all hosts."""

LOGGER = logging.getLogger("fencelock.kazoo")
"""Where kazoo logs: nothing, unless somebody sets the level; and no requests even then, as logins are among them."""
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.CRITICAL)
LOGGER.addFilter(lambda record: record.levelno >= logging.INFO)


class CreateContainer(Create2):  # type: ignore[misc]
    """Makes a node that ZooKeeper removes once it has had children and has none any more; kazoo lacks it."""

    type = 19


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's way to threads, without the two that it would have call us: its connection's own does."""

    def __init__(self, patience: float, tls: SSLContext | None) -> None:
        super().__init__()
        self._patience = patience
        self._tls = tls
        self.host = ""
        """Who is being connected to, by the name that a certificate has to have."""
        self.unread = bytearray()
        """What was read from the socket and not yet taken: a look for more would not show it."""

    def start(self) -> None:
        """There is nothing to start, and so nothing that an interpreter's exit has to wait for."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def dispatch_callback(self, callback: Any) -> None:
        """Call it right here."""
        callback.func(*callback.args)

    def select(self, readers: Sequence[Any], writers: Sequence[Any], _: Any, timeout: float) -> Any:
        """Wait as kazoo's own does, without an epoll descriptor for each time; its socket is always the first."""
        if readers and (self.unread or (self._tls is not None and getattr(readers[0], "pending", int)())):
            return readers[:1], [], []
        poll = select.poll()
        for sock in readers:
            poll.register(sock, select.POLLIN)
        for sock in writers:
            poll.register(sock, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(timeout * 1000)}
        return [s for s in readers if s.fileno() in ready], [s for s in writers if s.fileno() in ready], []

    def create_connection(self, address: tuple[str, int], timeout: float, **_: Any) -> socket.socket:
        """Connect; a host that is out of reach must not use up the time that is left for the others."""
        sock = socket.create_connection(address, min(timeout, self._patience))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


class Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which tells when it was made, and never pings. It takes what the socket has in one go."""

    def __init__(self, client: KazooClient, now: Callable[[], float], made: Callable[[float, float], None]) -> None:
        super().__init__(client, client._conn_retry.copy(), logger=client.logger)
        self._now = now
        self._made = made
        self._together: bytearray | None = None
        self.trouble = "it does not answer"
        """Why the last attempt to connect failed, for people."""

    def zk_loop(self) -> None:
        """Run, and give back the descriptors at the end."""
        try:
            super().zk_loop()
        finally:
            self.close()
            # Else the thread would be garbage in a cycle, collected anywhere: a Ctrl-C in that moment is lost to Python.
            self._connection_routine = None

    def clean_up(self) -> None:
        """Give back the descriptors if there is no thread that would: whoever was about to start it was interrupted."""
        thread: Any = self._connection_routine
        if thread is None and self.connection_stopped.is_set():
            self.close()

    def _connect(self, host: str, hostip: str, port: int) -> Any:
        begun = self._now()
        self.handler.host = host
        self.handler.unread.clear()
        try:
            read_timeout, connect_timeout = super()._connect(host, hostip, port)
        except Exception as error:
            self.trouble = f"{host}:{port}: {str(error) or type(error).__name__}"
            raise
        self._made(begun, round(read_timeout * 1.5) / 1000)
        return read_timeout, connect_timeout

    def _read(self, length: int, timeout: float) -> bytes:
        unread: bytearray = self.handler.unread
        while len(unread) < length:
            with self._socket_error_handling():
                try:
                    chunk = self._socket.recv(CHUNK)
                except (BlockingIOError, SSLWantReadError, SSLWantWriteError):
                    self._until([self._socket], [], timeout)
                    continue
            if not chunk:
                raise ConnectionDropped("the server closed the connection")
            unread += chunk
        message = bytes(unread[:length])
        del unread[:length]
        return message

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """Send all that was asked for by now in one go: a byte has come for each request."""
        called = len(self._read_sock.recv(AT_ONCE, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        self._together = together = bytearray()
        try:
            for _ in range(max(1, min(called, len(self.client._queue)))):
                super()._send_request(read_timeout, connect_timeout)
        finally:
            self._together = None
        if together:
            self._write(bytes(together), connect_timeout)

    def _write(self, message: bytes, timeout: float) -> None:
        if self._together is not None:
            self._together += message
            return
        left = memoryview(message)
        while left:
            with self._socket_error_handling():
                try:
                    left = left[self._socket.send(left) :]
                except (BlockingIOError, SSLWantReadError, SSLWantWriteError):
                    self._until([], [self._socket], timeout)

    def _until(self, readers: list[Any], writers: list[Any], timeout: float) -> None:
        kept, self.handler.unread = self.handler.unread, bytearray()
        try:
            if not any(self.handler.select(readers, writers, [], timeout)):
                raise self.handler.timeout_exception("the server does not answer")
        finally:
            self.handler.unread = kept

    def _send_ping(self, connect_timeout: float) -> None:  # noqa: ARG002
        """Say nothing: whether a session lives on is ours to decide. It is the moment to end what was given up."""
        if self.client._stopped.is_set():
            raise ConnectionDropped("given up")


def _context(address: Address) -> SSLContext:
    try:
        context = create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"{address.name}: the files for TLS are of no use: {error}") from error
    return context


class Driver:
    """One session of kazoo's. `made` is told when a connection was begun, and the seconds that were agreed on."""

    def __init__(
        self,
        address: Address,
        seconds: float,
        now: Callable[[], float],
        made: Callable[[float, float], None],
        changed: Callable[[str], object],
    ) -> None:
        self.acl = CREATOR_ALL_ACL if address.login is not None else OPEN_ACL_UNSAFE
        self._client = KazooClient(
            ",".join(address.hosts),
            seconds,
            handler=Handler(max(0.5, min(5.0, seconds / 6)), _context(address) if address.tls else None),
            auth_data=set() if address.login is None else {("digest", address.login)},
            connection_retry=KazooRetry(max_tries=-1, delay=FIRST_PAUSE, max_delay=LONGEST_PAUSE),
            logger=LOGGER,
        )
        self._connection = self._client._connection = Connection(self._client, now, made)
        self._client.add_listener(changed)

    @property
    def id(self) -> int | None:
        """The session's number, which nodes that live with it carry."""
        return self._client._session_id  # type: ignore[no-any-return]

    @property
    def last(self) -> int:
        """The latest number of a change that an answer came with."""
        return self._client.last_zxid  # type: ignore[no-any-return]

    @property
    def trouble(self) -> str:
        """Why it cannot connect."""
        return self._connection.trouble

    def start(self) -> None:
        """Begin to connect."""
        self._client.start_async()

    def post(self, *asked: tuple[Any, Answer]) -> None:
        """Send requests, after those before them; they stay in kazoo's queue while there is no connection.

        Not by way of kazoo's own function, which swallows whatever interrupts it, Ctrl-C too.
        """
        self._client._queue.extend(asked)
        self.nudge(len(asked))

    def nudge(self, times: int = 1) -> None:
        """Have kazoo's thread look at its queue: a byte for each request. One too many does no harm, one too few does."""
        sock = self._connection._write_sock
        if sock is not None:
            with suppress(OSError):
                sock.send(b"\0" * times)

    def reset(self) -> None:
        """Break the connection, so that kazoo makes a new one for the same session."""
        sock = self._connection._socket
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # past TLS, which is not made for two threads

    def end(self, tell: bool) -> None:
        """End the session, with a word to the server; or without: then it runs out there."""
        self._client._stopped.set()
        if tell:
            self.post((CloseInstance, Answer()))
        else:
            self.reset()
        self._connection.clean_up()

    def forget(self) -> None:
        """Let go of what a forked child inherited; kazoo's thread is not in the child."""
        for sock in (self._connection._socket, self._connection._read_sock, self._connection._write_sock):
            if sock is not None:
                silence(sock)
