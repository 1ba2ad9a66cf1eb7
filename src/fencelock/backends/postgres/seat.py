"""A session that has an advisory lock, or waits for one: one at a time may speak on it."""

from __future__ import annotations

from threading import Lock

from fencelock.backends.postgres.link import Link
from fencelock.core.world import Event, World
from fencelock.model import Claim


class Seat:
    """A claim's own session. The keeper renews on it while its holder may be releasing it: they take turns."""

    __slots__ = (
        "_free",
        "_mutex",
        "_taken",
        "_world",
        "claim",
        "key",
        "late",
        "lined_up",
        "link",
        "looked",
        "sent",
        "token",
    )

    def __init__(self, world: World, claim: Claim, key: int, link: Link) -> None:
        self.claim = claim
        self.key = key
        self.link = link
        self.token: int | None = None
        """None while it waits."""
        self.sent = 0.0
        """When the statement that took the lock, or is to take it, was sent."""
        self.lined_up = False
        """Whether the server was asked to wait for the lock."""
        self.late = False
        """Whether the answer that the server owes is one to an earlier renewal."""
        self.looked = world.now()
        """When the server was last asked, over another connection, whether it still has the session of a waiter."""
        self._world = world
        self._mutex = Lock()
        self._taken = False
        self._free: Event | None = None

    def try_take(self) -> bool:
        """Take the turn if nobody has it."""
        with self._mutex:
            if self._taken:
                return False
            self._taken = True
            return True

    async def take(self, timeout: float) -> bool:
        """Take the turn, within that time; return whether it was had."""
        until = self._world.now() + timeout
        while not self.try_take():
            with self._mutex:
                if not self._taken:
                    continue
                if self._free is None:
                    self._free = self._world.event()
                free = self._free
            if not await free.wait(until - self._world.now()) and self._world.now() >= until:
                return self.try_take()
        return True

    def give(self) -> None:
        """Give the turn back."""
        with self._mutex:
            self._taken = False
            free, self._free = self._free, None
        if free is not None:
            free.set()
