"""The sessions of a client: a few, shared by all its claims, each with a pulse that keeps it alive or ends it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from threading import RLock
from typing import Any

from kazoo.protocol.serialization import Create2, Exists, GetData, Sync

from fencelock.core.clock import wall_us
from fencelock.core.runtime import Event, Runtime
from fencelock.core.sessions import Session, ttl_step
from fencelock.engines.zookeeper.address import Address
from fencelock.engines.zookeeper.layout import Layout, Paths, ancestors, read, written
from fencelock.engines.zookeeper.link import Link
from fencelock.engines.zookeeper.signs import BEAT, RELAY
from fencelock.errors import ClientClosed, EngineUnavailable, FencelockError, InvalidTTL, OutcomeUnknown

LOGGER = logging.getLogger("fencelock")

LADDER = (
    0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 90, 120, 180, 300, 600, 1800, 3600, 86400,
)  # fmt: skip
"""Timeouts of sessions, in seconds. ZooKeeper as it comes gives 4 to 40."""
VISIT = 10.0
"""The timeout that is asked for when there is nothing to be held: what the ensemble makes of it does not matter."""
CONNECT = 5.0
CLOSE = 1.0
AHEAD = 2**50
"""How far in front of the clock, in microseconds, tokens may go on in a namespace that was removed: most of them are left."""
IDLE = 60.0
"""Seconds that a session is kept for the next claim."""

Clear = Callable[[Session[Link], str], Awaitable[None]]


class Sessions:
    """All sessions of a client.

    `on_end` is told, in any thread, of a session that is over; `clear` takes a claim that is over from the engine.
    """

    def __init__(
        self, runtime: Runtime, address: Address, paths: Paths, on_end: Callable[[Session[Link]], None], clear: Clear
    ) -> None:
        self.address = address
        self._runtime = runtime
        self._paths = paths
        self._on_end = on_end
        self._clear = clear
        self._closed = False
        self._layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this
        self._open: dict[float, Session[Link]] = {}
        self._used: dict[float, float] = {}
        self._opening: dict[float, Event] = {}
        self._pulses: dict[Link, Event] = {}

    # ------------------------------------------------------------------ getting one

    async def get(self, ttl: float, name: str, patience: float | None = None) -> Session[Link]:
        """Return the session for claims of this ttl; InvalidTTL if the ensemble gives none that is long or short enough."""
        seconds = ttl_step(ttl, LADDER)
        session = await self._at(seconds, patience)
        given = session.handle.seconds
        if given != seconds:
            bound = f"less than {given:g} s" if given > seconds else f"more than {given:g} s"
            least = "least" if given > seconds else "most"
            raise InvalidTTL(
                f"{name!r}: a ttl of {ttl:g} s takes a session of {seconds:g} s, and this ensemble gives none of {bound} "
                f"(minSessionTimeout and maxSessionTimeout on its servers); ask for a ttl of at {least} {given:g} s",
                name,
            )
        return session

    async def any(self, patience: float | None = None) -> Session[Link]:
        """Return a session for whoever only looks, or cleans up."""
        now = self._runtime.now()
        for session in list(self._open.values()):
            if session.handle.connected and self._usable(session, now):
                return session
        return await self._at(VISIT, patience)

    def _usable(self, session: Session[Link], now: float) -> bool:
        return session.alive(now) and session.handle in self._pulses

    async def _at(self, seconds: float, patience: float | None) -> Session[Link]:
        until = self._runtime.now() + (2 * CONNECT if patience is None else patience)
        while True:
            if self._closed:
                raise ClientClosed("this client is closed; connect again")
            now = self._runtime.now()
            session = self._open.get(seconds)
            if session is not None and self._usable(session, now):
                self._used[seconds] = now
                return session
            event = self._runtime.event()
            try:  # from here on: a Ctrl-C in between must not leave it to others to wait for us
                with self._mutex:
                    opening = self._opening.setdefault(seconds, event)
                if opening is not event:
                    if not await opening.wait(max(0.0, until - now)):
                        raise EngineUnavailable(f"{self.address.name}: another has been connecting for too long")
                    continue
                if session is not None:
                    self._end(session, tell=False)
                session = await self._make(seconds, CONNECT if patience is None else min(CONNECT, patience))
                if not self._closed:
                    self._used[seconds], self._open[seconds] = self._runtime.now(), session
                    continue
                self._end(session, tell=True)
            finally:
                if self._opening.get(seconds) is event:
                    del self._opening[seconds]
                event.set()

    async def _make(self, seconds: float, patience: float) -> Session[Link]:
        link = Link(self._runtime, self.address, seconds, lambda: self._on_end(link.session))
        wake = self._runtime.event()
        try:
            link.start()
            if not await link.ready(patience):
                raise link.away()
            await self.settle(link, patience)
            self._pulses[link] = wake
            self._runtime.spawn(self._pulse(link.session, wake), "fencelock-pulse")
        except BaseException:
            self._pulses.pop(link, None)
            link.end(tell=True)
            raise
        return link.session

    async def settle(self, link: Link, patience: float) -> None:
        """Read the layout, and write it where there is none: not yet, or not any more."""
        for _ in range(3):
            doubts = link.doubts
            if doubts:
                doubts = []
                link.watch(self._paths.layout, object(), doubts.append)
            asked = Exists(self._paths.locks, None), GetData(self._paths.layout, None)
            there, found = await link.request(*asked, patience=patience)
            if there.value is not None and not found.missing:
                content, stat = found.get()
                link.layout, link.doubts = read(content, stat.czxid, self._paths.layout), doubts
                if self._layout not in (None, link.layout):
                    LOGGER.warning(
                        "%s is not the ensemble that it was: its data were lost or removed", self.address.name
                    )
                self._layout = link.layout
                return
            made = [Create2(path, b"", link.acl, 0) for path in ancestors(self._paths.locks)]
            base = wall_us()
            if self._layout is not None:
                # Above all tokens that this client knows of, also if its clock is behind that of whoever began.
                base = max(base, min(self._layout.base + link.last - self._layout.czxid + 1, base + AHEAD))
            made.append(Create2(self._paths.layout, written(base), link.acl, 0))
            for answer in await link.request(*made, patience=patience):
                if not answer.existed and not answer.missing:
                    answer.get()
        raise EngineUnavailable(f"{self._paths.layout} cannot be made: somebody keeps removing it")

    # ------------------------------------------------------------------ the pulse

    async def _pulse(self, session: Session[Link], wake: Event) -> None:
        """Show that the session lives, for as long as it may; end it when it must not.

        Nothing else keeps it alive. If our event loop hangs, or our process is stopped, it runs out on the server.
        """
        link = session.handle
        tell = False  # if this is broken off, as its event loop ends, leases may be left that somebody trusts
        try:
            while not tell and not session.ended:
                await wake.wait(link.seconds * BEAT)
                now = self._runtime.now()
                if self._closed or not session.alive(now) or (not session.claims() and self._idle(session, now)):
                    tell = True
                elif link.connected:
                    await self._beat(session, now)
        finally:
            self._pulses.pop(link, None)
            self._end(session, tell=tell)

    async def _beat(self, session: Session[Link], now: float) -> None:
        link = session.handle
        try:
            # What is over goes first, each with an answer: either they go, or the session goes with all of them.
            for id in session.expire(now):
                await self._clear(session, id)
            link.nudge()
            link.rewatch()
            await link.request(Sync("/"), patience=link.seconds * RELAY)
        except OutcomeUnknown:
            if link.connected and self._runtime.now() - now >= link.seconds * RELAY:
                link.reset()
        except FencelockError:
            if link.connected:
                self._end(session, tell=False)

    def _idle(self, session: Session[Link], now: float) -> bool:
        with self._mutex:
            for seconds, other in list(self._open.items()):
                if other is session and now - self._used[seconds] < IDLE:
                    return False
        return True

    def _end(self, session: Session[Link], *, tell: bool) -> None:
        with self._mutex:
            for seconds, other in list(self._open.items()):
                if other is session:
                    self._open.pop(seconds, None)
        if not session.ended:
            session.handle.end(tell=tell)
            self._on_end(session)

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """End all sessions, and their nodes with them."""
        self._closed = True
        links: list[Any] = [session.handle for session in list(self._open.values())]
        there = [link for link in links if link.connected]
        for wake in list(self._pulses.values()):
            wake.set()
        for link in links:
            self._end(link.session, tell=True)
        until = self._runtime.now() + CLOSE
        for link in there:
            await link.over(max(0.0, until - self._runtime.now()))

    def forget(self) -> None:
        """Begin anew in a forked child, without a word on the parent's connections."""
        links = list(self._pulses)
        for link in links:
            link.forget()
        _forgotten.extend(links)
        self._begin()


_forgotten: list[Link] = []
"""What a child inherited: never cleaned up by Python, which would speak on it."""
