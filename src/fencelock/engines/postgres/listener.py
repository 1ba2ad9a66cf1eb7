"""The listener of a client: one connection that receives the notifications for all queued claims of the client."""

from __future__ import annotations

from os import urandom
from socket import SHUT_RD
from threading import Lock

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.postgres.connection import PostgresConnection, Statement
from fencelock.engines.postgres.errors import ServerError
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.errors import OutcomeUnknown

CHECK_SECONDS = 1.0
LINGER_SECONDS = 20.0
"""How long it listens after the last waiter: a new connection costs more than a contended lock."""
REPLY_TIMEOUT = 5.0
CLOSE_TIMEOUT = 0.3
"""How long `close` waits for the connection to end in order; the server logs one that just breaks."""
PING_SECONDS = 5.0
"""After so long without a notification the listener pings: a dead connection is not always reported."""
PING = Statement("fl_ping", "SELECT")


class QueuedClaim:
    """A claim in the queue of a name, with the event that its notification sets."""

    __slots__ = ("attempt_no", "token", "woken")

    def __init__(self, woken: Event) -> None:
        self.woken = woken
        self.attempt_no = 0
        """The attempt that enqueued the claim or kept it there: a notification for an earlier one is ignored."""
        self.token: int | None = None


class Listener:
    """Receives notifications in a background thread or task, while there are waiters."""

    def __init__(self, runtime: Runtime, pool: PostgresPool) -> None:
        self.channel: str | None = None
        """The channel to notify; None while nobody listens."""
        self.behind_pooler = False
        """Whether a pooler gives the connection to others after each statement, so that LISTEN cannot work."""
        self.queued: dict[str, QueuedClaim] = {}
        self._runtime = runtime
        self._pool = pool
        self._connection: PostgresConnection | None = None
        self._opening: Event | None = None
        self._ended: Event | None = None
        self._mutex = Lock()
        self._closed = False

    def enqueue(self, id: str, attempt_no: int) -> None:
        """Expect a notification for the claim. Call it before the attempt: the notification may overtake the reply."""
        queued = self.queued.get(id)
        if queued is None:
            queued = self.queued[id] = QueuedClaim(self._runtime.event())
        queued.woken.clear()
        queued.attempt_no, queued.token = attempt_no, None

    def dequeue(self, id: str) -> None:
        """Expect no more notifications for the claim."""
        queued = self.queued.pop(id, None)
        if queued is not None:
            queued.woken.set()  # on close, a caller may still wait for it

    async def open(self, timeout: float, deadline: Deadline) -> None:
        """Start to listen. Callers that come meanwhile wait; if the first has no more time, the next one opens."""
        mine = self._runtime.event()
        with self._mutex:
            if self.channel is not None or self.behind_pooler or self._closed:
                return
            other = self._opening
            if other is None:
                self._opening = mine
        if other is not None:
            await other.wait(timeout)
            return
        try:
            await self._open(deadline)
        finally:
            self._opening = None
            mine.set()

    async def _open(self, deadline: Deadline) -> None:
        connection = await self._pool.connect(deadline)
        try:
            if not connection.direct:
                self.behind_pooler = True
                self._pool.drop(connection)
                return
            channel = f"fencelock_{urandom(12).hex()}"
            listen = Statement("fl_listen", f'LISTEN "{channel}"')
            await connection.request(listen, (), deadline.at_most(REPLY_TIMEOUT))
            # Set the channel before `_listen` starts: it may end immediately, and then resets the channel.
            self._ended = self._runtime.event()
            self._connection, self.channel = connection, channel
            self._runtime.spawn(self._listen(connection), "fencelock-listener")
        except BaseException:
            self._drop(connection)
            raise

    async def _listen(self, connection: PostgresConnection) -> None:
        """Wake notified claims until there was no waiter for a while, or the connection ends."""
        last_waiter = last_reply = self._runtime.now()
        ended = self._ended
        try:
            while connection.open and not self._closed:
                for payload in connection.read_notifications():
                    self._wake(payload)
                    last_reply = self._runtime.now()
                if self.queued:
                    last_waiter = self._runtime.now()
                elif self._runtime.now() - last_waiter > LINGER_SECONDS:
                    break
                if self.queued and self._runtime.now() - last_reply > PING_SECONDS:
                    await connection.request(PING, (), REPLY_TIMEOUT)
                    last_reply = self._runtime.now()
                elif connection.open:
                    await self._runtime.wait_for_io(connection.fileno(), CHECK_SECONDS)
        except (OutcomeUnknown, ServerError):
            pass  # the connection is dead: the next waiter opens another one
        finally:
            self._drop(connection)
            if ended is not None:
                ended.set()

    def _drop(self, connection: PostgresConnection) -> None:
        """Close a connection, and wake all waiters to attempt again: the first of them opens another one."""
        if self._connection is connection:
            self.channel = self._connection = None
        self._pool.drop(connection)
        for queued in list(self.queued.values()):
            queued.woken.set()

    def _wake(self, payload: str) -> None:
        """Wake the claim of `id:token:attempt_no`. Any session of the database may notify: ignore malformed payloads."""
        try:
            id, token_text, attempt_text = payload.split(":")
            attempt_no, token = int(attempt_text), int(token_text)
        except ValueError:
            return
        queued = self.queued.get(id)
        if queued is not None and queued.attempt_no == attempt_no:
            queued.token = token
            queued.woken.set()

    async def close(self) -> None:
        """Stop listening, and wait a moment for the connection to end in order; otherwise the pool breaks it."""
        self._closed = True
        for queued in list(self.queued.values()):
            queued.woken.set()
        connection, ended = self._connection, self._ended
        if connection is not None and ended is not None:
            connection.hang_up(SHUT_RD)
            await ended.wait(CLOSE_TIMEOUT)

    def detach_after_fork(self) -> None:
        """Start without a connection in a forked child."""
        self._mutex = Lock()
        self.channel = self._connection = self._opening = None
        self.queued.clear()
