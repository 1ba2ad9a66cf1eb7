"""The connections of one client: a few, reused, and never used by two callers at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from math import inf
from threading import Lock
from weakref import WeakSet

from fencelock.core.adopted_client import AdoptedClient
from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.postgres.connection import LoginRefused, Param, PostgresConnection, Row, Statement, connect
from fencelock.engines.postgres.errors import MISSING, RETRYABLE, UNKNOWN_STATEMENT, ServerError, translate
from fencelock.engines.postgres.schema import handshake
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

MAX_IN_USE = 10
"""Statements of one client that run at the same time, besides a renewal; further callers wait for a slot."""
MAX_IDLE = 8
IDLE_SECONDS = 1.0
"""A connection that was idle for so long is checked before its next use: servers and poolers close idle ones."""
DRAIN_TIMEOUT = 0.1
"""Seconds to wait for a reply whose caller is gone, before the pool takes another connection."""
MAX_TRIES = 10
"""How often a statement runs that failed because of other transactions; a failed one changed nothing."""

Prepare = Callable[[PostgresConnection], Awaitable[None]]


class Slot:
    """The right to run a statement."""

    __slots__ = ("__weakref__",)


class Connecting:
    """A connect in the background, and its result."""

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
        self.default_idle_timeout = "0"
        """The idle_session_timeout that new sessions have."""
        self.weakness = ""
        """The setting that lets the server lose commits in a crash, as the newest connection found it."""
        self._runtime = runtime
        self._source = source
        self._prepare = prepare
        self._connected = False
        self._idle: list[PostgresConnection] = []
        # Weak references: an object that an interrupted caller lost must not count for ever.
        self._all: WeakSet[PostgresConnection] = WeakSet()
        self._slots: WeakSet[Slot] = WeakSet()
        self._queue: dict[Slot, Event] = {}
        """The callers that wait for a slot, in the order of their calls; `_free` hands over a slot."""
        self._served = 0
        self._unclaimed: list[Connecting] = []
        """Connects whose callers had no time to wait for them: the next callers do."""
        self._mutex = Lock()
        self._closed = False
        self._warned = False

    # ------------------------------------------------------------------ statements

    async def run(
        self,
        statement: Statement,
        params: Sequence[Param],
        timeout: float = MAX_REPLY_TIMEOUT,
        *,
        repeat: bool = True,
        urgent: bool = False,
        deadline: Deadline = NO_DEADLINE,
    ) -> list[Row]:
        """Run a statement on any connection and return its rows; with `repeat`, once more if its reply was lost.

        The timeout bounds each wait for a reply, the deadline everything together. An urgent statement needs no slot.
        """
        tries = MAX_TRIES
        slot = Slot()
        try:
            if not urgent:
                await self._take(slot, timeout, deadline)
            while True:
                connection = await self.borrow(deadline)
                try:
                    if deadline.passed:
                        raise EngineUnavailable(f"{self.address}: no time is left for a statement")
                    return await connection.request(statement, params, deadline.at_most(timeout))
                except ServerError as error:
                    tries -= 1
                    if error.state in MISSING or error.state == UNKNOWN_STATEMENT:
                        connection.close()  # if the schema was dropped, the handshake of the next connection creates it
                    if (error.state not in RETRYABLE and error.state != UNKNOWN_STATEMENT) or not tries:
                        raise translate(error, self.address) from error
                    await self._runtime.sleep(0.01 * self._runtime.random())
                except OutcomeUnknown:
                    if not repeat or deadline.passed:
                        raise
                    repeat = False
                finally:
                    self.keep(connection)
        finally:
            self._free(slot)

    async def _take(self, slot: Slot, timeout: float, deadline: Deadline) -> None:
        """Take a slot. If there is none, queue for as long as others are served: a busy client is no fault of the server."""
        with self._mutex:
            if len(self._slots) < MAX_IN_USE:
                self._slots.add(slot)
                return
            turn = self._queue[slot] = self._runtime.event()
            served = self._served
        while not await turn.wait(deadline.at_most(timeout)):
            if self._served == served or deadline.passed:
                raise EngineUnavailable(f"{self.address}: all {MAX_IN_USE} connections of this client are busy")
            served = self._served

    def _free(self, slot: Slot) -> None:
        """Leave the queue, or give a slot to the next caller in it."""
        with self._mutex:
            self._queue.pop(slot, None)
            if slot in self._slots:
                self._slots.remove(slot)
                self._served += 1
                following = next(iter(self._queue), None)
                if following is not None:
                    self._slots.add(following)
                    self._queue.pop(following).set()

    # ------------------------------------------------------------------ connections

    async def borrow(self, deadline: Deadline = NO_DEADLINE) -> PostgresConnection:
        """Return an idle or new connection, without a limit on their number; the caller gives it back with `keep`."""
        self.check_open()
        while (connection := self._pop_idle()) is not None:
            usable = False
            try:
                await connection.drain(DRAIN_TIMEOUT)
                usable = self._runtime.now() - connection.last_used < IDLE_SECONDS or connection.is_alive()
            except OutcomeUnknown:
                continue
            finally:
                if not usable:
                    self.drop(connection)
            if usable:
                return connection
        return await self.connect(deadline)

    def _pop_idle(self) -> PostgresConnection | None:
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

    async def learn_settings(self, deadline: Deadline) -> None:
        """Connect, unless this client was connected before: the handshake reads the server's settings."""
        self.check_open()
        if not self._connected:
            self.keep(await self.borrow(deadline))

    async def connect(self, deadline: Deadline = NO_DEADLINE) -> PostgresConnection:
        """Return a new connection; raise EngineUnavailable.

        It is made in the background. If connecting takes longer than this caller has, the next caller waits for it:
        otherwise callers with short timeouts could never connect to a slow server.
        """
        while True:
            self.check_open()
            with self._mutex:
                connecting = self._unclaimed.pop() if self._unclaimed else None
            mine = connecting is None
            if connecting is None:
                connecting = Connecting(self._runtime.event())
                await self._start_connect(connecting, deadline)
            seconds = deadline.at_most(inf)
            connection: PostgresConnection | None = None
            interrupted = True
            try:
                await connecting.done.wait(None if seconds == inf else seconds)
                interrupted = False
            finally:
                with self._mutex:
                    if connecting.done.is_set():
                        connection = connecting.connection
                    else:
                        self._unclaimed.append(connecting)  # from now on, its connection is another caller's
                if interrupted and connection is not None:
                    self.keep(connection)  # the caller was cancelled when the connection was ready
            if connection is not None:
                return connection
            self.check_open()
            if connecting.error is None:
                raise EngineUnavailable(f"{self.address}: no connection within {seconds:.3g} s")
            # A connect that an earlier caller started may have failed for a cause that is over.
            if mine or deadline.passed:
                raise connecting.error

    async def _start_connect(self, connecting: Connecting, deadline: Deadline) -> None:
        work = self._connect_in_background(connecting, deadline)
        try:
            self._runtime.spawn(work, "fencelock-connect")
        except RuntimeError:  # no more threads: connect in this one
            work.close()
            await self._connect_in_background(connecting, deadline)

    async def _connect_in_background(self, connecting: Connecting, deadline: Deadline) -> None:
        connection = None
        error: Exception = EngineUnavailable(f"{self.address}: connecting was cancelled")
        try:
            connection = await self._connect(deadline)
        except Exception as failure:
            error = failure
        finally:
            with self._mutex:
                unclaimed = connecting in self._unclaimed
                if unclaimed:
                    self._unclaimed.remove(connecting)
                elif connection is None:
                    connecting.error = error
                else:
                    connecting.connection = connection
                connecting.done.set()
            if unclaimed and connection is not None:
                self.keep(connection)

    async def _connect(self, deadline: Deadline) -> PostgresConnection:
        if isinstance(self._source, PostgresUrl):
            return await self._connect_to(self._source, deadline)
        return await self._source.connect(lambda url: self._connect_to(url, deadline), LoginRefused, deadline)

    async def _connect_to(self, url: PostgresUrl, deadline: Deadline) -> PostgresConnection:
        """Connect, and check that the server is one that the engine can work with."""
        self.address = url.address
        connection = await connect(self._runtime, url, deadline, self._register)
        try:
            self.default_idle_timeout, self.weakness = await handshake(connection, url.address, url.timeout)
            if self.weakness and not self._warned:
                self._warned = True
                consequence = "after a crash of its machine only its clock keeps tokens from repeating"
                log("postgres", WARNING, f"{url.address} does not wait for its disk ({self.weakness}): {consequence}")
            if self._prepare is not None:
                await self._prepare(connection)
            self._connected = True
            self.check_open()
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def _register(self, connection: PostgresConnection) -> None:
        """Add a connection that is being made: close() or a fork must find it."""
        with self._mutex:
            self.check_open()
            self._all.add(connection)

    # ------------------------------------------------------------------ closing

    def check_open(self) -> None:
        """Raise ClientClosed if the client is closed."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    def refuse_new(self) -> None:
        """Hand out no more connections: a waiter that wakes up while the client closes must not enqueue again."""
        self._closed = True

    def close(self) -> None:
        """Close all connections; callers that use one get an error, and so do connects in the background."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
            used = set(self._all).difference(idle)
            self._all.clear()
        for connection in idle:
            connection.close()
        for connection in used:
            connection.hang_up()

    def detach_after_fork(self) -> None:
        """Start empty in a forked child, without sending anything on the parent's connections."""
        self._mutex = Lock()
        connections, self._all, self._idle = self._all, WeakSet(), []
        self._slots = WeakSet()
        self._queue.clear()
        self._unclaimed.clear()
        for connection in list(connections):
            connection.detach_after_fork()
