"""Dedicated sessions: one connection per claim, on engines where a lock belongs to a session of the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, TypeVar

from fencelock.core.clock import Deadline
from fencelock.core.engine import reply_timeout
from fencelock.errors import FencelockError

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime
    from fencelock.model import Claim

SWEEP_AT = 64
"""Number of sessions at which `sweep` looks for sessions that the server has ended, after their leases were lost."""


class DedicatedSession(ABC):
    """A claim's own session. The renewer and a releasing holder take turns on it.

    A thread or task that is interrupted while it waits for its turn leaves nothing behind: the turn has no queue.
    """

    __slots__ = ("_free", "_mutex", "_runtime", "_taken", "claim", "reply_timeout")

    def __init__(self, runtime: Runtime, claim: Claim, shortest: float) -> None:
        self.claim = claim
        self.reply_timeout = reply_timeout(claim.ttl, shortest)
        """Seconds to wait for a reply."""
        self._runtime = runtime
        self._mutex = RLock()  # a signal handler that releases a lease may interrupt the thread that holds it
        self._taken = False
        self._free: Event | None = None

    def try_take(self) -> bool:
        """Take the turn if it is free; return whether it was."""
        with self._mutex:
            if self._taken:
                return False
            self._taken = True
            return True

    async def take(self, timeout: float) -> bool:
        """Take the turn, waiting at most `timeout` seconds; return whether it was taken."""
        until = self._runtime.now() + timeout
        while not self.try_take():
            if (left := until - self._runtime.now()) <= 0:
                return False
            with self._mutex:
                if not self._taken:
                    continue
                if self._free is None:
                    self._free = self._runtime.event()
                free = self._free
            await free.wait(left)
        return True

    def give(self) -> None:
        """Give the turn back and wake the waiting threads."""
        with self._mutex:
            self._taken = False
            free, self._free = self._free, None
        if free is not None:
            free.set()

    @abstractmethod
    def is_idle(self) -> bool:
        """Return whether it holds a lock and no request is pending on it."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether the server has not ended it, as far as the client knows without a request."""


S = TypeVar("S", bound=DedicatedSession)


class DedicatedSessions(dict[str, S], ABC):
    """All dedicated sessions of a client, by the ids of their claims."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime
        self.sweep_at = SWEEP_AT

    def add(self, session: S) -> None:
        """Add a new session, whose turn the caller takes. If there are many, drop those that have ended."""
        if len(self) >= self.sweep_at:
            self.sweep()
        session.try_take()
        self[session.claim.id] = session

    def is_current(self, session: S) -> bool:
        """Return whether the claim still has this session; otherwise another claim may use it."""
        return self.get(session.claim.id) is session

    def try_take(self, session: S) -> bool:
        """Take the turn if it is free and the claim still has the session."""
        if not session.try_take():
            return False
        if self.is_current(session):
            return True
        session.give()
        return False

    def drop_ended(self, sessions: Sequence[S]) -> None:
        """Drop those of the sessions that have lost their locks, so that the next renewal reports LOST.

        Call it after renewals without a reply: a firewall that dropped a connection swallows renewals, and the server's
        message that it ended the session. It runs in the background: the other leases of the batch must not wait for it.
        """
        if sessions:
            with suppress(RuntimeError):  # no more threads: the next renewal tries again
                self._runtime.spawn(self._drop_ended(sessions), "fencelock-lookup")

    async def _drop_ended(self, sessions: Sequence[S]) -> None:
        deadline = Deadline(self._runtime.now, min(session.reply_timeout for session in sessions))
        with suppress(FencelockError):  # nothing is known; the next renewal looks again
            held = await self.look_up(sessions, deadline)
            for session, is_held in zip(sessions, held, strict=True):
                if not is_held and self.try_take(session):  # otherwise another caller uses it, or has replaced it
                    try:
                        self.drop(session)
                    finally:
                        session.give()

    def sweep(self) -> None:
        """Drop the sessions of lost leases that the server has ended."""
        for session in list(self.values()):
            if session.is_idle() and self.try_take(session):
                try:
                    if not session.is_alive():
                        self.drop(session)
                finally:
                    session.give()
        self.sweep_at = max(SWEEP_AT, 2 * len(self))

    @abstractmethod
    def drop(self, session: S) -> None:
        """Remove a session and close its connection."""

    @abstractmethod
    async def look_up(self, sessions: Sequence[S], deadline: Deadline) -> list[bool]:
        """Ask over another connection which of the sessions still hold their locks."""
