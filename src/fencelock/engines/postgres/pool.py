"""The connections of one client: a few, reused, and never used by two callers at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from threading import Lock
from weakref import WeakSet

from fencelock.core.adopted_client import AdoptedClient
from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.postgres.connection import LoginRefused, Param, PostgresConnection, Row, Statement, connect
from fencelock.engines.postgres.errors import MISSING, RETRYABLE, UNKNOWN_STATEMENT, ServerError, translate
from fencelock.engines.postgres.schema import handshake
from fencelock.engines.postgres.url import CONNECT_TIMEOUT, PostgresUrl
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

MAX_IN_USE = 10
"""Connections of one client that run requests at the same time; further callers wait for one."""
MAX_IDLE = 8
IDLE_SECONDS = 1.0
"""A connection that was idle for so long is checked before its next use: servers and poolers close idle ones."""
DRAIN_TIMEOUT = 0.1
"""Seconds to wait for a reply whose caller is gone, before the pool takes another connection."""
MAX_TRIES = 10
"""How often a statement runs that failed because of other transactions; a failed one changed nothing."""

Prepare = Callable[[PostgresConnection], Awaitable[None]]


class Slot:
    """The right to use one of the connections."""

    __slots__ = ("__weakref__",)


class ConnectAttempt:
    """A connect that runs in the background."""

    __slots__ = ("__weakref__",)


class ConnectionRequest:
    """A caller that waits for a new connection. The pool's mutex guards the result."""

    __slots__ = ("connection", "done", "error")

    def __init__(self, done: Event) -> None:
        self.done = done
        self.connection: PostgresConnection | None = None
        self.error: Exception | None = None


class PostgresPool:
    """All connections of a client to its server."""

    def __init__(
        self, runtime: Runtime, source: PostgresUrl | AdoptedClient[PostgresUrl], prepare: Prepare | None = None
    ) -> None:
        self.address = source.address
        self.connected = False
        """Whether this client ever had a connection."""
        self.default_idle_timeout = "0"
        """The idle_session_timeout that new sessions have."""
        self.weakness = ""
        """The setting that lets the server lose commits in a crash, as the newest connection found it."""
        self._runtime = runtime
        self._source = source
        self._url = source if isinstance(source, PostgresUrl) else None
        self._prepare = prepare
        self._idle: list[PostgresConnection] = []
        # Weak references: an object that an interrupted caller lost must not count for ever.
        self._all: WeakSet[PostgresConnection] = WeakSet()
        self._slots: WeakSet[Slot] = WeakSet()
        self._connecting: WeakSet[ConnectAttempt] = WeakSet()
        self._requests: deque[ConnectionRequest] = deque()
        self._queue: deque[Event] = deque()
        self._served = 0
        self._mutex = Lock()
        self._closed = False
        self._warned = False

    # ------------------------------------------------------------------ statements

    async def run(
        self,
        statement: Statement,
        params: Sequence[Param],
        timeout: float,
        *,
        urgent: bool = False,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Row]:
        """Run a statement that may be repeated; repeat it once if its reply was lost and there is time."""
        try:
            _, rows = await self.run_once(statement, params, timeout, urgent=urgent, deadline=deadline)
        except OutcomeUnknown:
            if deadline.passed:
                raise
            _, rows = await self.run_once(statement, params, timeout, urgent=urgent, deadline=deadline)
        return rows

    async def run_once(
        self,
        statement: Statement,
        params: Sequence[Param],
        timeout: float,
        *,
        urgent: bool = False,
        deadline: Deadline = NO_DEADLINE,
    ) -> tuple[float, list[Row]]:
        """Run a statement on any connection; return the time before it was sent, and the rows.

        The deadline bounds the wait for a connection, the timeout the wait for the reply.
        """
        tries = MAX_TRIES
        while True:
            connection = await self.checkout(timeout, urgent=urgent, deadline=deadline)
            sent = self._runtime.now()
            try:
                return sent, await connection.request(statement, params, deadline.at_most(timeout))
            except ServerError as error:
                tries -= 1
                if error.state in MISSING or error.state == UNKNOWN_STATEMENT:
                    connection.close()  # if the schema was dropped, the handshake of the next connection creates it
                if (error.state not in RETRYABLE and error.state != UNKNOWN_STATEMENT) or not tries:
                    raise translate(error, self.address) from error
                await self._runtime.sleep(0.01 * self._runtime.random())
            finally:
                self.checkin(connection)

    # ------------------------------------------------------------------ connections in use

    async def checkout(
        self, timeout: float, *, urgent: bool = False, deadline: Deadline = NO_DEADLINE
    ) -> PostgresConnection:
        """Return a working connection; the caller gives it back with `checkin`. Raise EngineUnavailable.

        If all are in use, the caller queues for as long as others are served: a busy client is no fault of the server.
        An urgent caller queues first.
        """
        slot = Slot()
        called = False
        while not self._occupy(slot, called):
            turn = self._runtime.event()
            with self._mutex:
                if urgent or called:
                    self._queue.appendleft(turn)
                else:
                    self._queue.append(turn)
            served = self._served
            try:
                while not await turn.wait(timeout) and len(self._slots) >= MAX_IN_USE:
                    if self._served == served:
                        raise EngineUnavailable(f"{self.address}: all {MAX_IN_USE} connections of this client are busy")
                    served = self._served
                called = True
            finally:
                with self._mutex:
                    if turn in self._queue:
                        self._queue.remove(turn)
                    elif not called and self._queue:
                        self._queue.popleft().set()  # this caller was interrupted: its turn goes to the next
        try:
            connection = await self.borrow(deadline)
        except BaseException:
            self._free(slot)
            raise
        connection.slot = slot
        return connection

    def checkin(self, connection: PostgresConnection) -> None:
        """Give a connection and its slot back."""
        slot, connection.slot = connection.slot, None
        self.keep(connection)
        self._free(slot)

    def _occupy(self, slot: Slot, called: bool) -> bool:
        with self._mutex:
            if len(self._slots) >= MAX_IN_USE or (self._queue and not called):
                return False
            self._slots.add(slot)
            return True

    def _free(self, slot: object) -> None:
        with self._mutex:
            self._slots.discard(slot)  # type: ignore[arg-type]
            self._served += 1
            if self._queue:
                self._queue.popleft().set()

    async def borrow(self, deadline: Deadline = NO_DEADLINE) -> PostgresConnection:
        """Return an idle or new connection, without a limit on their number; the caller gives it back with `keep`."""
        while (connection := self._pop_idle()) is not None:
            usable = False
            try:
                usable = await self._is_usable(connection)
            finally:
                if not usable:
                    self.drop(connection)
            if usable:
                return connection
        return await self.connect(deadline)

    async def _is_usable(self, connection: PostgresConnection) -> bool:
        if connection.pending:
            return await connection.drain(DRAIN_TIMEOUT)  # its last caller was interrupted
        return self._runtime.now() - connection.last_used < IDLE_SECONDS or connection.is_alive()

    def _pop_idle(self) -> PostgresConnection | None:
        self.check_open()
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def keep(self, connection: PostgresConnection) -> None:
        """Keep a connection for the next caller that needs one."""
        with self._mutex:
            if connection.open and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
            if not connection.open:
                for other in self._idle:
                    other.last_used = -inf  # what broke this one may have broken them all: check before use
        self.drop(connection)

    def drop(self, connection: PostgresConnection) -> None:
        """Close a connection for good."""
        with self._mutex:
            self._all.discard(connection)
        if connection.open:
            connection.close()

    # ------------------------------------------------------------------ new connections

    async def learn_settings(self, deadline: Deadline) -> None:
        """Connect, unless this client was connected before: the handshake reads the server's settings."""
        self.check_open()
        if not self.connected:
            self.keep(await self.borrow(deadline))

    async def connect(self, deadline: Deadline = NO_DEADLINE) -> PostgresConnection:
        """Return a new connection; raise EngineUnavailable.

        It is made in the background. If connecting takes longer than this caller has, the next caller gets the result:
        otherwise callers with short timeouts could never connect to a slow server.
        """
        while True:
            request = ConnectionRequest(self._runtime.event())
            attempt = ConnectAttempt()
            try:
                with self._mutex:
                    self.check_open()
                    self._requests.append(request)
                    own = len(self._connecting) < len(self._requests)
                    if own:
                        self._connecting.add(attempt)
                if own:
                    await self._start_connect(attempt, deadline)
                del attempt  # from now on only the background refers to it
                timeout = deadline.at_most(self._longest_connect())
                await request.done.wait(timeout)
            except BaseException:
                with self._mutex:
                    connection = request.connection
                if connection is not None:
                    self.keep(connection)
                raise
            finally:
                with self._mutex:
                    if request in self._requests:
                        self._requests.remove(request)
            if request.connection is not None:
                return request.connection
            if request.error is None:
                raise EngineUnavailable(f"{self.address}: no connection within {timeout:.3g} s")
            # A connect that an earlier caller started may have failed for a cause that is over.
            if own or deadline.passed:
                raise request.error

    def _longest_connect(self) -> float:
        """Return how long connecting can take: each host has its time, and so have the handshake and its schema."""
        return (len(self._url.conninfos) + 2) * self._url.timeout if self._url else 3 * CONNECT_TIMEOUT

    async def _start_connect(self, attempt: ConnectAttempt, deadline: Deadline) -> None:
        work = self._connect_for_request(attempt, deadline)
        try:
            self._runtime.spawn(work, "fencelock-connect")
        except RuntimeError:  # no more threads: connect in this one
            work.close()
            await self._connect_for_request(attempt, deadline)

    async def _connect_for_request(self, attempt: ConnectAttempt, deadline: Deadline) -> None:
        """Make a connection for the oldest request, or for the next caller if there is none any more."""
        connection = None
        error: Exception = EngineUnavailable(f"{self.address}: connecting was cancelled")
        try:
            connection = await self._connect(deadline)
        except Exception as failure:
            error = failure
        finally:
            with self._mutex:
                self._connecting.discard(attempt)
                request = self._requests.popleft() if self._requests else None
                if request is not None:
                    request.connection = connection
                    request.error = None if connection is not None else error
            if request is not None:
                request.done.set()
            elif connection is not None:
                self.keep(connection)

    async def _connect(self, deadline: Deadline) -> PostgresConnection:
        """Connect, and check that the server is one that the engine can work with."""
        if isinstance(self._source, PostgresUrl):
            connection = await self._connect_to(self._source, deadline)
        else:
            connection = await self._source.connect(lambda url: self._connect_to(url, deadline), LoginRefused, deadline)
        try:
            timeout = CONNECT_TIMEOUT if self._url is None else self._url.timeout
            self.default_idle_timeout, weakness = await handshake(connection, self.address, timeout)
            self._set_weakness(weakness)
            if self._prepare is not None:
                await self._prepare(connection)
            self.connected = True
            self.check_open()
        except BaseException:
            self.drop(connection)
            raise
        return connection

    async def _connect_to(self, url: PostgresUrl, deadline: Deadline) -> PostgresConnection:
        self._url, self.address = url, url.address
        return await connect(self._runtime, url, deadline, self._register)

    def _register(self, connection: PostgresConnection) -> None:
        """Add a connection that is being made: close() or a fork must find it."""
        with self._mutex:
            self.check_open()
            self._all.add(connection)

    def _set_weakness(self, weakness: str) -> None:
        """Log once that the server does not wait for its disk."""
        self.weakness = weakness
        if weakness and not self._warned:
            self._warned = True
            consequence = "after a crash of its machine only its clock keeps tokens from repeating"
            log("postgres", WARNING, f"{self.address} does not wait for its disk ({weakness}): {consequence}")

    # ------------------------------------------------------------------ closing

    def check_open(self) -> None:
        """Raise ClientClosed if the client is closed."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    def refuse_new(self) -> None:
        """Hand out no more connections: a waiter that wakes up while the client closes must not enqueue again."""
        self._closed = True

    def close(self) -> None:
        """Close all connections; callers that use one get an error."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
            used = set(self._all).difference(idle)
            self._all.clear()
            requests = list(self._requests)
            self._requests.clear()
            for request in requests:
                request.error = ClientClosed("this client is closed; connect again")
        for request in requests:
            request.done.set()
        for connection in idle:
            connection.close()
        for connection in used:
            connection.hang_up()

    def detach_after_fork(self) -> None:
        """Start empty in a forked child, without sending anything on the parent's connections."""
        self._mutex = Lock()
        connections, self._all, self._idle = self._all, WeakSet(), []
        self._slots, self._connecting = WeakSet(), WeakSet()
        self._queue.clear()
        self._requests.clear()
        for connection in list(connections):
            connection.detach_after_fork()
