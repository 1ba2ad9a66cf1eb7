"""Dedicated sessions: a connection per claim, on engines where a lock belongs to a server's session and ends with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from fencelock.core.engine import reply_timeout

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.model import Claim

SWEEP_AT = 64
"""DedicatedSessions among which those are looked for whose sessions the server has ended, after their leases were lost."""


class DedicatedSession(ABC):
    """A claim's own session. The keeper renews on it while its holder may be releasing it: they take turns.

    Whoever was interrupted while it waited for its turn leaves no trace: nobody is ever called by name.
    """

    __slots__ = ("_free", "_mutex", "_runtime", "_taken", "claim", "patience")

    def __init__(self, runtime: Runtime, claim: Claim, shortest: float) -> None:
        self.claim = claim
        self.patience = reply_timeout(claim.ttl, shortest)
        """Seconds that an answer is waited for."""
        self._runtime = runtime
        self._mutex = RLock()  # a signal handler that releases may interrupt whoever has it
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
        if self.try_take():
            return True
        until = self._runtime.now() + timeout
        while (left := until - self._runtime.now()) > 0:
            with self._mutex:
                if not self._taken:
                    self._taken = True
                    return True
                if self._free is None:
                    self._free = self._runtime.event()
                free = self._free
            await free.wait(left)
        return self.try_take()

    def give(self) -> None:
        """Give the turn back."""
        with self._mutex:
            self._taken = False
            free, self._free = self._free, None
        if free is not None:
            free.set()

    @abstractmethod
    def is_silent(self) -> bool:
        """Return whether it has a lock, and nobody waits for an answer on it."""

    @abstractmethod
    def lives(self) -> bool:
        """Return whether its session has not ended, as far as can be told without asking."""


S = TypeVar("S", bound=DedicatedSession)


class DedicatedSessions(dict[str, S], ABC):
    """All seats of a client, by the ids of their claims."""

    def __init__(self) -> None:
        super().__init__()
        self.sweep_at = SWEEP_AT

    def is_current(self, seat: S) -> bool:
        """Return whether the claim still has this seat: if not, its session may be somebody else's by now."""
        return self.get(seat.claim.id) is seat

    def try_take(self, seat: S) -> bool:
        """Take the turn, if nobody has it and the claim still has the seat."""
        if not seat.try_take():
            return False
        if self.is_current(seat):
            return True
        seat.give()
        return False

    def drop_ended(self, seat: S) -> None:
        """Drop a seat whose session the server no longer has, unless somebody uses or has used it meanwhile."""
        if self.try_take(seat):
            try:
                self.drop(seat)
            finally:
                seat.give()

    def sweep(self) -> None:
        """Drop the seats whose sessions have ended while nobody looked: those of leases that were lost."""
        for seat in list(self.values()):
            if seat.is_silent() and self.try_take(seat):
                try:
                    if not seat.lives():
                        self.drop(seat)
                finally:
                    seat.give()
        self.sweep_at = max(SWEEP_AT, 2 * len(self))

    @abstractmethod
    def drop(self, seat: S) -> None:
        """Forget a seat, and close its connection."""
