"""One ZooKeeper session: it connects and reconnects, sends requests, and knows how long it must still live."""

from __future__ import annotations

from collections.abc import Callable
from random import sample
from typing import Any

from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import Connect, Create2, Delete, SetData, Sync
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from fencelock.core.engine import MAX_REPLY_TIMEOUT
from fencelock.core.runtime import Endpoint, Event, Runtime
from fencelock.core.sessions import Session
from fencelock.engines.zookeeper.connection import ZooKeeperConnection
from fencelock.engines.zookeeper.protocol import CloseSession, CreateContainer, Multi, Reply
from fencelock.engines.zookeeper.session_clock import CLAIM_SHARE, SessionClock
from fencelock.engines.zookeeper.url import ZooKeeperUrl
from fencelock.engines.zookeeper.watches import Watches
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown

FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Seconds between two rounds of connecting to all members."""
READ_SECONDS = 3600.0

THROUGH_LEADER = frozenset(request.type for request in (Create2, CreateContainer, Delete, SetData, Sync, Multi))


class ZooKeeperSession(Session[None]):
    """A session, and the claims that live as long as it does.

    `run` is its background task; it calls the listeners of `watches` and `on_end`, which must not wait.
    """

    def __init__(
        self, runtime: Runtime, url: ZooKeeperUrl, timeout: float, on_end: Callable[[ZooKeeperSession], None]
    ) -> None:
        super().__init__(None, timeout * CLAIM_SHARE, runtime.now())
        self.timeout = timeout
        """In seconds: the one that was asked for, then the one that the ensemble granted."""
        self.id = 0
        self.last_used = runtime.now()
        """When a claim or a reader used it last."""
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
        self._accepted = False
        """Whether the member at the other end of the connection has accepted the session."""
        self._zxid = 0
        self._begun = 0.0
        self._problem = "no reply"
        self._state_events: set[Event] = set()
        self.watches = Watches(self.send, lambda: self.id)

    @property
    def connected(self) -> bool:
        """Whether requests can be sent now."""
        connection = self._connection
        return self._accepted and not self.ended and connection is not None and connection.is_open

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
        connection = ZooKeeperConnection(self._url.login, self._handshake_done, self.watches.fire)
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
            served = self._accepted
            while self.connected:
                await connection.read(READ_SECONDS)
            if not served:
                self._problem = f"{endpoint.address}: {connection.problem}"
        finally:
            connection.close()
            self._zxid = self.zxid
            self._accepted = False
            self.watches.fire_all()
            self._wake()
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
        self._accepted = True
        self._wake()

    def _wake(self) -> None:
        for event in list(self._state_events):
            event.set()

    async def wait_connected(self, timeout: float) -> bool:
        """Wait until the session is connected or has ended; return whether it is connected."""
        await self._wait_until(lambda: self.connected or self.ended, timeout)
        return self.connected

    async def wait_ended(self, timeout: float) -> None:
        """Wait until the session has ended, at most `timeout` seconds."""
        await self._wait_until(lambda: self.ended, timeout)

    async def _wait_until(self, reached: Callable[[], bool], timeout: float) -> None:
        until = self._runtime.now() + timeout
        event = self._runtime.event()
        self._state_events.add(event)
        try:
            while not reached() and (left := until - self._runtime.now()) > 0:
                await event.wait(left)
                event.clear()
        finally:
            self._state_events.discard(event)

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
        if not self.connected and not await self.wait_connected(timeout):
            raise self.unavailable()
        event = self._runtime.event()
        sent = self._runtime.now()
        last = Reply(event)
        pairs = [(request, Reply()) for request in requests[:-1]]
        pairs.append((requests[-1], last))
        self._send_all(pairs)
        await event.wait(until - sent)
        if not last.answered:
            last.get()
            raise OutcomeUnknown(f"{self._url.name}: no reply within {timeout:g} s")
        assert self._clock is not None
        since = self._clock.answered(sent, self._runtime.now(), requests[0].type in THROUGH_LEADER)
        if since is not None:
            self.confirm_alive(since)
        return [reply for _, reply in pairs]

    def send(self, request: Any, on_done: Callable[[Reply], None]) -> None:
        """Send a request without waiting; `on_done` gets the reply, or an error, in the thread that reads."""
        self._send_all([(request, Reply(on_done=on_done))])

    def _send_all(self, pairs: list[tuple[Any, Reply]]) -> None:
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

    # ------------------------------------------------------------------ the end

    def reconnect(self) -> None:
        """Drop the connection, so that `run` connects again: this member does not reply."""
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        """End the session here. The ensemble expires it later: until then a lease of this client may be trusted."""
        if not self.ended:
            self.ended = True
            self._on_end(self)
            self._wake()
        self.reconnect()

    async def close(self, timeout: float) -> None:
        """End the session on the ensemble, too, if it is connected, and with it all its nodes."""
        if self.connected:
            event = self._runtime.event()
            self._send_all([(CloseSession(), Reply(event))])
            await event.wait(timeout)
        self.end()

    def detach_after_fork(self) -> None:
        """Drop it in a forked child, without sending anything."""
        self.ended = True
        if self._connection is not None:
            self._connection.detach_after_fork()
