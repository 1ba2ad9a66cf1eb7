"""The ear of a client: one connection that listens, and whoever is called on it. It is there while somebody waits."""

from __future__ import annotations

from os import urandom
from socket import SHUT_RD
from threading import Lock

from fencelock.core.clock import Deadline
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.postgres.link import Link, Statement
from fencelock.engines.postgres.links import Links
from fencelock.engines.postgres.trouble import ServerError
from fencelock.errors import OutcomeUnknown

LOOK_SECONDS = 1.0
LINGER_SECONDS = 20.0
"""How long it goes on listening when nobody waits: making a connection costs more than a contended lock."""
ASK_SECONDS = 5.0
GOODBYE_SECONDS = 0.3
"""How long closing waits for the connection to be ended as the server likes it: what just breaks is in its log."""
SILENCE_SECONDS = 5.0
"""After so long without a call the server is asked whether it is still there: connections go dead without a word."""
STILL_THERE = Statement("fl_still_there", "SELECT")


class Seat:
    """A place in line: the bell that is rung when its claim is called."""

    __slots__ = ("bell", "round", "token")

    def __init__(self, bell: Event) -> None:
        self.bell = bell
        self.round = 0
        """The number of the attempt that it was taken or kept with: a call for an earlier one comes too late."""
        self.token: int | None = None


class Ear:
    """Hears who is called. The world runs it in the background: a thread, or a task."""

    def __init__(self, runtime: Runtime, links: Links) -> None:
        self.channel: str | None = None
        """Where to be called; None while nobody listens."""
        self.deaf = False
        """Whether there is a pooler between, which gives the connection to others after each statement."""
        self.seats: dict[str, Seat] = {}
        self._runtime = runtime
        self._links = links
        self._link: Link | None = None
        self._opening: Event | None = None
        self._ended: Event | None = None
        self._mutex = Lock()
        self._closed = False

    def sit(self, id: str, round: int) -> Seat:
        """Take or keep a place, before the engine is asked for it: it may call before it answers."""
        seat = self.seats.get(id)
        if seat is None:
            seat = self.seats[id] = Seat(self._runtime.event())
        seat.bell.clear()
        seat.round, seat.token = round, None
        return seat

    def rise(self, id: str) -> None:
        """Leave a place."""
        seat = self.seats.pop(id, None)
        if seat is not None:
            seat.bell.set()  # on close, somebody may be waiting for it

    async def open(self, patience: float, limit: Deadline) -> None:
        """Listen, from now on; whoever comes while that is being seen to waits for it.

        If whoever sees to it has no more time, the next one does.
        """
        mine = self._runtime.event()
        with self._mutex:
            if self.channel is not None or self.deaf or self._closed:
                return
            other = self._opening
            if other is None:
                self._opening = mine
        if other is not None:
            await other.wait(patience)
            return
        try:
            await self._open(limit)
        finally:
            self._opening = None
            mine.set()

    async def _open(self, limit: Deadline) -> None:
        link = await self._links.make(limit)
        try:
            if not link.direct:
                self.deaf = True
                self._links.drop(link)
                return
            channel = f"fencelock_{urandom(12).hex()}"
            await link.request(Statement("fl_listen", f'LISTEN "{channel}"'), (), limit.at_most(ASK_SECONDS))
            # All of this before the listener starts: it may end at once, and its end takes the channel back.
            self._ended = self._runtime.event()
            self._link, self.channel = link, channel
            self._runtime.spawn(self._listen(link), "fencelock-ear")
        except BaseException:
            self._drop(link)
            raise

    async def _listen(self, link: Link) -> None:
        """Ring the bells of those who are called, until nobody has waited for a while or the connection ends."""
        last = heard = self._runtime.now()
        ended = self._ended
        try:
            while link.open and not self._closed:
                for call in link.take_in():
                    self._heard(call)
                    heard = self._runtime.now()
                if self.seats:
                    last = self._runtime.now()
                elif self._runtime.now() - last > LINGER_SECONDS:
                    break
                if self.seats and self._runtime.now() - heard > SILENCE_SECONDS:
                    await link.request(STILL_THERE, (), ASK_SECONDS)
                    heard = self._runtime.now()
                elif link.open:
                    await self._runtime.readable(link.fileno(), LOOK_SECONDS)
        except (OutcomeUnknown, ServerError):
            pass  # it was dead: whoever waits next has another one made
        finally:
            self._drop(link)
            if ended is not None:
                ended.set()

    def _drop(self, link: Link) -> None:
        """Close a link, and have everybody who waits ask again: the first of them opens another."""
        if self._link is link:
            self.channel = self._link = None
        self._links.drop(link)
        for seat in list(self.seats.values()):
            seat.bell.set()

    def _heard(self, call: str) -> None:
        """Take a call in: `id:token:round`. Every session of the database may send anything; ignore what is none."""
        try:
            id, token, round = call.split(":")
            called, minted = int(round), int(token)
        except ValueError:
            return
        seat = self.seats.get(id)
        if seat is not None and seat.round == called:
            seat.token = minted
            seat.bell.set()

    async def close(self) -> None:
        """End it, and have whoever listens say good-bye; if that takes too long, the links break its connection."""
        self._closed = True
        for seat in list(self.seats.values()):
            seat.bell.set()
        link, ended = self._link, self._ended
        if link is not None and ended is not None:
            link.hang_up(SHUT_RD)
            await ended.wait(GOODBYE_SECONDS)

    def forget(self) -> None:
        """Begin anew in a forked child."""
        self._mutex = Lock()
        self.channel = self._link = self._opening = None
        self.seats.clear()
