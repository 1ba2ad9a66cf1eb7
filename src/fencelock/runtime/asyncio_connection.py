"""Wires of the asyncio world: transports whose answers go straight to whoever awaits them, without streams between."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, cast

from fencelock.core.clock import boottime
from fencelock.core.fork import silence
from fencelock.core.runtime import NO_REPLY, Command, Connector, Endpoint, PushHandler
from fencelock.errors import OutcomeUnknown

if TYPE_CHECKING:
    from ssl import SSLContext

LOOK_SECONDS = 0.05
"""How often a wire that is owed answers notes that its loop still reads, and who has waited long enough."""
CLOCKS_APART = 0.001
"""Seconds by which a loop's clock may be early of ours."""

_forgotten: list[object] = []
"""Transports of a parent process: their own clean-up would speak to the parent's loop and server."""


class AsyncioConnection(asyncio.Protocol):
    """`fencelock.core.runtime.Wire` over a transport that any number of tasks share."""

    def __init__(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> None:
        parser = connector.parser()
        self._loop = asyncio.get_running_loop()
        self._address = connector.address
        self._feed, self._gets, self._pack, self._pushes = parser.feed, parser.gets, connector.pack, connector.pushes
        self._on_push, self._on_end = on_push, on_end
        self.owed: deque[tuple[float, float, asyncio.Future[Any]]] = deque()
        self._ended = False
        self._looked = 0.0
        self._looking = False
        self.pace = 0.0
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
        """Whether it can be used; a loop that was closed takes its wires with it."""
        return not self._ended and not self._transport.is_closing() and not self._loop.is_closed()

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest command that is not answered yet was sent; time in which the loop did not read does not count."""
        return boottime() - max(0.0, self._looked - self.owed[0][0]) if self.owed else None

    def _look_again(self) -> None:
        self._look()
        self._looking = bool(self.owed) and not self._ended
        if self._looking:
            self._loop.call_later(LOOK_SECONDS, self._look_again)

    def _look(self) -> None:
        """Note that whatever came until now is read, as a loop reads before it looks at its timers; give up what is late."""
        self._looked = now = boottime()
        for _, until, answer in self.owed:
            if now >= until:
                _give_up(answer)

    def alive(self) -> bool:
        """The loop tells of the end by itself."""
        return self.open

    def post(self, command: Command | bytes, timeout: float = inf) -> asyncio.Future[Any]:
        """Send, and return the answer to come; NO_ANSWER if it does not, for so long.

        One timer looks after all: a timer for each would cost more than the rest of this.
        """
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.open:
            now = boottime()
            self.owed.append((now, now + timeout, answer))
            self._transport.write(command if isinstance(command, bytes) else self._pack(command))
            if not self._looking:
                self._looking = True
                self._loop.call_later(LOOK_SECONDS, self._look_again)
            if timeout < LOOK_SECONDS:
                self._loop.call_later(timeout + CLOCKS_APART, self._look)
        else:
            answer.set_result(NO_REPLY)
        return answer

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and await the answer."""
        found = await self.post(command, timeout)
        if found is NO_REPLY:
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._address}: {why}")
        return found

    def tell(self, data: bytes) -> None:
        """Send bytes as they are; the loop tells if that breaks."""
        if self.open:
            self._transport.write(data)

    def close(self) -> None:
        """Close it; whoever awaits an answer gets none."""
        if self._loop.is_closed():
            self._bury()
        else:
            self._transport.abort()
        self._end(None)

    def forget(self) -> None:
        """Let go of our copy, and never let Python clean it up."""
        self._ended = True
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            silence(sock)
        _forgotten.append((self._transport, self._kept))

    def _bury(self) -> None:
        """Close what a closed loop left open: it has no way for that any more, and would only complain."""
        if type(self._transport).__name__ != "_SelectorSocketTransport":
            self.forget()
            return
        transport: Any = self._transport
        transport._closing, sock, transport._sock = True, transport._sock, None
        if sock is not None:
            sock.close()

    # ------------------------------------------------------------------ asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        """Give every answer to whoever awaits it."""
        try:
            self._feed(data)
            while (answer := self._gets()) is not NO_REPLY:
                if isinstance(answer, self._pushes) and not self._on_push(answer):
                    continue
                if self.owed:
                    sent, _, waiter = self.owed.popleft()
                    self.pace = boottime() - sent
                    if not waiter.done():
                        waiter.set_result(answer)
        except ValueError:  # not what a server of this kind says
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all who wait."""
        self._end(exc)

    def _end(self, _: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        if not self._loop.is_closed():
            while self.owed:
                _give_up(self.owed.popleft()[2])
        self._on_end()


class _Unread(asyncio.Protocol):
    """Leaves what a server says first to the wire."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).pause_reading()


class _Greeter(asyncio.Protocol):
    """Takes in what a server says before TLS."""

    def __init__(self, before_tls: Callable[[bytes], bytes | None]) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._greet = before_tls
        self._heard = b""

    def data_received(self, data: bytes) -> None:
        self._heard += data
        try:
            if not self.answer.done() and (answer := self._greet(self._heard)) is not None:
                self.answer.set_result(answer)
        except Exception as error:
            self.answer.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("the server closed the connection"))


async def open_stream(host: Endpoint) -> asyncio.BaseTransport:
    """Connect to a server that no driver connects to."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(host.seconds):
        if host.before_tls is not None and host.tls is not None:
            return await _reach_greeted(loop, host, host.before_tls, host.tls)
        if host.name.startswith("/"):
            return (await loop.create_unix_connection(_Unread, host.name))[0]
        transport, _ = await loop.create_connection(_Unread, host.name, host.port, ssl=host.tls)
    return transport


async def _reach_greeted(
    loop: asyncio.AbstractEventLoop, host: Endpoint, before_tls: Callable[[bytes], bytes | None], tls: SSLContext
) -> asyncio.BaseTransport:
    """Connect, say what comes before TLS, and begin that."""
    transport, greeter = await loop.create_connection(lambda: _Greeter(before_tls), host.name, host.port)
    try:
        transport.write(await greeter.answer)
        encrypted = await loop.start_tls(transport, _Unread(), tls, server_hostname=host.name)
    except BaseException:
        transport.abort()
        if greeter.answer.done() and not greeter.answer.cancelled():
            greeter.answer.exception()
        raise
    assert encrypted is not None
    encrypted.pause_reading()
    return encrypted


async def request_all(
    asked: Sequence[tuple[AsyncioConnection, Command | bytes]], timeout: float, enough: Callable[[Sequence[Any]], bool]
) -> list[Any]:
    """Send to all, then await all."""
    loop = asyncio.get_running_loop()
    answers: list[Any] = [NO_REPLY] * len(asked)
    done: asyncio.Future[None] = loop.create_future()
    left = len(asked)

    def take(place: int, answer: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        if not answer.cancelled():
            answers[place] = answer.result()
        if not done.done() and (not left or enough(answers)):
            done.set_result(None)

    for place, (connection, command) in enumerate(asked):
        connection.post(command).add_done_callback(lambda answer, place=place: take(place, answer))  # type: ignore[misc]
    timer = loop.call_later(timeout, _finish, done)
    try:
        if asked and not enough(answers):
            await done
            if left and not enough(answers):
                for connection, _ in asked:
                    connection._looked = boottime()  # a loop reads before it looks at its timers
    finally:
        timer.cancel()
    return list(answers)


def _give_up(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_result(NO_REPLY)


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
