"""The connections of a client: ready for use, few, and never used by two at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import inf
from threading import Lock
from weakref import WeakSet

from fencelock.core.adopted_client import AdoptedClient
from fencelock.core.clock import PATIENT, Deadline
from fencelock.core.engine import time_to_answer
from fencelock.core.log import WARNING, log
from fencelock.core.runtime import Event, Runtime
from fencelock.engines.postgres.link import Halfway, Link, LoginRefused, Row, Statement, Word, connect
from fencelock.engines.postgres.place import DIAL_SECONDS, Place
from fencelock.engines.postgres.schema import before_tls
from fencelock.engines.postgres.trouble import AGAIN, MISSING, UNPREPARED, ServerError, translate
from fencelock.errors import ClientClosed, EngineUnavailable, OutcomeUnknown

MOST = 10
"""Connections of one client that ask at the same time; whoever comes then waits for one."""
KEPT = 8
IDLE_SECONDS = 1.0
"""A link that was not used for so long is looked at before it is used: servers and poolers hang up on the idle."""
SETTLE_SECONDS = 0.1
"""How long an answer that nobody wants any more is waited for, before another link is made."""
TRIES = 10
"""How often a step is tried that others' steps make fail; each time nothing was done."""

Prepare = Callable[[Link, Deadline], Awaitable[None]]


class Ticket:
    """The right to use one of the links."""

    __slots__ = ("__weakref__",)


class Links:
    """All links of a client to its server."""

    def __init__(self, runtime: Runtime, source: Place | AdoptedClient[Place], prepare: Prepare | None = None) -> None:
        self.address = source.address
        self.met = False
        """Whether there ever was a connection."""
        self.idle_default = "0"
        """The idle_session_timeout that sessions begin with."""
        self.weakness = ""
        """The setting that lets the server forget commits in a crash, as the last new connection found it."""
        self._runtime = runtime
        self._source = source
        self._seconds = source.seconds if isinstance(source, Place) else DIAL_SECONDS
        self._prepare = prepare
        self._idle: list[Link] = []
        # Weak, both: what an interrupt has made us lose in the middle of a step must not count for ever.
        self._all: WeakSet[Link] = WeakSet()
        self._tickets: WeakSet[Ticket] = WeakSet()
        self._queue: deque[Event] = deque()
        self._served = 0
        self._halfway: list[Halfway] = []
        self._left: list[Link] = []
        """Links that nobody was there for when they were made, or greeted."""
        self._mutex = Lock()
        self._closed = False
        self._warned = False

    # ------------------------------------------------------------------ asking

    async def run(
        self,
        statement: Statement,
        words: Sequence[Word],
        patience: float,
        *,
        urgent: bool = False,
        limit: Deadline = PATIENT,
    ) -> list[Row]:
        """Ask on any link; every step may be repeated, so one that a broken connection has lost is: once, in time."""
        try:
            _, rows = await self.timed(statement, words, patience, urgent=urgent, limit=limit)
        except OutcomeUnknown:
            if limit.passed:
                raise
            _, rows = await self.timed(statement, words, patience, urgent=urgent, limit=limit)
        return rows

    async def timed(
        self,
        statement: Statement,
        words: Sequence[Word],
        patience: float,
        *,
        urgent: bool = False,
        limit: Deadline = PATIENT,
    ) -> tuple[float, list[Row]]:
        """Ask on any link, which has to be there within the limit; return when that was sent, and the answer."""
        tries = TRIES
        while True:
            link = await self.take(patience, urgent=urgent, limit=limit)
            sent = self._runtime.now()
            try:
                return sent, await link.request(statement, words, time_to_answer(limit, patience))
            except ServerError as error:
                tries -= 1
                if error.state in MISSING or error.state == UNPREPARED:
                    link.close()  # if somebody dropped the schema, the next link makes it anew
                if (error.state not in AGAIN and error.state != UNPREPARED) or not tries:
                    raise translate(error, self.address) from error
                await self._runtime.sleep(0.01 * self._runtime.random())
            finally:
                self.give(link)

    # ------------------------------------------------------------------ having one

    async def take(self, patience: float, *, urgent: bool = False, limit: Deadline = PATIENT) -> Link:
        """Return a link that works, as far as can be told without asking; whoever takes one gives it back.

        Who finds all of them in use lines up, for as long as others are served: that there are many of us is no fault of the
        server's. What is urgent goes first.
        """
        ticket = Ticket()
        called = False
        while not self._admitted(ticket, called):
            turn = self._runtime.event()
            with self._mutex:
                if urgent or called:
                    self._queue.appendleft(turn)
                else:
                    self._queue.append(turn)
            served = self._served
            try:
                while not await turn.wait(patience) and len(self._tickets) >= MOST:
                    if self._served == served:
                        raise EngineUnavailable(f"{self.address}: all {MOST} connections of this client are busy")
                    served = self._served
                called = True
            finally:
                with self._mutex:
                    if turn in self._queue:
                        self._queue.remove(turn)
                    elif not called and self._queue:
                        self._queue.popleft().set()  # it was called, and interrupted before it could come
        try:
            link = await self.borrow(limit)
        except BaseException:
            self._put_back(ticket)
            raise
        link.ticket = ticket
        return link

    def _admitted(self, ticket: Ticket, called: bool) -> bool:
        with self._mutex:
            if len(self._tickets) >= MOST or (self._queue and not called):
                return False
            self._tickets.add(ticket)
            return True

    async def borrow(self, limit: Deadline = PATIENT) -> Link:
        """Return a link of which there may be any number; it is given back by `keep`."""
        while (link := self._pop()) is not None:
            usable = False
            try:
                usable = await self._usable(link)
            finally:
                if not usable:
                    self.drop(link)
            if usable:
                return link
        made: list[Link] = []
        try:
            # To its end even if the caller is cancelled: whoever is in such a hurry again finds it made.
            await self._runtime.shield(self._make_for(made, limit), 3 * self._seconds)
        except TimeoutError as error:
            self.check_open()
            raise EngineUnavailable(f"{self.address}: no connection in time") from error
        except BaseException:
            for link in made:
                self.keep(link)
            raise
        return made[0]

    async def _usable(self, link: Link) -> bool:
        if link.pending:
            return await link.settle(SETTLE_SECONDS)  # whoever used it before was interrupted
        return self._runtime.now() - link.used < IDLE_SECONDS or link.alive()

    async def _make_for(self, made: list[Link], limit: Deadline) -> None:
        made.append(await self.make(limit))

    def check_open(self) -> None:
        """Raise if the client is closed."""
        if self._closed:
            raise ClientClosed("this client is closed; connect again")

    def _pop(self) -> Link | None:
        self.check_open()
        with self._mutex:
            return self._idle.pop() if self._idle else None

    def _put_back(self, ticket: object) -> None:
        with self._mutex:
            self._tickets.discard(ticket)  # type: ignore[arg-type]
            self._served += 1
            if self._queue:
                self._queue.popleft().set()

    async def make(self, limit: Deadline = PATIENT) -> Link:
        """Connect, and see that the server is one that we can work with; all that within the limit."""
        link = self._left.pop() if self._left else await self._dial(limit)
        with self._mutex:
            self._all.add(link)
        try:
            if link.pending and not await link.settle(limit.at_most(self._seconds)):
                raise OutcomeUnknown(f"{self.address}: no answer to a greeting")
            self.idle_default, weakness = await before_tls(link, self.address, self._seconds, limit)
            self._note_weakness(weakness)
            if self._prepare is not None:
                await self._prepare(link, limit)
            self.met = True
            self.check_open()
        except Exception:
            self.drop(link)
            raise
        except BaseException:
            if self._closed:
                self.drop(link)
            else:
                self._left.append(link)  # greeted anew by the next who needs one
            raise
        return link

    def _note_weakness(self, weakness: str) -> None:
        """Log once that the server does not wait for its disk."""
        self.weakness = weakness
        if weakness and not self._warned:
            self._warned = True
            clock = "after a crash of its machine only its clock keeps tokens from repeating"
            log("postgres", WARNING, f"{self.address} does not wait for its disk ({weakness}): {clock}")

    async def know(self, limit: Deadline) -> None:
        """Connect, unless there was a connection before, to read the server's settings."""
        self.check_open()
        if not self.met:
            self.keep(await self.borrow(limit))

    async def _dial(self, limit: Deadline) -> Link:
        try:
            return await self._connect(limit)
        finally:
            if self._closed:
                self._finish()  # what was left halfway after it was closed

    async def _connect(self, limit: Deadline) -> Link:
        if isinstance(self._source, Place):
            return await connect(self._runtime, self._source, self._halfway, limit)
        return await self._source.connect(lambda place: self._connect_to(place, limit), LoginRefused, limit)

    async def _connect_to(self, place: Place, limit: Deadline) -> Link:
        self.address, self._seconds = place.address, place.seconds
        return await connect(self._runtime, place, self._halfway, limit)

    def give(self, link: Link) -> None:
        """Give a link back, for the next who needs one."""
        ticket, link.ticket = link.ticket, None
        self.keep(link)
        self._put_back(ticket)

    def keep(self, link: Link) -> None:
        """Have a link ready for whoever needs one."""
        with self._mutex:
            if link.open and not self._closed and len(self._idle) < KEPT:
                self._idle.append(link)
                return
            if not link.open:
                for other in self._idle:
                    other.used = -inf  # what broke this one may have broken them all: look before they are used
        self.drop(link)

    def drop(self, link: Link) -> None:
        """Close a link for good."""
        with self._mutex:
            self._all.discard(link)
        if link.open:
            link.close()

    # ------------------------------------------------------------------ the end

    def shut(self) -> None:
        """Lend no more links: whoever is woken while they are being closed must not line up anew."""
        self._closed = True

    def close(self) -> None:
        """Close all links; those who use one learn of it."""
        self._closed = True
        with self._mutex:
            idle, self._idle = self._idle, []
            used = set(self._all).difference(idle)
            self._all.clear()
        self._finish()
        self._left.clear()
        for link in idle:
            link.close()
        for link in used:
            link.hang_up()

    def _finish(self) -> None:
        with suppress(IndexError):  # two may come to do this
            while self._halfway:
                self._halfway.pop().pgconn.finish()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        self._mutex = Lock()
        links, self._all, self._idle, self._tickets = self._all, WeakSet(), [], WeakSet()
        self._queue.clear()
        for halfway in self._halfway:
            halfway.forget()
        self._halfway, self._left = [], []
        for link in list(links):
            link.forget()
