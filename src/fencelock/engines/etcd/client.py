"""The etcd client: connections to the members, login, repeated requests, and the cluster's identity and revision."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from fencelock.core.connect_once import ConnectOnce
from fencelock.core.engine import MAX_REPLY_TIMEOUT, reply_timeout
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Endpoint, Runtime
from fencelock.core.stream_connector import StreamConnector
from fencelock.engines.etcd.grpc import EtcdConnection, Headers, RawData
from fencelock.engines.etcd.messages import AUTHENTICATE, Header, login, read_token
from fencelock.engines.etcd.rpc_errors import RpcError
from fencelock.engines.etcd.url import EtcdUrl
from fencelock.errors import ClientClosed, EngineUnavailable, FencelockError, OutcomeUnknown

T = TypeVar("T")

CONNECT_TIMEOUT = 5.0
"""Seconds for connecting, all members together."""
MIN_CONNECT_TIMEOUT = 0.05
"""Seconds that each member gets even when the time is over."""
CHECK_AFTER = 1.0
"""A connection that was not used for this many seconds is checked before it is used."""
MAX_IDLE = 8
MAX_LOGINS = 3
"""How often one request may log in again: every change of a role makes all auth tokens invalid."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
"""Seconds between two rounds over all members."""
CLOSED = "this client is closed; connect again"
MIN_TIMEOUT = 0.3
"""The shortest time to wait for a reply, in seconds."""


def timeout_for(ttl: float) -> float:
    """Return how long to wait for a reply that concerns a lock with this ttl."""
    return reply_timeout(ttl, MIN_TIMEOUT)


class EtcdClient:
    """Sends requests to any member. One connection that all tasks share in asyncio; one per busy thread otherwise."""

    def __init__(self, runtime: Runtime, url: EtcdUrl, on_history_changed: Callable[[int], None]) -> None:
        self.cluster = 0
        self.revision = 0
        """The highest revision in a reply that needed a majority."""
        self._on_history_changed = on_history_changed
        """Called with the highest revision seen before, when the cluster was wiped, replaced or restored from a backup."""
        self._runtime = runtime
        self._shared = runtime.shares_connections
        self._url = url
        seconds = max(1.0, CONNECT_TIMEOUT / len(url.endpoints))
        self._endpoints = [Endpoint(*endpoint, url.tls, seconds) for endpoint in url.endpoints]
        self.address = ",".join(endpoint.address for endpoint in self._endpoints)
        self._next = int(runtime.random() * len(self._endpoints))
        """The endpoint to connect to. It starts at random, so that not all clients use the same member."""
        self._auth_token = ""
        self._idle: list[EtcdConnection] = []
        self._all: set[EtcdConnection] = set()
        self._connecting = ConnectOnce(runtime, f"etcd at {self.address}", self._connect)
        self.closing = False
        """Whether no more locks may be acquired; what close() has to send is still sent."""
        self._closed = False

    # ------------------------------------------------------------------ requests

    def check_open(self) -> None:
        """Raise ClientClosed if the client is closed, or being closed."""
        if self.closing:
            raise ClientClosed(CLOSED)

    async def request(self, method: str, message: bytes, timeout: float = MAX_REPLY_TIMEOUT) -> bytes:
        """Send a request that may be repeated, and return the reply. Raises FencelockErrors."""
        return (await self.request_counted(method, message, timeout))[0]

    async def request_counted(
        self, method: str, message: bytes, timeout: float = MAX_REPLY_TIMEOUT
    ) -> tuple[bytes, int]:
        """Send a request; return the reply, and how often it was sent.

        If it was sent twice, a transaction may have failed because the first one succeeded.
        """
        return await self.run(lambda connection, left: connection.call(method, message, left), timeout)

    async def run(self, work: Callable[[EtcdConnection, float], Awaitable[T]], timeout: float) -> tuple[T, int]:
        """Do something on a connection, and repeat it on the next member if one fails; return its result and the count.

        Raises OutcomeUnknown if it may have run, LeaseNotFound or another EngineUnavailable if it has not.
        """
        now = self._runtime.now
        until = now() + timeout
        count, failures, may_have_run, logins = 0, 0, False, 0
        failure: FencelockError | None = None
        while True:
            connection = self._get_idle() or await self._get_new(may_have_run, until - now())
            began, auth_token = now(), self._auth_token
            count += 1
            try:
                return await work(connection, max(0.001, until - began)), count
            except OutcomeUnknown as error:
                failure = failure or error  # what a member has said explains more than the silence after it
                may_have_run = True
                self.report_silence(connection, began)
            except RpcError as error:
                if error.needs_login and self._url.user and logins < MAX_LOGINS:
                    logins += 1
                    if self._auth_token == auth_token:  # else another caller has logged in meanwhile
                        self._auth_token = ""  # `_get_idle` returns None now, and the next connect logs in
                        self._retire(connection)
                    continue
                failure = error.translate(connection.address)
                failure.__cause__ = error
                if not error.retryable:
                    if may_have_run:
                        raise OutcomeUnknown(str(failure)) from failure
                    raise failure from error
                may_have_run = may_have_run or error.may_have_run
                self.avoid(connection)
            finally:
                self.give_back(connection)
            failures += 1
            pause = self._pause_after(failures)
            if now() + pause >= until or self._closed:
                if may_have_run and not isinstance(failure, OutcomeUnknown):
                    raise OutcomeUnknown(str(failure)) from failure
                raise failure
            if pause:
                await self._runtime.sleep(pause)

    def _pause_after(self, failures: int) -> float:
        """Return how long to wait before the next request: nothing, until all members have failed."""
        rounds, rest = divmod(failures, len(self._endpoints))
        if rest:
            return 0.0
        return min(FIRST_PAUSE * 2.0 ** (rounds - 1), LONGEST_PAUSE) * (0.5 + self._runtime.random() / 2)

    def check_header(self, header: Header, revision: int) -> None:
        """Check the header of a reply that needed a majority; `revision` is `self.revision` when the request was sent.

        A reply with a lower revision, or of another cluster, can only mean that the history has changed.
        """
        if header.cluster != self.cluster:
            before, self.cluster = self.cluster, header.cluster
            if before:
                message = (
                    f"the cluster was replaced or wiped (id {before:x}, now {header.cluster:x}): all locks are gone"
                )
                self._history_changed(message)
        elif header.revision < revision <= self.revision:  # else another reply has shown it already
            self._history_changed(
                f"the cluster went back from revision {revision} to {header.revision}, as when it is restored from a backup: "
                "locks may be gone, and tokens that clients get before they notice can repeat. "
                "Restore with --bump-revision --mark-compacted"
            )
        if header.revision > self.revision:
            self.revision = header.revision

    def _history_changed(self, message: str) -> None:
        seen, self.revision = self.revision, 0
        log("etcd", WARNING, f"etcd at {self.address}: {message}")
        self._on_history_changed(seen)

    # ------------------------------------------------------------------ connections

    async def take(self, timeout: float = CONNECT_TIMEOUT) -> EtcdConnection:
        """Return a connection; the caller gives it back."""
        return self._get_idle() or await self._get_new(False, timeout)

    def give_back(self, connection: EtcdConnection) -> None:
        """Return a connection for the next caller."""
        if not connection.usable:
            if not connection.raw.open or not self._shared or connection.idle:
                self._drop(connection)
        elif not self._shared:
            if self._closed or len(self._idle) >= MAX_IDLE:
                self._drop(connection)
            else:
                self._idle.append(connection)

    def _get_idle(self) -> EtcdConnection | None:
        """Return an idle connection, or the shared one; None if the caller has to connect, or to log in."""
        while self._idle and (self._auth_token or not self._url.user):
            try:
                connection = self._idle[-1] if self._shared else self._idle.pop()
            except IndexError:  # another thread took it
                break
            now = self._runtime.now()
            unused, connection.last_used = now - connection.last_used, now
            if connection.usable and (unused < CHECK_AFTER or (connection.raw.alive() and connection.usable)):
                return connection
            self._retire(connection)
        return None

    async def _get_new(self, may_have_run: bool, timeout: float) -> EtcdConnection:
        try:
            if not self._shared:
                return await self._connect(timeout)
            return await self._connecting.once(self._get_idle, self._keep, timeout)
        except EngineUnavailable as error:
            if may_have_run:
                raise OutcomeUnknown(str(error)) from error
            raise

    def _keep(self, connection: EtcdConnection) -> None:
        self._idle[:] = [connection]

    async def _connect(self, timeout: float) -> EtcdConnection:
        """Connect to the first member that can be reached."""
        until = self._runtime.now() + timeout
        errors: list[EngineUnavailable] = []
        for _ in self._endpoints:
            endpoint = self._next % len(self._endpoints)
            try:
                return await self._connect_to(endpoint, max(MIN_CONNECT_TIMEOUT, until - self._runtime.now()))
            except EngineUnavailable as error:
                errors.append(error)
                self._next = endpoint + 1
        if len(errors) == 1:
            raise errors[0]
        raise EngineUnavailable("; ".join(str(error) for error in errors)) from errors[0]

    async def _connect_to(self, endpoint: int, timeout: float) -> EtcdConnection:
        if self._closed:
            raise ClientClosed(CLOSED)
        where = self._endpoints[endpoint]
        connector = StreamConnector("etcd", where._replace(seconds=min(where.seconds, timeout)), RawData)
        connection = EtcdConnection(self._runtime, where.address, endpoint, self._headers)
        raw = await self._runtime.connect(connector, connection.receive, connection.ended)
        try:
            connection.attach(raw)
            self._all.add(connection)
            if self._closed:  # close() may not have seen this connection
                raise ClientClosed(CLOSED)
            if self._url.user and not self._auth_token:
                await self._log_in(connection, min(timeout, CONNECT_TIMEOUT))
        except BaseException:
            self._all.discard(connection)
            raw.close()
            raise
        return connection

    async def _log_in(self, connection: EtcdConnection, timeout: float) -> None:
        try:
            reply = await connection.call(AUTHENTICATE, login(self._url.user, self._url.password), timeout)
        except OutcomeUnknown as error:
            raise EngineUnavailable(f"etcd at {connection.address}: no reply to the login") from error
        except RpcError as error:
            raise EngineUnavailable(str(error.translate(connection.address))) from error
        self._auth_token = read_token(reply)

    def _headers(self, method: str) -> Headers:
        """Return the headers of a call. `hasleader`: a member without a leader refuses, instead of waiting for one."""
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http" if self._url.tls is None else b"https"),
            (b":path", method.encode()),
            (b":authority", self._endpoints[0].address.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"hasleader", b"true"),
        ]
        if self._auth_token and method != AUTHENTICATE:
            headers.append((b"token", self._auth_token.encode()))
        return headers

    def report_silence(self, connection: EtcdConnection, since: float) -> None:
        """Handle a request without a reply: a member that has sent nothing since then is avoided."""
        silent = connection.last_received <= since or not connection.raw.open
        if not silent and len(self._endpoints) == 1:
            return  # it is only slow, and there is no other member
        for other in list(self._idle):
            if other.endpoint == connection.endpoint and not self._shared:
                other.last_used = -inf  # check it before it is used: what broke this connection may have broken all
        self.avoid(connection)
        if silent:
            self._drop(connection)

    def avoid(self, connection: EtcdConnection) -> None:
        """Use another member, if there is one: this one has lost the others, refuses, or does not reply."""
        if len(self._endpoints) > 1:
            if self._next % len(self._endpoints) == connection.endpoint:
                self._next = connection.endpoint + 1
            self._retire(connection)
            for other in list(self._idle):
                if other.endpoint == connection.endpoint and not self._shared:
                    other.retired = True

    def _retire(self, connection: EtcdConnection) -> None:
        """Let the calls in flight finish, and start no new ones."""
        connection.retired = True
        if self._shared and connection in self._idle:
            self._idle.remove(connection)
        connection.watches.close()
        if connection.idle or not connection.raw.open:
            self._drop(connection)

    def _drop(self, connection: EtcdConnection) -> None:
        self._all.discard(connection)
        if self._shared and connection in self._idle:
            self._idle.remove(connection)
        connection.raw.close()

    def close(self) -> None:
        """Refuse new requests and close all connections; requests in flight end without a reply."""
        self.closing = self._closed = True
        for connection in list(self._all):
            connection.raw.close()
        self._all.clear()
        self._idle.clear()

    def detach_after_fork(self) -> None:
        """Drop the parent's connections in a forked child, without sending anything on them."""
        for connection in self._all:
            connection.raw.detach_after_fork()
        self._all, self._idle = set(), []
        self._connecting.clear()
