"""The session of one claim, which has an advisory lock or waits for one."""

from __future__ import annotations

from fencelock.core import dedicated
from fencelock.core.runtime import Runtime
from fencelock.engines.postgres.connection import PostgresConnection
from fencelock.model import Claim

SHORTEST_REPLY_TIMEOUT = 0.5


class AdvisorySession(dedicated.DedicatedSession):
    """A claim's own session."""

    __slots__ = ("connection", "enqueued", "key", "previous_pending", "sent", "token")

    def __init__(self, runtime: Runtime, claim: Claim, key: int, connection: PostgresConnection) -> None:
        super().__init__(runtime, claim, SHORTEST_REPLY_TIMEOUT)
        self.key = key
        self.connection = connection
        self.token: int | None = None
        """None while the claim waits."""
        self.sent = 0.0
        """When the statement was sent that takes the lock."""
        self.enqueued = False
        """Whether LOCK_WAIT was sent."""
        self.previous_pending = False
        """Whether a reply was pending when the ping was due."""

    def is_idle(self) -> bool:
        """Return whether it has a lock, and no reply is pending."""
        return self.token is not None and not self.connection.pending

    def is_alive(self) -> bool:
        """Return whether the server has not closed the connection."""
        return self.connection.is_alive()
