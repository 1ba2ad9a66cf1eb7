"""One node of a Redlock: how it is reached, and what it still has to undo."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from fencelock.core.clock import Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT
from fencelock.core.runtime import Runtime
from fencelock.engines.redis.dial import RedisConnector, ServerError
from fencelock.engines.redis.link import Link
from fencelock.engines.redis.links import Links
from fencelock.engines.redis.trouble import ANEW
from fencelock.errors import EngineUnavailable, FencelockError

DIAL_SECONDS = 1.0
"""How long connecting to a node may take: as long as the longest wait for its answer."""
LOOK_AGAIN = 0.01
MEND_FIRST, MEND_LAST = 0.5, 10.0
"""Seconds before a node that could not be reached is dialled again, by the way."""

_log = logging.getLogger("fencelock")


class Node:
    """One of the servers. While it cannot be reached nobody waits for it; it is dialled again beside the work."""

    def __init__(self, runtime: Runtime, connector: RedisConnector, prefix: str) -> None:
        self.links = Links(runtime, connector.telling(self._refused), prefix, FIRST_CONNECT_TIMEOUT)
        self.error: EngineUnavailable | None = None
        """Why it is out of reach, if it is."""
        self._runtime = runtime
        self.failed = -inf
        """When it was last found to be out of reach."""
        self._undoing: set[Link] = set()
        """Over which something was asked to be undone, and not waited for."""
        self._pay_again = self._anew = 0.0
        self._pay_pause = MEND_FIRST
        self._reenter = 0.0
        self._pause = MEND_FIRST
        self._mending = False

    @property
    def is_new(self) -> bool:
        """Whether nobody has tried to connect to it yet."""
        return self.error is None and not self._mending and not self.links.connected

    @property
    def is_dialled(self) -> bool:
        """Whether it is being connected to, and nobody knows yet whether it can be reached."""
        return self.error is None and self._mending

    def connect(self, patience: float, within: float = DIAL_SECONDS) -> None:
        """Connect beside the work."""
        self._mending = True
        try:
            self._runtime.spawn(self._mend(patience, within), "fencelock-mend")
        except BaseException:  # no more threads
            self._mending = False
            raise

    async def take(self, patience: float, dialling: Deadline) -> Link | None:
        """Return a link, or None while the node cannot be reached; one that is made here is made before that deadline."""
        if self.is_dialled:
            return None
        if self.error is None:
            link = self.links.idle(patience)
            if link is None and self.links.stuck:
                self._down(EngineUnavailable(f"{self.links.address}: no answer within {patience:g} s"))
            elif link is None and dialling.passed:  # others took all the time there was
                self.connect(patience)
                return None
            elif link is None:
                try:
                    link = await self.links.make(dialling.at_most(DIAL_SECONDS))
                except EngineUnavailable as error:
                    self._down(error)
            if link is not None:
                if self.links.owed:
                    await self._pay(link)
                return link
        if not self._mending and self._runtime.now() >= self._reenter:
            self.connect(patience)
        return None

    async def insist(self, patience: float, until: Deadline, limit: Deadline) -> Link | None:
        """Return a link to a node that is out of reach, if it is back: for when there are too few without it.

        Whoever dials it is waited for until then, and it is dialled here within the limit.
        """
        while self._mending and not until.passed:
            await self._runtime.sleep(LOOK_AGAIN)
        if self.error is None:
            return await self.take(patience, limit)
        if self._runtime.now() - self.failed < MEND_FIRST or limit.passed:
            return None
        try:
            link = self.links.idle(patience) or await self.links.make(limit.at_most(DIAL_SECONDS))
        except EngineUnavailable as error:
            self._down(error)
            return None
        self._up()
        return link

    def sent_undo(self, link: Link, undo: bytes) -> None:
        """Remember what was sent and not waited for until it is answered."""
        link.sent_undo(undo)
        if link not in self._undoing:
            self._undoing.difference_update([other for other in list(self._undoing) if not other.connection.open])
            self._undoing.add(link)

    def answered(self, answer: Any, link: Link) -> bool:
        """Take note of what it said; return whether the link is to be used again."""
        if type(answer) is not ServerError:
            self._pay_pause = MEND_FIRST
            return True
        now = self._runtime.now()
        if answer.kind not in ANEW or now < self._anew:
            return True
        # Not every time: if it is the same server again, dialling would be most of the work.
        self._anew = now + MEND_FIRST
        self.links.drop(link)
        return False

    def _refused(self, error: ServerError) -> None:
        """Owe what it may have refused to undo; nothing of that can do harm if it did not."""
        for link in list(self._undoing):
            self.links.owed.extend(link.undos)
            link.undos.clear()
        self._undoing.clear()
        now = self._runtime.now()
        if error.kind != "NOSCRIPT" and now >= self._pay_again:
            self._pay_again = now + self._pay_pause
            self._pay_pause = min(self._pay_pause * 2, MEND_LAST)

    async def _pay(self, link: Link) -> None:
        if self._runtime.now() < self._pay_again:
            return  # it refuses whatever it is asked
        debts = list(self.links.owed)
        await self.links.pay(link)
        for debt in debts:
            self.sent_undo(link, debt)

    def forget(self) -> None:
        """Begin anew in a forked child."""
        self.links.forget()
        self._undoing.clear()
        self.error, self._mending = None, False

    def _up(self) -> None:
        if self.error is not None:
            _log.warning("the Redlock node %s is back", self.links.address)
        self.error, self._pause = None, MEND_FIRST

    def _down(self, error: EngineUnavailable) -> None:
        if self.error is None:
            _log.warning("a Redlock node is out of reach: %s", error)
        self.error = error
        self.failed = self._runtime.now()
        self._reenter = self.failed + self._pause * (0.5 + self._runtime.random() / 2)
        self._pause = min(self._pause * 2, MEND_LAST)

    async def _mend(self, patience: float, within: float) -> None:
        try:
            link = self.links.idle(patience) or await self.links.make(within)
            try:
                if self.links.owed:
                    await self._pay(link)
            finally:
                self.links.give(link)
            self._up()
        except EngineUnavailable as error:
            self._down(error)
        except FencelockError:
            pass  # closed meanwhile
        finally:
            self._mending = False
