"""A connection that has a lock of GET_LOCK's, or asks for one."""

from __future__ import annotations

from enum import Enum

from fencelock.core import dedicated
from fencelock.core.runtime import Runtime
from fencelock.engines.mysql.link import Link, Reply
from fencelock.engines.mysql.statements import Taking
from fencelock.model import Claim, Grant, Waiting

SHORTEST = 0.3
"""Seconds that an answer is waited for at the least."""


class Stage(Enum):
    """How far a claim has come."""

    TRYING = "trying"
    WAITING = "waiting"
    HELD = "held"


class Seat(dedicated.DedicatedSession):
    """A claim and its connection. Whatever becomes of the claim, the end of the connection is its end."""

    __slots__ = ("heard", "key", "link", "replies", "sent", "stage", "taking", "token")

    def __init__(self, runtime: Runtime, claim: Claim, link: Link, taking: Taking) -> None:
        super().__init__(runtime, claim, SHORTEST)
        self.link = link
        self.taking = taking
        self.key = taking.key
        self.stage = Stage.TRYING
        self.replies: list[Reply] = []
        self.token = 0
        self.sent = self.heard = runtime.now()

    def grant(self, since: float) -> Grant:
        """Return what is held."""
        return Grant(self.claim, self.token, since, self)

    def waiting(self) -> Waiting:
        """Return that it has to wait."""
        return Waiting(self.claim, self.sent, None, self)

    def is_silent(self) -> bool:
        """Return whether it has the lock."""
        return self.stage is Stage.HELD

    def lives(self) -> bool:
        """Return whether the server has not hung up."""
        return self.link.connection.alive()
