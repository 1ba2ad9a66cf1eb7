"""One connection to the server: it sends statements in order and assigns the replies in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from fencelock.core.runtime import NO_REPLY, Connection, Runtime
from fencelock.engines.mysql.packets import QUIT, query


class Reply:
    """The reply to one statement; `value` is NO_REPLY until the server has sent it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = NO_REPLY


class MySQLConnection:
    """A connection and what the pool knows about its session on the server."""

    __slots__ = (
        "_pending",
        "_push_event",
        "_runtime",
        "created_at",
        "first_token",
        "greeting",
        "host",
        "id",
        "transport",
        "ttl",
        "used_at",
    )

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.greeting = Reply()
        self._pending: deque[Reply] = deque((self.greeting,))
        self._push_event = runtime.event()
        self.id = 0
        """The server's number of the session (CONNECTION_ID); 0 before the login."""
        self.host = ""
        """The client's address as the server sees it. With the id, it identifies the session across server restarts."""
        self.first_token = 0
        """A token from before this session. The session's own tokens are greater, unless the table was emptied."""
        self.created_at = runtime.now()
        self.ttl = 0
        """The session's wait_timeout: the server ends the session after so many seconds without a statement."""
        self.used_at = 0.0
        self.transport: Connection

    @property
    def open(self) -> bool:
        """Whether it can be used."""
        return self.transport.open

    @property
    def idle(self) -> bool:
        """Whether every reply has arrived."""
        return not self._pending

    def on_reply(self, value: Any) -> None:
        """Assign a reply to the oldest pending statement.

        A reply without a statement is the server's last message: the session was killed, or was idle for too long.
        """
        if self._pending:
            self._pending.popleft().value = value
            self._push_event.set()
        else:
            self.transport.close()

    def on_end(self) -> None:
        """Wake the receiver when the connection is closed."""
        self._push_event.set()

    def expect_reply(self) -> Reply:
        """Register a reply to something that the caller sends itself."""
        reply = Reply()
        self._pending.append(reply)
        return reply

    def skip_greeting(self) -> None:
        """Expect no greeting: the connector read it before TLS started."""
        self._pending.clear()

    def send(self, statements: Sequence[str]) -> list[Reply]:
        """Send statements in one write and return their replies, which are still to come."""
        replies = [self.expect_reply() for _ in statements]
        self.transport.send(b"".join([query(statement) for statement in statements]))
        return replies

    async def receive(self, replies: Sequence[Reply], timeout: float) -> bool:
        """Wait until all these replies have arrived; return False after the timeout, or if the connection broke."""
        last = replies[-1]
        until = self._runtime.now() + timeout
        while last.value is NO_REPLY and self.transport.open:
            left = until - self._runtime.now()
            if left <= 0:
                self.transport.alive()  # reads what arrived while the process was stopped
                break
            self._push_event.clear()
            await self._runtime.wait_for_push([self.transport], self._push_event, left)
        return last.value is not NO_REPLY

    def close(self) -> None:
        """End the session."""
        if self.transport.open and self.idle:
            self.transport.send(QUIT)
        self.transport.close()
