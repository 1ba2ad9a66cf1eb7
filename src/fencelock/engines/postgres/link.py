"""A connection to a server: libpq speaks the protocol and never waits, the world does. So one code serves both colours."""

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

from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import time_to_answer
from fencelock.core.fork import silence
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.place import Place
from fencelock.engines.postgres.trouble import HINTS, PREPARED, SIGNS, UNPREPARED, ServerError
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn as Connection

KNOWN_SECONDS = 86400.0
KNOWN_KEPT = 10000
HALFWAY_KEPT = 2
"""Connections that are left to the next for want of time: each is a session of a server that goes on."""

Row = tuple[bytes | None, ...]
Word = str | int | float | bool | None


class Statement(NamedTuple):
    """What can be asked, with its name for when it is prepared."""

    name: str
    sql: str


class Link:
    """One connection. It belongs to one task or thread at a time; only `hang_up` may be called by any."""

    __slots__ = (
        "__weakref__",
        "_address",
        "_descriptor",
        "_identity",
        "_pgconn",
        "_prepared",
        "_runtime",
        "_seen",
        "direct",
        "known",
        "open",
        "owner",
        "pending",
        "pid",
        "ticket",
        "used",
    )

    def __init__(self, runtime: Runtime, pgconn: Connection, address: str) -> None:
        pgconn.nonblocking = 1
        self._runtime = runtime
        self._pgconn = pgconn
        self._descriptor = pgconn.socket
        self._identity = os.fstat(self._descriptor)
        self._address = address
        self._seen: set[str] = set()
        self._prepared: set[str] = set()
        self.direct = False
        """Whether it is known that there is no pooler between: what is set or prepared in this session stays there."""
        self.pid = 0
        self.ticket: object = None
        """What counts it among those that are in use, for whoever keeps count."""
        self.open = True
        self.pending = False
        """Whether the server owes an answer."""
        self.used = runtime.now()
        self.owner: str | None = None
        """The label that this session last wrote down."""
        self.known: dict[int, float] = {}
        """The advisory keys that it was introduced with, and when."""

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._pgconn.socket

    @property
    def version(self) -> int:
        """The server's version, as 150004."""
        return self._pgconn.server_version

    @property
    def claimed_pid(self) -> int:
        """The process that the server says it is; a pooler says something else than the process behind it."""
        return self._pgconn.backend_pid

    def knows(self, owner: str, key: int) -> bool:
        """Return whether this session was introduced with this owner and key, today."""
        when = self.known.get(key)
        return self.owner == owner and when is not None and self._runtime.now() - when < KNOWN_SECONDS

    def learn(self, owner: str, key: int) -> None:
        """Note that it was."""
        if len(self.known) >= KNOWN_KEPT:
            self.known.clear()
        self.owner = owner
        self.known[key] = self._runtime.now()

    def setting(self, name: str) -> str:
        """Return a setting that the server reports by itself."""
        return (self._pgconn.parameter_status(name.encode()) or b"").decode()

    # ------------------------------------------------------------------ asking

    async def request(
        self, statement: Statement, words: Sequence[Word], timeout: float, *, keep: bool = False
    ) -> list[Row]:
        """Ask and return the rows; raise what the server says, or Unanswered (as `answer` does)."""
        if statement.name not in self._prepared:
            limit = Deadline(self._runtime.now, timeout)
            await self.prepare(statement, timeout, keep=keep)
            timeout = time_to_answer(limit, timeout)  # this process may have been stopped meanwhile
        self.send(statement, words)
        return await self.answer(timeout, keep=keep)

    async def prepare(self, statement: Statement, timeout: float, *, keep: bool = False) -> None:
        """Have a statement prepared if it is used for the second time: short-lived processes do without."""
        name = statement.name
        if not self.direct or name in self._prepared:
            return
        if name in self._seen:
            self._send(self._pgconn.send_prepare, name.encode(), statement.sql.encode())
            try:
                await self.answer(timeout, keep=keep)
            except ServerError as error:
                if error.state != PREPARED:  # we were interrupted before it was answered, the last time
                    raise
            self._prepared.add(name)
        self._seen.add(name)

    def send(self, statement: Statement, words: Sequence[Word]) -> None:
        """Send a statement, as far as it can be sent now, without waiting for its answer; raise OutcomeUnknown."""
        values = [None if word is None else _word(word) for word in words]
        if statement.name in self._prepared:
            self._send(self._pgconn.send_query_prepared, statement.name.encode(), values)
        else:
            self._send(self._pgconn.send_query_params, statement.sql.encode(), values)

    async def script(self, sql: str, timeout: float) -> None:
        """Run several statements as one transaction."""
        self._send(self._pgconn.send_query, sql.encode())
        await self.answer(timeout)

    def _send(self, send: Callable[..., None], *words: object) -> None:
        self.pending = True
        try:
            send(*words)
            self._pgconn.flush()
        except OperationalError as error:
            self.close()
            raise OutcomeUnknown(f"{self._address}: {_words(error)}") from error

    async def answer(self, timeout: float, *, keep: bool = False) -> list[Row]:
        """Wait for what the server owes; unless `keep`, the link is closed if that does not come in time.

        If we are interrupted, or it is kept, the answer is still to come, and can be waited for again.
        """
        runtime, pgconn = self._runtime, self._pgconn
        until = runtime.now() + timeout
        found = None
        try:
            while pgconn.flush():
                if not await runtime.readable(pgconn.socket, until - runtime.now(), write=True):
                    raise self._silent(timeout, keep)
                pgconn.consume_input()
            while True:
                while pgconn.is_busy():
                    if not await runtime.readable(pgconn.socket, until - runtime.now()):
                        raise self._silent(timeout, keep)
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                if found is None or found.status != ExecStatus.FATAL_ERROR:
                    found = result
        except OperationalError as error:
            self.close()
            if found is not None and found.status == ExecStatus.FATAL_ERROR:
                raise self._refused(found) from error
            raise OutcomeUnknown(f"{self._address}: {_words(error)}") from error
        self.pending = False
        self.used = runtime.now()
        if found is None or found.status == ExecStatus.FATAL_ERROR:
            raise self._refused(found)
        return [tuple(found.get_value(row, column) for column in range(found.nfields)) for row in range(found.ntuples)]

    def _silent(self, timeout: float, keep: bool) -> OutcomeUnknown:
        if not keep:
            self.close()
        return OutcomeUnknown(f"{self._address}: no answer within {timeout:.3g} s")

    def _refused(self, result: Any) -> FencelockError | ServerError:
        state, words = "", ""
        if result is not None:
            state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
            words = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        if not state or self._pgconn.status != ConnStatus.OK:
            said = words or self._pgconn.get_error_message().strip()
            self.close()
            return OutcomeUnknown(f"{self._address}: {said}")
        return ServerError(state, words)

    # ------------------------------------------------------------------ listening

    async def settle(self, timeout: float) -> bool:
        """Take in an answer that nobody waits for any more; return whether the link can be used again."""
        try:
            await self.answer(timeout)
        except ServerError as error:
            if error.state == UNPREPARED:
                self.close()
        except OutcomeUnknown:
            pass
        return self.open

    def take_in(self) -> list[str]:
        """Read what is there, without waiting; return what was called out. Closes a link that is broken."""
        try:
            self._pgconn.consume_input()
            calls = []
            while (call := self._pgconn.notifies()) is not None:
                calls.append(call.extra.decode(errors="replace"))
            if self._pgconn.status != ConnStatus.OK:
                self.close()
            return calls
        except OperationalError:
            self.close()
            return []

    def alive(self) -> bool:
        """Return whether it is still good, as far as can be told without asking."""
        if not self.open or self.pending or self._pgconn.status != ConnStatus.OK:
            return False
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        if poll.poll(0):
            # A notice, perhaps; or the end.
            self.take_in()
            return self._pgconn.status == ConnStatus.OK and not poll.poll(0)
        return True

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close it."""
        self.open = False
        self._pgconn.finish()

    def hang_up(self, how: int = socket.SHUT_RDWR) -> None:
        """Break it under whoever uses it, in another thread perhaps, who then closes it; with SHUT_RD only wake them."""
        if not self.open:
            return
        with suppress(OSError):
            copy = os.dup(self._descriptor)
            # libpq may have closed the descriptor in another thread, and the process may have reused its number.
            if os.path.samestat(os.fstat(copy), self._identity):
                with socket.socket(fileno=copy) as same:
                    same.shutdown(how)
            else:
                os.close(copy)

    def forget(self) -> None:
        """Let go of it in a forked child without a word to the server, which still serves the parent."""
        if self.open:
            self.open = False
            with suppress(OperationalError):
                silence(self)  # first: libpq says good-bye as it closes
            self._pgconn.finish()


class LoginRefused(OperationalError):
    """The server asked for a password, and then refused the connection."""


class Halfway:
    """A connection that is being made. Whoever is interrupted, or has no more time, leaves it to the next: it cannot be
    hurried.
    """

    __slots__ = ("conninfo", "pgconn", "until")

    def __init__(self, conninfo: bytes, pgconn: Connection, until: float) -> None:
        self.conninfo = conninfo
        self.pgconn = pgconn
        self.until = until
        """When its own time is over: then another one is made."""

    def fileno(self) -> int:
        """Return its descriptor."""
        return self.pgconn.socket

    def forget(self) -> None:
        """Let go of it in a forked child."""
        with suppress(OperationalError):
            silence(self)
        self.pgconn.finish()


async def connect(runtime: Runtime, place: Place, left: list[Halfway], limit: Deadline = PATIENT) -> Link:
    """Connect and log in, at one host after the other; go on with what was left halfway.

    Each host has its own time; if the limit is shorter, the first that hangs must not use up what is left for the others.
    """
    failed: list[str] = []
    cause: Exception | None = None
    for number, conninfo in enumerate(place.attempts):
        share = Deadline(runtime.now, min(place.seconds, limit.at_most(inf) / (len(place.attempts) - number)))
        try:
            halfway = _take_up(left, conninfo)
            if halfway is not None:
                try:
                    return Link(
                        runtime, await _dial(runtime, halfway, share.at_most(place.seconds), left), place.address
                    )
                except (OperationalError, TimeoutError):  # the server may have lost its patience with it
                    if limit.at is not None and share.passed:
                        raise
            # It looks names up, and waits for that.
            pgconn = await runtime.run_blocking(PGconn.connect_start, conninfo)
            halfway = Halfway(conninfo, pgconn, runtime.now() + place.seconds)
            seconds = place.seconds if limit.at is None else share.at_most(place.seconds)
            return Link(runtime, await _dial(runtime, halfway, seconds, left), place.address)
        except (OperationalError, TimeoutError) as error:
            failed += map(str.strip, str(error).splitlines())  # libpq says it twice if it tries with and without TLS
            cause = cause if isinstance(cause, LoginRefused) else error
    said = "; ".join(filter(None, dict.fromkeys(failed)))
    hint = next((HINTS[state] for words, state in SIGNS.items() if words in said), None)
    raise EngineUnavailable(f"{place.address}: {said}" + (f" ({hint})" if hint else "")) from cause


def _take_up(left: list[Halfway], conninfo: bytes) -> Halfway | None:
    for halfway in list(left):
        if halfway.conninfo == conninfo:
            with suppress(ValueError):  # another thread was faster
                left.remove(halfway)
                return halfway
    return None


async def _dial(runtime: Runtime, halfway: Halfway, seconds: float, left: list[Halfway]) -> Connection:
    until = runtime.now() + seconds
    pgconn = halfway.pgconn
    try:
        while True:
            if pgconn.status == ConnStatus.BAD:
                raise _failure(pgconn)
            if pgconn.status == ConnStatus.OK:
                return pgconn
            state = pgconn.connect_poll()
            if state == PollingStatus.OK:
                return pgconn
            if state == PollingStatus.FAILED:
                raise _failure(pgconn)
            if not await runtime.readable(pgconn.socket, until - runtime.now(), write=state == PollingStatus.WRITING):
                raise TimeoutError(f"no connection within {seconds:.3g} s")
    except BaseException as error:
        hurried = isinstance(error, TimeoutError) and runtime.now() < halfway.until and len(left) < HALFWAY_KEPT
        if hurried or not isinstance(error, Exception):
            left.append(halfway)
        else:
            pgconn.finish()
        raise


def _failure(pgconn: Connection) -> OperationalError:
    """Return why an attempt to connect failed. libpq does not say that a login was refused, but that it took a password."""
    asked = pgconn.used_password or pgconn.needs_password
    return (LoginRefused if asked else OperationalError)(pgconn.get_error_message())


def _word(word: str | int | float | bool) -> bytes:
    if word is True or word is False:
        return b"t" if word else b"f"
    return str(word).encode()


def _words(error: Exception) -> str:
    return " ".join(str(error).split())
