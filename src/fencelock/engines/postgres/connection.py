"""One connection to a PostgreSQL server: libpq encodes and decodes the protocol, the runtime waits for the socket."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import OperationalError
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, PGconn, PollingStatus

from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.core.connect_once import unreachable_hint
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.fork import detach_after_fork
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.errors import (
    HINTS,
    LOGIN_MESSAGES,
    ServerError,
)
from fencelock.engines.postgres.url import PostgresUrl
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn as LibpqConnection

REGISTERED_SECONDS = 86400.0
MAX_REGISTERED = 10000

Row = tuple[bytes | None, ...]
Param = str | int | float | bool | None


class Statement(NamedTuple):
    """An SQL statement, and the name under which it is prepared."""

    name: str
    sql: str


class PostgresConnection:
    """One connection. One task or thread uses it at a time; any thread may call `hang_up`."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_hung_up",
        "_pgconn",
        "_prepared",
        "_preparing",
        "_runtime",
        "_seen",
        "_socket",
        "direct",
        "label",
        "last_used",
        "open",
        "pending",
        "pid",
        "registered",
    )

    def __init__(self, runtime: Runtime, pgconn: LibpqConnection, address: str) -> None:
        self._runtime = runtime
        self._pgconn = pgconn
        self._socket: tuple[int, os.stat_result] | None = None
        self._address = address
        self._hung_up = False
        self._seen: set[str] = set()
        self._prepared: set[str] = set()
        self._preparing = ""
        """The statement that the pending request prepares, if any. Another caller may read the reply after an interrupt."""
        self.direct = False
        """Whether there is certainly no pooler in between: session settings and prepared statements persist."""
        self.pid = 0
        self.open = True
        self.pending = False
        """Whether a reply of the server is still to be read."""
        self.last_used = runtime.now()
        self.label: tuple[str, str] | None = None
        """The owner and the value that this session last registered."""
        self.registered: dict[int, float] = {}
        """The advisory keys that this session registered, and when."""

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._pgconn.socket

    @property
    def version(self) -> int:
        """The server's version, as 150004."""
        return self._pgconn.server_version

    @property
    def claimed_pid(self) -> int:
        """The server process according to the login. A pooler reports another number than the process behind it has."""
        return self._pgconn.backend_pid

    def is_registered(self, label: tuple[str, str], key: int) -> bool:
        """Return whether this session registered this label last, and this key within the last day."""
        when = self.registered.get(key)
        return self.label == label and when is not None and self._runtime.now() - when < REGISTERED_SECONDS

    def set_registered(self, label: tuple[str, str], key: int) -> None:
        """Remember that this session registered the label and the key."""
        if len(self.registered) >= MAX_REGISTERED:
            self.registered.clear()
        self.label = label
        self.registered[key] = self._runtime.now()

    def setting(self, name: str) -> str:
        """Return a setting that the server reports at login."""
        return (self._pgconn.parameter_status(name.encode()) or b"").decode()

    async def finish_connecting(self, timeout: float) -> None:
        """Complete the TCP, TLS and login steps; raise OperationalError or TimeoutError."""
        pgconn, until = self._pgconn, self._runtime.now() + timeout
        while pgconn.status != ConnStatus.OK:
            if pgconn.status == ConnStatus.BAD or self._hung_up:
                raise _connect_error(pgconn)
            state = pgconn.connect_poll()
            if state == PollingStatus.OK:
                break
            if state == PollingStatus.FAILED:
                raise _connect_error(pgconn)
            self._remember_socket()  # libpq opens another one for each address of the host
            writing = state == PollingStatus.WRITING
            if not await self._runtime.wait_for_io(pgconn.socket, until - self._runtime.now(), or_writable=writing):
                raise TimeoutError(f"no connection within {timeout:.3g} s")
        pgconn.nonblocking = 1
        self._remember_socket()
        self.last_used = self._runtime.now()

    def _remember_socket(self) -> None:
        descriptor = self._pgconn.socket
        self._socket = descriptor, os.fstat(descriptor)

    # ------------------------------------------------------------------ requests

    async def request(
        self, statement: Statement, params: Sequence[Param], timeout: float, *, keep: bool = False
    ) -> list[Row]:
        """Run a statement and return its rows; raise ServerError, or OutcomeUnknown as `read_reply` does."""
        if statement.name not in self._prepared:
            until = self._runtime.now() + timeout
            await self.prepare(statement, timeout, keep=keep)
            # This process may have been stopped meanwhile: the server gets its time in any case.
            timeout = max(until - self._runtime.now(), min(timeout, MIN_REPLY_TIMEOUT))
        self.send(statement, params)
        return await self.read_reply(timeout, keep=keep)

    async def prepare(self, statement: Statement, timeout: float, *, keep: bool = False) -> None:
        """Prepare a statement when it is used for the second time: in a short-lived process that would cost more."""
        name = statement.name
        if not self.direct or name in self._prepared:
            return
        if name in self._seen:
            self._send(self._pgconn.send_prepare, name.encode(), statement.sql.encode(), preparing=name)
            await self.read_reply(timeout, keep=keep)
        self._seen.add(name)

    def send(self, statement: Statement, params: Sequence[Param]) -> None:
        """Send a statement, as far as the socket takes it now, without waiting for the reply; raise OutcomeUnknown."""
        values = [None if param is None else _encode(param) for param in params]
        if statement.name in self._prepared:
            self._send(self._pgconn.send_query_prepared, statement.name.encode(), values)
        else:
            self._send(self._pgconn.send_query_params, statement.sql.encode(), values)

    async def script(self, sql: str, timeout: float) -> None:
        """Run several statements in one request."""
        self._send(self._pgconn.send_query, sql.encode())
        await self.read_reply(timeout)

    def _send(self, send: Callable[..., None], *args: object, preparing: str = "") -> None:
        self.pending, self._preparing = True, preparing
        try:
            send(*args)
            self._pgconn.flush()
        except OperationalError as error:
            self.close()
            raise OutcomeUnknown(f"{self._address}: {_one_line(error)}") from error

    async def read_reply(self, timeout: float, *, keep: bool = False) -> list[Row]:
        """Wait for the pending reply. If it does not arrive in time, close the connection, unless `keep`.

        After an interrupt, or a timeout with `keep`, the reply is still pending and can be waited for again.
        """
        runtime, pgconn = self._runtime, self._pgconn
        until = runtime.now() + timeout
        found = None
        try:
            while pgconn.flush():
                if not await runtime.wait_for_io(pgconn.socket, until - runtime.now(), or_writable=True):
                    raise self._no_reply(timeout, keep)
                pgconn.consume_input()
            while True:
                while pgconn.is_busy():
                    if not await runtime.wait_for_io(pgconn.socket, until - runtime.now()):
                        raise self._no_reply(timeout, keep)
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                if found is None or found.status != ExecStatus.FATAL_ERROR:
                    found = result
        except OperationalError as error:
            self.close()
            if found is not None and found.status == ExecStatus.FATAL_ERROR:
                raise self._error_of(found) from error
            raise OutcomeUnknown(f"{self._address}: {_one_line(error)}") from error
        self.pending = False
        self.last_used = runtime.now()
        if found is None or found.status == ExecStatus.FATAL_ERROR:
            raise self._error_of(found)
        if self._preparing:
            self._prepared.add(self._preparing)
        return [tuple(found.get_value(row, column) for column in range(found.nfields)) for row in range(found.ntuples)]

    def _no_reply(self, timeout: float, keep: bool) -> OutcomeUnknown:
        if not keep:
            self.close()
        return OutcomeUnknown(f"{self._address}: no answer within {timeout:.3g} s")

    def _error_of(self, result: Any) -> FencelockError | ServerError:
        state, message = "", ""
        if result is not None:
            state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
            message = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        if not state or self._pgconn.status != ConnStatus.OK:
            message = message or self._pgconn.get_error_message().strip()
            self.close()
            return OutcomeUnknown(f"{self._address}: {message}")
        return ServerError(state, message)

    async def drain(self, timeout: float, *, keep: bool = False) -> None:
        """Read the pending reply to a request whose caller was interrupted, and ignore an error of the server in it."""
        if self.pending:
            with suppress(ServerError):
                await self.read_reply(timeout, keep=keep)

    def read_notifications(self) -> list[str]:
        """Read what has arrived, without waiting; return the payloads of notifications. Close a broken connection."""
        try:
            self._pgconn.consume_input()
            payloads = []
            while (notification := self._pgconn.notifies()) is not None:
                payloads.append(notification.extra.decode(errors="replace"))
            if self._pgconn.status != ConnStatus.OK:
                self.close()
            return payloads
        except OperationalError:
            self.close()
            return []

    def is_alive(self) -> bool:
        """Return whether the connection works, as far as that is known without a request."""
        if not self.open or self.pending or self._pgconn.status != ConnStatus.OK:
            return False
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        if poll.poll(0):
            self.read_notifications()  # the server sent a notice, or closed the connection
            return self._pgconn.status == ConnStatus.OK and not poll.poll(0)
        return True

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        self._pgconn.finish()

    def hang_up(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the socket down: the thread or task that uses the connection notices and closes it.

        SHUT_RD only wakes it. `finish` would free libpq's memory while another thread uses it.
        """
        self._hung_up = True
        if not self.open or self._socket is None:
            return
        descriptor, identity = self._socket
        with suppress(OSError):
            copy = os.dup(descriptor)
            # libpq may have closed the descriptor in another thread, and the process may have reused its number.
            if os.path.samestat(os.fstat(copy), identity):
                with socket.socket(fileno=copy) as same:
                    same.shutdown(how)
            else:
                os.close(copy)

    def detach_after_fork(self) -> None:
        """Close it in a forked child without sending anything: the server still serves the parent."""
        if self.open:
            self.open = False
            with suppress(OperationalError):
                detach_after_fork(self)  # first: libpq sends a Terminate message when it closes
            self._pgconn.finish()


class LoginRefused(OperationalError):
    """The server asked for a password, and then refused the connection."""


def _ignore(connection: PostgresConnection) -> None:
    pass


async def connect(
    runtime: Runtime,
    url: PostgresUrl,
    deadline: Deadline = NO_DEADLINE,
    on_start: Callable[[PostgresConnection], None] = _ignore,
) -> PostgresConnection:
    """Connect and log in, at one host after the other; raise EngineUnavailable.

    Each host has the URL's time. A host that hangs gets no more than its share of the deadline if others follow; the last
    one gets its full time even beyond the deadline. `on_start` is called with each connection before it is complete.
    """
    failures: list[str] = []
    cause: Exception | None = None
    for tried, conninfo in enumerate(url.conninfos):
        remaining = len(url.conninfos) - tried
        seconds = url.timeout if remaining == 1 else min(url.timeout, deadline.at_most(inf) / remaining)
        try:
            # connect_start resolves the host's name, which blocks.
            pgconn = await runtime.run_blocking(PGconn.connect_start, conninfo)
            connection = PostgresConnection(runtime, pgconn, url.address)
            try:
                on_start(connection)
                await connection.finish_connecting(seconds)
            except BaseException:
                connection.close()
                raise
            return connection
        except (OperationalError, TimeoutError) as error:
            failures += map(str.strip, str(error).splitlines())  # libpq repeats it if it tries with and without TLS
            cause = cause if isinstance(cause, LoginRefused) else error
    message = "; ".join(filter(None, dict.fromkeys(failures)))
    hint = next((HINTS[state] for text, state in LOGIN_MESSAGES.items() if text in message), None)
    raise EngineUnavailable(
        f"{url.address}: {message}" + (f" ({hint})" if hint else unreachable_hint(message))
    ) from cause


def _connect_error(pgconn: LibpqConnection) -> OperationalError:
    """Return why connecting failed. libpq does not report that a login was refused, only that it needed a password."""
    needed_password = pgconn.used_password or pgconn.needs_password
    return (LoginRefused if needed_password else OperationalError)(pgconn.get_error_message())


def _encode(param: str | int | float | bool) -> bytes:
    if param is True or param is False:
        return b"t" if param else b"f"
    return str(param).encode()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
