"""A session that has an advisory lock, or waits for one."""

from __future__ import annotations

from fencelock.core import dedicated
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.link import Link
from fencelock.model import Claim

SHORTEST = 0.5
"""Seconds that an answer is waited for at the least."""


class Seat(dedicated.DedicatedSession):
    """A claim's own session, and what it was last asked."""

    __slots__ = ("key", "late", "lined_up", "link", "looked", "sent", "token")

    def __init__(self, runtime: Runtime, claim: Claim, key: int, link: Link) -> None:
        super().__init__(runtime, claim, SHORTEST)
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
        self.looked = runtime.now()
        """When the server was last asked, over another connection, whether it still has the session of a waiter."""

    def is_silent(self) -> bool:
        """Return whether it has a lock, and the server owes nothing."""
        return self.token is not None and not self.link.pending

    def lives(self) -> bool:
        """Return whether the server has not hung up."""
        return self.link.alive()
