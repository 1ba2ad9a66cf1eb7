"""One connection of a session: the handshake, requests and their replies in order, and watch events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock, get_ident
from typing import Any

from kazoo.exceptions import ConnectionLoss, NoNodeError
from kazoo.protocol.serialization import Auth, Connect, Exists, Watch, reply_header_struct

from fencelock.core.runtime import Connection, Endpoint, Runtime
from fencelock.core.stream_connector import StreamConnector
from fencelock.engines.zookeeper import protocol
from fencelock.engines.zookeeper.protocol import FrameParser, Malformed, Reply, decode, frame

MAX_XID = 2**31 - 1

Requests = Sequence[tuple[Any, Reply]]


class ZooKeeperConnection:
    """A connection to one member. One thread reads it (`read`); any thread sends.

    `on_ready` gets the server's handshake after the login; `on_event` gets a node's path and whether it was deleted.
    """

    def __init__(
        self, login: str | None, on_ready: Callable[[Any], None], on_event: Callable[[str, bool], None]
    ) -> None:
        self.problem = "no reply to the handshake"
        """Why the connection failed, for messages."""
        self.zxid = 0
        """The ensemble's latest transaction number that a reply had."""
        self._login = login
        self._on_ready = on_ready
        self._on_event = on_event
        self._handshake: Any = None
        self._pending: deque[tuple[int, Any, Reply]] = deque()
        self._xid = 0
        self._mutex = RLock()
        self._sender = 0
        self._connection: Connection

    async def open(self, runtime: Runtime, endpoint: Endpoint, handshake: Connect) -> None:
        """Connect and send the handshake; raise EngineUnavailable. `read` does the rest."""
        self._runtime = runtime
        self._ended = runtime.event()
        connector = StreamConnector("ZooKeeper", endpoint, FrameParser)
        self._connection = await runtime.connect(connector, self._received, self._ended.set)
        self._connection.send(frame(handshake, None))

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it."""
        return self._connection.open

    @property
    def is_interrupted(self) -> bool:
        """Whether the caller is a signal handler that interrupted its own thread while it sent here: close it then."""
        return self._sender == get_ident()

    async def read(self, timeout: float) -> None:
        """Read until the connection ends, for `timeout` seconds at most."""
        await self._runtime.wait_for_push([self._connection], self._ended, timeout)

    def send(self, requests: Requests) -> None:
        """Send requests back to back; replies come in the same order. On a closed connection they have no outcome."""
        with self._mutex:  # an RLock, so that a signal handler cannot deadlock with the send that it interrupted
            if self.is_interrupted:
                self.close()
            self._sender = get_ident()
            try:
                frames = []
                for request, reply in requests:
                    self._xid = self._xid % MAX_XID + 1
                    frames.append(frame(request, self._xid))
                    self._pending.append((self._xid, request, reply))
                self._connection.send(b"".join(frames))
            except BaseException:
                self.close()  # part of a frame may be sent
                raise
            finally:
                self._sender = 0
                if not self._connection.open:
                    self.fail_pending()

    def _received(self, message: bytes) -> None:
        if self._handshake is None:
            self._handshake = decode(Connect.deserialize, message, 0)[0]
            if self._login is None or self._handshake.time_out <= 0:
                self._on_ready(self._handshake)
            else:
                self._connection.send(frame(Auth(0, "digest", self._login), protocol.AUTH_XID))
            return
        xid, zxid, error = decode(reply_header_struct.unpack_from, message, 0)
        if zxid > 0:
            self.zxid = zxid
        if xid == protocol.WATCH_XID:
            event, _ = decode(Watch.deserialize, message)
            self._on_event(event.path, event.type == protocol.DELETED)
        elif xid == protocol.AUTH_XID:
            if error:
                self.problem = str(protocol.translate(protocol.error_of(error)))
                self._connection.close()
            else:
                self._on_ready(self._handshake)
        else:
            self._resolve(xid, error, message)

    def _resolve(self, xid: int, error: int, message: bytes) -> None:
        try:
            expected, request, reply = self._pending.popleft()
        except IndexError:
            raise Malformed("a reply without a request") from None
        try:
            if expected != xid:
                raise Malformed("a reply to another request")
            if error == NoNodeError.code and request.type == Exists.type:
                reply.resolve(None)
            elif error:
                reply.resolve(error=protocol.error_of(error))
            else:
                reply.resolve(decode(request.deserialize, message))
        finally:
            reply.resolve(error=ConnectionLoss())  # for a reply that cannot be decoded

    def fail_pending(self) -> None:
        """End all requests without a reply: their outcome is unknown."""
        while self._pending:
            try:
                _, _, reply = self._pending.popleft()
            except IndexError:
                return
            reply.resolve(error=ConnectionLoss())

    def close(self) -> None:
        """Close it; any thread may do that. The reading thread is woken."""
        self._connection.close()

    def detach_after_fork(self) -> None:
        """Drop it in a forked child, without sending anything."""
        self._connection.detach_after_fork()
