"""One node of a Redlock: reconnects in the background, and gets the undos that it missed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import NO_REPLY, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redis.connector import RedisConnector, ServerError
from fencelock.engines.redis.errors import RECONNECT_KINDS
from fencelock.engines.redis.pool import RedisPool
from fencelock.errors import EngineUnavailable, FencelockError

CONNECT_TIMEOUT = 1.0
"""Seconds that reconnecting to a node may take: as long as the longest wait for its reply."""
PAUSE = 0.5
"""Seconds before a failed node is tried again."""
MAX_PENDING_UNDOS = 1000

_log = logging.getLogger("fencelock")


class Node:
    """One of the servers. Nobody waits for a node that cannot be reached: a background task reconnects to it."""

    def __init__(self, runtime: Runtime, connector: RedisConnector, prefix: str) -> None:
        self.pool = RedisPool(runtime, connector.on_error(self._on_error_reply), prefix, FIRST_CONNECT_TIMEOUT)
        self.error: EngineUnavailable | None = None
        """Why the node cannot be reached; None if it can, as far as is known."""
        self.connecting_since: float | None = None
        """When the background task that connects was started; None if there is none."""
        self.pending_undos: deque[bytes] = deque(maxlen=MAX_PENDING_UNDOS)
        """Undos that this node missed. Without them it keeps the claim until its ttl is over."""
        self._unconfirmed: dict[RedisConnection, deque[bytes]] = {}
        """Undos that were sent and have no reply yet; they may be lost with their connection."""
        self._runtime = runtime
        self._retry_at = -inf
        self._resend_at = self._replace_at = 0.0

    # ------------------------------------------------------------------ connections

    def get(self, timeout: float) -> RedisConnection | None:
        """Return a connection, or None if there is none now; then one is opened in the background, when it is time to."""
        self._retry_undos([connection for connection in list(self._unconfirmed) if not connection.raw.open])
        connecting = self.connecting_since  # read before the pool, where the task that connects puts its connection
        if self.error is None:
            connection = self.pool.get_idle(timeout)
            if connection is not None:
                return connection
            if self.pool.hung:
                self._set_down(EngineUnavailable(f"{self.pool.address}: no answer within {timeout:g} s"))
        if connecting is None and self._runtime.now() >= self._retry_at:
            self._start_connecting()
        return None

    def may_connect_soon(self, since: float) -> bool:
        """Return whether there is a connection now, or one that was begun after `since` may still come."""
        return self.error is None if self.connecting_since is None else self.connecting_since > since

    def close_if_replaced(self, connection: RedisConnection, error: ServerError) -> None:
        """Close a connection after an error which may mean that another server has the address by now."""
        now = self._runtime.now()
        if error.kind in RECONNECT_KINDS and now >= self._replace_at:
            self._replace_at = now + PAUSE  # if it is still the same server, do not reconnect for every reply
            self.pool.discard(connection)

    def _start_connecting(self) -> None:
        if self.connecting_since is not None:
            return
        self.connecting_since = self._runtime.now()
        try:
            self._runtime.spawn(self._connect(), "fencelock-reconnect")
        except BaseException:  # no more threads
            self.connecting_since = None
            raise

    async def _connect(self) -> None:
        try:
            timeout = FIRST_CONNECT_TIMEOUT if self.pool.run_id is None else CONNECT_TIMEOUT
            connection = await self.pool.connect(timeout)
            try:
                await self.send_pending_undos(connection)
            finally:
                self.pool.put_back(connection)
            self._set_up()
        except EngineUnavailable as error:
            self._set_down(error)
        except FencelockError:
            pass  # the client was closed meanwhile
        finally:
            self.connecting_since = None

    def _set_up(self) -> None:
        if self.error is not None:
            _log.warning("the Redlock node %s is back", self.pool.address)
        self.error, self._retry_at = None, -inf

    def _set_down(self, error: EngineUnavailable) -> None:
        if self.error is None:
            _log.warning("a Redlock node is out of reach: %s", error)
        self.error = error
        self._retry_at = self._runtime.now() + PAUSE * (0.5 + self._runtime.random() / 2)

    # ------------------------------------------------------------------ undos that this node missed

    @property
    def has_unconfirmed_undos(self) -> bool:
        """Whether the node has missed an undo, or may have."""
        return bool(self.pending_undos) or any(connection.raw.pending for connection in list(self._unconfirmed))

    def sent_undo(self, connection: RedisConnection, undo: bytes) -> None:
        """Remember an undo that was sent without waiting for its reply. The server replies in order."""
        undos = self._unconfirmed.setdefault(connection, deque())
        undos.append(undo)
        while len(undos) > len(connection.raw.pending):
            undos.popleft()

    async def send_pending_undos(self, connection: RedisConnection) -> None:
        """Send the undos that the node missed. Each may run twice. Those that fail again stay pending."""
        if not self.pending_undos or self._runtime.now() < self._resend_at:
            return
        undos: list[bytes] = []
        with suppress(IndexError):  # another thread may take some
            while self.pending_undos:
                undos.append(self.pending_undos.popleft())
        requests = [(connection.raw, undo) for undo in undos]
        try:
            replies = await self._runtime.request_all(requests, CONNECT_TIMEOUT, lambda _: True)
        except BaseException:  # cancelled: whether they arrived is unknown
            self.pending_undos.extend(undos)
            raise
        for undo, reply in zip(undos, replies, strict=True):
            if reply is NO_REPLY and connection.raw.open:
                self.sent_undo(connection, undo)
            elif reply is NO_REPLY or isinstance(reply, ServerError):
                self.pending_undos.append(undo)

    def _on_error_reply(self, error: ServerError) -> None:
        """Send all unconfirmed undos again: the error may be the reply to any of them, and an undo may run twice."""
        self._retry_undos(list(self._unconfirmed))
        now = self._runtime.now()
        if error.kind != "NOSCRIPT" and now >= self._resend_at:
            self._resend_at = now + PAUSE

    def _retry_undos(self, connections: Iterable[RedisConnection]) -> None:
        for connection in connections:
            self.pending_undos.extend(self._unconfirmed.pop(connection, ()))

    def detach_after_fork(self) -> None:
        """Start again without connections in a forked child."""
        self.pool.detach_after_fork()
        self.pending_undos.clear()
        self._unconfirmed.clear()
        self.error, self.connecting_since, self._retry_at = None, None, -inf
