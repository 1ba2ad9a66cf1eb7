"""One ZooKeeper session: it connects and reconnects, sends requests, watches nodes, and knows how long it must still live."""

from __future__ import annotations

from collections.abc import Callable
from random import sample
from threading import RLock
from typing import Any

from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Connect, Create2, Delete, GetChildren, GetData, SetData, Sync
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.core.runtime import Endpoint, Event, Runtime
from fencelock.core.sessions import Session
from fencelock.engines.zookeeper.connection import ZooKeeperConnection
from fencelock.engines.zookeeper.protocol import CloseSession, CreateContainer, Multi, Reply
from fencelock.engines.zookeeper.session_clock import CLAIM_SHARE, SessionClock
from fencelock.engines.zookeeper.url import ZooKeeperUrl
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Seconds between two rounds of connecting to all members."""
READ_SECONDS = 3600.0

THROUGH_LEADER = frozenset(request.type for request in (Create2, CreateContainer, Delete, SetData, Sync, Multi))

Listener = Callable[[bool], None]
"""Called once: with True if the watched node is gone, with False if something else changed or the watch was lost."""


class ZooKeeperSession(Session[None]):
    """A session, and the claims that live as long as it does.

    `run` is its background task; it calls listeners and `on_end`, which must not wait.
    """

    def __init__(
        self, runtime: Runtime, url: ZooKeeperUrl, timeout: float, on_end: Callable[[ZooKeeperSession], None]
    ) -> None:
        super().__init__(None, timeout * CLAIM_SHARE, runtime.now())
        self.timeout = timeout
        """In seconds: the one that was asked for, then the one that the ensemble granted."""
        self.id = 0
        self.connected = False
        self.acl = OPEN_ACL_UNSAFE if url.login is None else CREATOR_ALL_ACL
        """Without a login all clients may use our nodes, with one only clients with the same login."""
        self._url = url
        # A member that cannot be reached must leave time for the others.
        self._endpoints = url.endpoints(max(0.5, min(MAX_REPLY_TIMEOUT, timeout / 6)))
        self._runtime = runtime
        self._on_end = on_end
        self._password = b"\0" * 16
        self._clock: SessionClock | None = None
        self._connection: ZooKeeperConnection | None = None
        self._zxid = 0
        self._begun = 0.0
        self._problem = "no reply"
        self._state_events: set[Event] = set()
        self._held: dict[str, Listener] = {}
        self._listeners: dict[str, dict[object, Listener]] = {}
        self._listener_mutex = RLock()  # a signal handler may release a lease in the middle of this

    @property
    def zxid(self) -> int:
        """The ensemble's latest transaction number that this session knows of."""
        return self._zxid if self._connection is None else max(self._zxid, self._connection.zxid)

    # ------------------------------------------------------------------ the background task

    async def run(self) -> None:
        """Connect, read and reconnect until the session ends."""
        pause = FIRST_PAUSE
        try:
            while not self.ended:
                for endpoint in sample(self._endpoints, len(self._endpoints)):
                    if await self._serve(endpoint):
                        pause = FIRST_PAUSE
                if not self.ended:
                    await self._runtime.sleep(pause * self._runtime.random())
                    pause = min(pause * 2, MAX_PAUSE)
        finally:
            self.end()

    async def _serve(self, endpoint: Endpoint) -> bool:
        """Connect to a member and read until the connection ends; return whether the session was connected."""
        if self.ended:
            return False
        self._begun = self._runtime.now()
        connection = ZooKeeperConnection(self._url.login, self._handshake_done, self._fired)
        handshake = Connect(0, self._zxid, round(self.timeout * 1000), self.id, self._password, False)
        try:
            await connection.open(self._runtime, endpoint, handshake)
        except EngineUnavailable as error:
            self._problem = str(error)
            return False
        self._connection = connection
        served = False
        try:
            if not self.ended:
                await connection.read(max(0.5, min(MAX_REPLY_TIMEOUT, self.timeout / 3)))
            served = self.connected
            while self.connected and connection.is_open:
                await connection.read(READ_SECONDS)
            if not served:
                self._problem = f"{endpoint.name}:{endpoint.port}: {connection.problem}"
        finally:
            connection.close()
            self._zxid = self.zxid
            self._disconnected()
            connection.fail_pending()
        return served

    def _handshake_done(self, handshake: Any) -> None:
        """The server has accepted the session, or has reported that it has expired (without a timeout)."""
        timeout = handshake.time_out / 1000
        if self._clock is None and timeout > 0:
            self.timeout, self._clock = timeout, SessionClock(timeout, self._begun)
            self.ttl, self.since = timeout * CLAIM_SHARE, self._begun
            self.id, self._password = handshake.session_id, handshake.passwd
        elif self._clock is None or timeout != self.timeout:
            # It has expired; or this member has other bounds for timeouts, and the deadlines of our leases would not hold.
            self.end()
            return
        else:
            self._clock.reconnected(self._begun)
            self.confirm_alive(self._begun)
        self.connected = not self.ended
        self._wake()

    def _disconnected(self) -> None:
        self.connected = False
        with self._listener_mutex:
            paths = list(self._listeners)
        for path in paths:
            self._fired(path, False)
        self._wake()

    def _wake(self) -> None:
        for event in list(self._state_events):
            event.set()

    async def wait_connected(self, timeout: float) -> bool:
        """Wait until the session is connected or has ended; return whether it is connected."""
        until = self._runtime.now() + timeout
        event = self._runtime.event()
        self._state_events.add(event)
        try:
            while not self.connected and not self.ended and (left := until - self._runtime.now()) > 0:
                await event.wait(left)
                event.clear()
        finally:
            self._state_events.discard(event)
        return self.connected

    # ------------------------------------------------------------------ requests

    async def request(self, *requests: Any, timeout: float) -> list[Reply]:
        """Send requests back to back and wait for the last reply: the others come before it.

        If one goes through the leader, the first does. Raise EngineUnavailable if nothing was sent, OutcomeUnknown if not
        everything was answered.
        """
        until = self._runtime.now() + timeout
        connection = self._connection
        if connection is not None and connection.is_interrupted:
            connection.close()  # `run` connects again, and this signal handler uses the new connection
            self.connected = False
        if not self.connected and not await self.wait_connected(timeout):
            raise self.unavailable()
        event = self._runtime.event()
        sent = self._runtime.now()
        last = Reply(event)
        pairs = [(request, Reply()) for request in requests[:-1]]
        pairs.append((requests[-1], last))
        self._send(pairs)
        await event.wait(until - sent)
        if not last.answered:
            last.get()
            raise OutcomeUnknown(f"{self._url.name}: no reply within {timeout:g} s")
        assert self._clock is not None
        since = self._clock.answered(sent, self._runtime.now(), requests[0].type in THROUGH_LEADER)
        if since is not None:
            self.confirm_alive(since)
        return [reply for _, reply in pairs]

    def _send(self, pairs: list[tuple[Any, Reply]]) -> None:
        connection = self._connection
        if connection is not None and self.connected:
            connection.send(pairs)
        else:
            for _, reply in pairs:
                reply.resolve(error=ConnectionLoss())

    async def prove_alive(self, since: float, timeout: float) -> bool:
        """Make the session's claims live for their ttl from `since` at least; return whether they do."""
        until = self._runtime.now() + timeout
        while self.since < since:
            await self.request(Sync("/"), timeout=max(0.0, until - self._runtime.now()))
            if self.since < since:
                # The member may not have reported to its leader for a while: give it the time.
                left = until - self._runtime.now()
                if left <= 0 or self.ended:
                    return False
                await self._runtime.sleep(min(left, self.timeout / 50))
        return True

    def unavailable(self) -> FencelockError:
        """Return the error for a session without a connection."""
        if self.ended:
            return OutcomeUnknown(f"{self._url.name}: the session ended")
        return EngineUnavailable(f"{self._url.name}: no connection; {self._problem}")

    # ------------------------------------------------------------------ watches

    def watch(self, path: str, key: object, listener: Listener, *, own: bool = False) -> None:
        """Call the listener when the node changes or is gone. `own`: it must belong to this session. It does not wait."""

        def done(reply: Reply) -> None:
            if reply.error is not None:
                self._fired(path, reply.no_node)
            elif own and reply.value[1].ephemeralOwner != self.id:
                self._fired(path, True)

        self._listen(path, key, listener)
        self._send([(GetData(path, True), Reply(on_done=done))])

    def watch_children(self, path: str, key: object, listener: Listener, seen: list[str]) -> None:
        """Call the listener when the node has other children than those that were seen. It does not wait."""

        def done(reply: Reply) -> None:
            if reply.error is not None or sorted(reply.value) != sorted(seen):
                self._fired(path, False)

        self._listen(path, key, listener)
        self._send([(GetChildren(path, True), Reply(on_done=done))])

    def _listen(self, path: str, key: object, listener: Listener) -> None:
        with self._listener_mutex:
            # Replaced as a whole: a signal handler that removes the last of the others removes their table.
            self._listeners[path] = {**self._listeners.get(path, {}), key: listener}

    def unwatch(self, path: str, key: object) -> None:
        """Remove a listener. The server's watch stays until the node changes: one for each path, however many listen."""
        with self._listener_mutex:
            listeners = self._listeners.get(path, {})
            listeners.pop(key, None)
            if not listeners:
                self._listeners.pop(path, None)

    def _fired(self, path: str, gone: bool) -> None:
        with self._listener_mutex:
            listeners = self._listeners.pop(path, {})
        for listener in list(listeners.values()):
            listener(gone)

    def hold(self, path: str, listener: Listener) -> None:
        """Call the listener when this node of the session is gone: it is watched from the next heartbeat on."""
        self._held[path] = listener

    def let_go(self, path: str) -> None:
        """Stop watching a held node."""
        if self._held.pop(path, None) is not None:
            self.unwatch(path, self)

    def watch_held(self) -> None:
        """Watch each held node without a watch: it is new, it was written to, or the connection is new."""
        for path, listener in list(self._held.items()):
            if self not in self._listeners.get(path, ()):
                self.watch(path, self, listener, own=True)

    # ------------------------------------------------------------------ the end

    def reconnect(self) -> None:
        """Drop the connection, so that `run` connects again: this member does not reply."""
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        """End the session here. The ensemble expires it later: until then a lease of this client may be trusted."""
        if not self.ended:
            self.ended, self.connected = True, False
            self._on_end(self)
            self._wake()
        self.reconnect()

    async def close(self, timeout: float) -> None:
        """End the session on the ensemble, too, if it is connected, and with it all its nodes."""
        if self.connected and not self.ended:
            event = self._runtime.event()
            self._send([(CloseSession(), Reply(event))])
            await event.wait(timeout)
        self.end()

    def detach_after_fork(self) -> None:
        """Drop it in a forked child, without sending anything."""
        self.connected, self.ended = False, True
        if self._connection is not None:
            self._connection.detach_after_fork()
