"""The sessions of a client: a few, shared by all its claims, each with a heartbeat that keeps it alive or ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kazoo.protocol.serialization import Sync

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Event, Runtime
from fencelock.core.sessions import ttl_step
from fencelock.engines.zookeeper.namespace import Namespace
from fencelock.engines.zookeeper.session import ZooKeeperSession
from fencelock.engines.zookeeper.session_clock import HEARTBEAT_SHARE, REPORT_SHARE
from fencelock.engines.zookeeper.url import ZooKeeperUrl
from fencelock.errors import ClientClosed, EngineUnavailable, FencelockError, InvalidTTL, OutcomeUnknown

TTL_STEPS = (
    0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 90, 120, 180, 300, 600, 1800, 3600, 86400,
)  # fmt: skip
"""Timeouts of sessions, in seconds. ZooKeeper's defaults allow 4 to 40."""
READER_TIMEOUT = 10.0
"""The session timeout to ask for when there is nothing to hold: any that the ensemble grants will do."""
CONNECT_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
IDLE_SECONDS = 60.0
"""Seconds that a session without claims is kept for the next one."""


class SessionPool:
    """All sessions of a client, one for each ttl step that its claims need.

    `on_end` is called, in any thread, with a session that has ended. `remove_expired` removes a claim from the engine.
    """

    def __init__(
        self,
        runtime: Runtime,
        url: ZooKeeperUrl,
        namespace: Namespace,
        on_end: Callable[[ZooKeeperSession], None],
        remove_expired: Callable[[ZooKeeperSession, str], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._url = url
        self._namespace = namespace
        self._on_end = on_end
        self._remove_expired = remove_expired
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._open: dict[float, ZooKeeperSession] = {}
        """The session for each ttl step."""
        self._connecting: dict[float, Event] = {}
        """Set when the session for a ttl step is open, or could not be opened."""
        self._running: set[ZooKeeperSession] = set()
        """All sessions with a background task; also those that are being opened."""

    # ------------------------------------------------------------------ getting one

    async def get(self, ttl: float, name: str, deadline: Deadline) -> ZooKeeperSession:
        """Return the session for claims of this ttl; raise InvalidTTL if the ensemble grants no such timeout."""
        step = ttl_step(ttl, TTL_STEPS)
        session = await self._get_or_open(step, deadline)
        granted = session.timeout
        if granted != step:
            bound, limit = ("less", "least") if granted > step else ("more", "most")
            raise InvalidTTL(
                f"{name!r}: a ttl of {ttl:g} s needs a session of {step:g} s, and this ensemble grants none of {bound} than "
                f"{granted:g} s (minSessionTimeout and maxSessionTimeout on its servers); use "
                f"a ttl of at {limit} {granted:g} s",
                name,
            )
        return session

    async def any(self, timeout: float = 2 * CONNECT_TIMEOUT) -> ZooKeeperSession:
        """Return any session, for reads and clean-up."""
        now = self._runtime.now()
        for session in list(self._open.values()):
            if session.connected and session.alive(now):
                return session
        return await self._get_or_open(READER_TIMEOUT, Deadline(self._runtime.now, timeout))

    async def _get_or_open(self, step: float, deadline: Deadline) -> ZooKeeperSession:
        """Return the open session of a step, or open one; one caller opens it, and the others wait."""
        while True:
            if self._closed:
                raise ClientClosed("this client is closed; connect again")
            now = self._runtime.now()
            session = self._open.get(step)
            if session is not None and session.alive(now):
                session.last_used = now
                return session
            event = self._runtime.event()
            try:  # from here on: after a Ctrl-C in between the others must not wait for us
                connecting = self._connecting.setdefault(step, event)
                if connecting is not event:
                    if not await connecting.wait(deadline.at_most(2 * CONNECT_TIMEOUT)):
                        raise EngineUnavailable(f"{self._url.name}: no connection in time")
                    continue
                if session is not None:
                    self._end(session)
                session = await self._open_session(step, deadline)
                if not self._closed:
                    self._open[step] = session
                    continue
                await self._close(session, CLOSE_TIMEOUT)
            finally:
                if self._connecting.get(step) is event:
                    del self._connecting[step]
                event.set()

    async def _open_session(self, step: float, deadline: Deadline) -> ZooKeeperSession:
        session = ZooKeeperSession(self._runtime, self._url, step, self._on_end)
        try:
            self._running.add(session)
            self._runtime.spawn(session.run(), "fencelock-zookeeper")
            if not await session.wait_connected(deadline.at_most(CONNECT_TIMEOUT)):
                raise session.unavailable()
            await self._namespace.load(session, deadline.at_most(CONNECT_TIMEOUT))
            self._runtime.spawn(self._heartbeat(session), "fencelock-heartbeat")
        except BaseException:
            self._end(session)
            raise
        return session

    # ------------------------------------------------------------------ the heartbeat

    async def _heartbeat(self, session: ZooKeeperSession) -> None:
        """Keep the session alive for as long as it may live; end it when it must not.

        Nothing else keeps it alive. If this event loop hangs, or this process is stopped, the ensemble expires it.
        """
        try:
            while not session.ended:
                await session.wait_ended(session.timeout * HEARTBEAT_SHARE)
                now = self._runtime.now()
                is_idle = not session.claims() and now - session.last_used >= IDLE_SECONDS
                if is_idle or self._closed or not session.alive(now):
                    await self._close(session, CLOSE_TIMEOUT)
                elif session.connected:
                    await self._beat(session, now)
        finally:
            # Not closed on the ensemble: if this task is cancelled because its loop ends, leases may still be trusted.
            self._end(session)

    async def _beat(self, session: ZooKeeperSession, now: float) -> None:
        report = session.timeout * REPORT_SHARE
        try:
            # Expired claims first, each with a reply: either they go, or the session goes with all its claims.
            for id in session.mark_expired_ids(now):
                await self._remove_expired(session, id)
            session.watches.watch_held()
            await session.request(Sync("/"), timeout=report)
        except OutcomeUnknown:
            if session.connected and self._runtime.now() - now >= report:
                session.reconnect()
        except FencelockError:
            if session.connected:
                self._end(session)

    # ------------------------------------------------------------------ the end

    def _end(self, session: ZooKeeperSession) -> None:
        self._forget(session)
        session.end()

    async def _close(self, session: ZooKeeperSession, timeout: float) -> None:
        self._forget(session)  # first: no new claim may use a session that is being closed
        await session.close(timeout)

    def _forget(self, session: ZooKeeperSession) -> None:
        self._running.discard(session)
        for step, other in list(self._open.items()):
            if other is session:
                self._open.pop(step, None)

    async def close(self) -> None:
        """End all sessions, and with them their nodes."""
        self._closed = True
        until = self._runtime.now() + CLOSE_TIMEOUT
        for session in list(self._running):
            await self._close(session, max(0.0, until - self._runtime.now()))

    def after_fork(self) -> None:
        """Start again in a forked child, without sending anything on the parent's connections."""
        for session in list(self._running):
            session.detach_after_fork()
        self._reset()
