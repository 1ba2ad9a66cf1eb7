"""Connections of the asyncio runtime: a protocol that gives each reply to the task that awaits it, without streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

from fencelock.core.clock import boottime
from fencelock.core.fork import detach_after_fork
from fencelock.core.runtime import NO_REPLY, Command, Connector, Endpoint, PushHandler
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.asyncio_events import resolve

if TYPE_CHECKING:
    from ssl import SSLContext

CHECK_INTERVAL = 0.05
"""Seconds between checks of a connection with pending requests: which have timed out, and whether the loop still reads."""
CLOCK_DIFFERENCE = 0.001
"""Seconds by which a loop's timer may fire too early by our clock."""

_detached: list[object] = []
"""Transports of a parent process, kept for ever: their finalizers would use the parent's loop and server."""


class AsyncioConnection(asyncio.Protocol):
    """`fencelock.core.runtime.Connection` over a transport; any number of tasks share it."""

    def __init__(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> None:
        parser = connector.parser()
        self._loop = asyncio.get_running_loop()
        self._address = connector.address
        self._feed, self._gets, self._pack, self._pushes = parser.feed, parser.gets, connector.pack, connector.pushes
        self._on_push, self._on_end = on_push, on_end
        self.pending: deque[tuple[float, float, asyncio.Future[Any]]] = deque()
        self._ended = False
        self._last_read = 0.0
        self._checking = False
        self.last_latency = 0.0
        self._kept: object = None

    @classmethod
    async def connect(cls, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> AsyncioConnection:
        """Connect, and take the transport over from the driver."""
        task = asyncio.current_task()
        cancelled = 0 if task is None else task.cancelling()
        transport, kept = await connector.aconnect(open_stream)
        if task is not None and task.cancelling() > cancelled:
            # Before Python 3.12 `asyncio.wait_for`, which drivers use, swallows a cancellation that comes with its result.
            transport.abort()
            raise asyncio.CancelledError
        connection = cls(connector, on_push, on_end)
        connection._transport, connection._kept = cast("asyncio.Transport", transport), kept
        connection._transport.set_protocol(connection)
        if connection._transport.is_closing():
            connection._end(None)
        elif not connection._transport.is_reading():
            connection._transport.resume_reading()
        return connection

    _transport: asyncio.Transport

    @property
    def open(self) -> bool:
        """Whether it can be used. Connections of a closed loop cannot."""
        return not self._ended and not self._transport.is_closing() and not self._loop.is_closed()

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest pending command was sent. Time in which the loop did not read does not count."""
        return boottime() - max(0.0, self._last_read - self.pending[0][0]) if self.pending else None

    def _check_repeatedly(self) -> None:
        self._expire_pending()
        self._checking = bool(self.pending) and not self._ended
        if self._checking:
            self._loop.call_later(CHECK_INTERVAL, self._check_repeatedly)

    def _expire_pending(self) -> None:
        """Record that all data so far is read, as a loop reads before it runs its timers; end requests that are too late."""
        self._last_read = now = boottime()
        for _, until, reply in self.pending:
            if now >= until:
                resolve(reply, NO_REPLY)

    def alive(self) -> bool:
        """Return `open`: the loop reports the end of a connection without a request."""
        return self.open

    def post(self, command: Command | bytes, timeout: float = inf) -> asyncio.Future[Any]:
        """Send, and return a future of the reply; it becomes NO_REPLY after the timeout.

        One timer serves all requests: a timer for each would cost more than the rest of this method.
        """
        reply: asyncio.Future[Any] = self._loop.create_future()
        if self.open:
            now = boottime()
            self.pending.append((now, now + timeout, reply))
            self._transport.write(command if isinstance(command, bytes) else self._pack(command))
            if not self._checking:
                self._checking = True
                self._loop.call_later(CHECK_INTERVAL, self._check_repeatedly)
            if timeout < CHECK_INTERVAL:
                self._loop.call_later(timeout + CLOCK_DIFFERENCE, self._expire_pending)
        else:
            reply.set_result(NO_REPLY)
        return reply

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and await the reply."""
        found = await self.post(command, timeout)
        if found is NO_REPLY:
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._address}: {why}")
        return found

    def send(self, data: bytes) -> None:
        """Send bytes without expecting a reply; the loop reports a broken connection."""
        if self.open:
            self._transport.write(data)

    def close(self) -> None:
        """Close it; pending requests end without a reply."""
        if self._loop.is_closed():
            self._close_after_loop()
        else:
            self._transport.abort()
        self._end(None)

    def detach_after_fork(self) -> None:
        """Detach a forked child from its copy, and keep the transport so that Python never finalizes it."""
        self._ended = True
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            detach_after_fork(sock)
        _detached.append((self._transport, self._kept))

    def _close_after_loop(self) -> None:
        """Close the socket of a closed loop: the transport cannot, and would log an error."""
        if type(self._transport).__name__ != "_SelectorSocketTransport":
            self.detach_after_fork()
            return
        transport: Any = self._transport
        transport._closing, sock, transport._sock = True, transport._sock, None
        if sock is not None:
            sock.close()

    # ------------------------------------------------------------------ asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """Give each reply to the task that awaits it, and each push to `on_push`."""
        try:
            self._feed(data)
            while (reply := self._gets()) is not NO_REPLY:
                if isinstance(reply, self._pushes) and not self._on_push(reply):
                    continue
                if self.pending:
                    sent, _, waiter = self.pending.popleft()
                    self.last_latency = boottime() - sent
                    resolve(waiter, reply)
        except ValueError:  # not this protocol
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all pending requests."""
        self._end(exc)

    def _end(self, _: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        if not self._loop.is_closed():
            while self.pending:
                resolve(self.pending.popleft()[2], NO_REPLY)
        self._on_end()


class _PausedProtocol(asyncio.Protocol):
    """Does not read: the server's first bytes are for the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).pause_reading()


class _PreambleReader(asyncio.Protocol):
    """Reads what the server sends before TLS."""

    def __init__(self, before_tls: Callable[[bytes], bytes | None]) -> None:
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._before_tls = before_tls
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            if not self.reply.done() and (reply := self._before_tls(self._received)) is not None:
                self.reply.set_result(reply)
        except Exception as error:
            self.reply.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_exception(exc or ConnectionResetError("the server closed the connection"))


async def open_stream(endpoint: Endpoint) -> asyncio.BaseTransport:
    """Open a transport, for engines without a driver that connects."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(endpoint.seconds):
        if endpoint.before_tls is not None and endpoint.tls is not None:
            return await _open_with_preamble(loop, endpoint, endpoint.before_tls, endpoint.tls)
        if endpoint.name.startswith("/"):
            return (await loop.create_unix_connection(_PausedProtocol, endpoint.name))[0]
        transport, _ = await loop.create_connection(_PausedProtocol, endpoint.name, endpoint.port, ssl=endpoint.tls)
    return transport


async def _open_with_preamble(
    loop: asyncio.AbstractEventLoop, endpoint: Endpoint, before_tls: Callable[[bytes], bytes | None], tls: SSLContext
) -> asyncio.BaseTransport:
    """Connect, send what the protocol requires before TLS, and start TLS."""
    transport, reader = await loop.create_connection(lambda: _PreambleReader(before_tls), endpoint.name, endpoint.port)
    try:
        transport.write(await reader.reply)
        encrypted = await loop.start_tls(transport, _PausedProtocol(), tls, server_hostname=endpoint.name)
    except BaseException:
        transport.abort()
        if reader.reply.done() and not reader.reply.cancelled():
            reader.reply.exception()
        raise
    assert encrypted is not None
    encrypted.pause_reading()
    return encrypted


async def request_all(
    requests: Sequence[tuple[AsyncioConnection, Command | bytes]],
    timeout: float,
    enough: Callable[[Sequence[Any]], bool],
) -> list[Any]:
    """Send to all, then await all."""
    loop = asyncio.get_running_loop()
    replies: list[Any] = [NO_REPLY] * len(requests)
    done: asyncio.Future[None] = loop.create_future()
    left = len(requests)

    def take(place: int, reply: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not reply.cancelled():
            replies[place] = reply.result()
        if not done.done() and (not left or enough(replies)):
            done.set_result(None)

    for place, (connection, command) in enumerate(requests):
        connection.post(command).add_done_callback(lambda reply, place=place: take(place, reply))  # type: ignore[misc]
    timer = loop.call_later(timeout, resolve, done, None)
    try:
        if requests and not enough(replies):
            await done
            if left and not enough(replies):
                for connection, _ in requests:
                    connection._last_read = boottime()  # a loop reads before it runs its timers
    finally:
        timer.cancel()
    return list(replies)
