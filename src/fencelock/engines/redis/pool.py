"""The connections to one server: returns one that works, runs scripts over it, and replaces one that is broken."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from os import urandom
from typing import Any

from fencelock.core.connect_once import ConnectOnce
from fencelock.core.runtime import Command, Connection, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import CONNECT_TIMEOUT, RedisConnector, ServerError
from fencelock.engines.redis.errors import RECONNECT_KINDS, raise_for_error, reconnect_may_help
from fencelock.engines.redis.handshake import shake_hands, warn_about_server
from fencelock.engines.redis.scripts import Script
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

CHECK_AFTER_IDLE = 1.0
"""Seconds after which an unused connection is checked before use: servers close idle connections."""
MAX_IDLE_CONNECTIONS = 8


class RedisPool:
    """All connections to one server: a single one where the runtime shares connections, else one for each caller."""

    def __init__(
        self,
        runtime: Runtime,
        connector: RedisConnector,
        namespace: str,
        handshake_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self.address = connector.address
        self.run_id: bytes | None = None
        """The run id of the server that answered last; None before the first connection."""
        self.hung = False
        """Whether the last connection was given up because a reply was overdue."""
        self._handshake_timeout = handshake_timeout
        self._runtime = runtime
        self._shared = runtime.shares_connections
        self._now = runtime.now
        self._connector = connector
        self._namespace = namespace
        self._idle: list[RedisConnection] = []
        self._all: set[RedisConnection] = set()
        self._connect_once = ConnectOnce(runtime, f"Redis at {self.address}", self._connect)
        self._closed = False

    # ------------------------------------------------------------------ connections

    async def connect(self, timeout: float = inf) -> RedisConnection:
        """Return a new connection; where connections are shared, wait for one that another task is opening."""
        if not self._shared:
            return await self._connect(timeout)
        return await self._connect_once.once(self._shared_connection, self._set_shared_connection, timeout)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, idle or in use."""
        return bool(self._all)

    def get_idle(self, timeout: float) -> RedisConnection | None:
        """Return an open connection that works, or None. The caller puts it back. Raise ClientClosed after `close`."""
        while True:
            try:
                connection = self._idle[-1] if self._shared else self._idle.pop()
            except IndexError:
                break
            if self.usable(connection, timeout):
                return connection
            self.discard(connection)
        if self._closed:
            raise ClientClosed("this client is closed; connect again")
        return None

    def usable(self, connection: RedisConnection, timeout: float) -> bool:
        """Return whether a connection is open and has no reply that is overdue by more than the timeout.

        A connection whose replies were always this slow stays usable: a new one would be no faster, and callers with a
        longer timeout can still use it.
        """
        raw, now = connection.raw, self._now()
        # alive() also reads the socket's buffer: a caller that needs no more replies leaves the rest there.
        if _overdue(raw, timeout, now) and (not raw.alive() or _overdue(raw, timeout, now)):
            self.hung = raw.open
            return False
        idle, connection.last_used = now - connection.last_used, now
        return raw.open if idle < CHECK_AFTER_IDLE else raw.alive()

    def put_back(self, connection: RedisConnection) -> None:
        """Return a connection to the pool; close it if it is broken or there are enough."""
        if self._shared:
            return
        if connection.raw.open and len(self._idle) < MAX_IDLE_CONNECTIONS:
            if connection.notifications:
                connection.notifications.clear()
            self._idle.append(connection)
            return
        if not connection.raw.open:
            # The same outage may have broken all of them: check each before it is used.
            for other in list(self._idle):
                other.last_used = -inf
        self.discard(connection)

    def discard(self, connection: RedisConnection) -> None:
        """Close a connection and remove it from the pool."""
        self._all.discard(connection)
        if self._shared and connection in self._idle:
            self._idle.remove(connection)
        connection.raw.close()

    def _shared_connection(self) -> RedisConnection | None:
        return self._idle[-1] if self._idle and self._idle[-1].raw.open else None

    def _set_shared_connection(self, connection: RedisConnection) -> None:
        self._idle[:] = [connection]

    async def _connect(self, timeout: float = inf) -> RedisConnection:
        """Connect, subscribe and check the server. Connecting and the handshake may each take that long."""
        connection = RedisConnection(f"{self._namespace.replace(':', '/')}/call/{urandom(12).hex()}")
        connector = self._connector.with_timeout(timeout)
        connection.raw = await self._runtime.connect(connector, connection.on_push, connection.on_end)
        self._all.add(connection)
        try:
            timeout = min(self._handshake_timeout, timeout)
            info = await shake_hands(self._runtime, connection, self.address, self._namespace, timeout)
            self.run_id = warn_about_server(info, self.run_id, self.address)
            if self._closed:
                raise ClientClosed("this client is closed; connect again")
        except BaseException:
            self.discard(connection)
            raise
        connection.last_used = self._now()
        self.hung = False
        return connection

    # ------------------------------------------------------------------ requests

    async def run(
        self,
        script: Script | None,
        command: bytes | Command,
        timeout: float,
        connect_timeout: float = inf,
        *,
        once: bool = False,
    ) -> Any:
        """Run a script or a command, and repeat it over another connection, twice at most, if another server may be there.

        Repeat it also if the connection broke, unless it must run `once`. If this connection has waited for a
        reply for `connect_timeout` already, this request waits no longer than that, either.
        """
        repeats = 2
        while True:
            connection = self.get_idle(timeout) or await self.connect(connect_timeout)
            since = connection.raw.oldest_pending_since
            if since is not None and self._now() - since >= connect_timeout:
                timeout = min(timeout, connect_timeout)
            try:
                return await self.request(connection, script, command, timeout)
            except EngineUnavailable as error:
                broken = isinstance(error, OutcomeUnknown) and not connection.raw.open  # servers close idle connections
                if not repeats or not (reconnect_may_help(error) or (broken and not once)):
                    raise
                repeats -= 1
            finally:
                self.put_back(connection)

    async def request(
        self, connection: RedisConnection, script: Script | None, command: bytes | Command, timeout: float
    ) -> Any:
        """Run a script over this connection; send its text if the server does not know it. Raise the server's error."""
        try:
            reply = await connection.raw.request(command, timeout)
            if type(reply) is ServerError:
                if reply.kind == "NOSCRIPT" and script is not None and isinstance(command, bytes):  # it did not run
                    reply = await connection.raw.request(script.as_eval(command), timeout)
                self.check(reply, connection)
            return reply
        except OutcomeUnknown:
            # Connections that were last used before this one went silent are likely to be broken, too.
            self._discard_idle([other for other in self._idle if other.last_used < connection.last_used])
            raise

    async def scan(self, pattern: str, timeout: float) -> set[str]:
        """Return all keys that match a pattern."""
        found: set[str] = set()
        cursor = 0
        while True:
            command = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            next_cursor, keys = await self.run(None, command, timeout)
            found.update(key.decode() for key in keys)
            cursor = int(next_cursor)
            if not cursor:
                return found

    def check(self, reply: Any, connection: RedisConnection) -> None:
        """Raise the error that a reply stands for; close the connections if another server may be there by now."""
        if isinstance(reply, ServerError) and reply.kind in RECONNECT_KINDS:
            self.discard(connection)
            self._discard_idle(list(self._idle))  # they lead to the same server
        raise_for_error(reply, self.address)

    def _discard_idle(self, connections: list[RedisConnection]) -> None:
        for connection in connections:
            with suppress(ValueError):  # another thread took it at this moment, and checks it itself
                self._idle.remove(connection)
                self.discard(connection)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Close all connections. Waiters on them are woken."""
        self._closed = True
        for connection in list(self._all):
            connection.raw.close()
        self._all.clear()
        self._idle.clear()

    def detach_after_fork(self) -> None:
        """In a forked child, drop the parent's connections without sending anything over them."""
        for connection in self._all:
            connection.raw.detach_after_fork()
        self._all = set()
        self._idle.clear()
        self._connect_once.clear()


def _overdue(raw: Connection, timeout: float, now: float) -> bool:
    """Return whether a reply has been pending for longer than the timeout, and than is usual for this connection."""
    since = raw.oldest_pending_since
    return since is not None and now - since >= max(timeout, 2 * raw.last_latency)


def escape_pattern(text: str) -> str:
    """Return a pattern that matches the text and nothing else."""
    return "".join(f"\\{character}" if character in "*?[]\\^-" else character for character in text)
