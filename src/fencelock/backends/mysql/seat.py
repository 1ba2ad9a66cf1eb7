"""A connection that has a lock of GET_LOCK's, or asks for one."""

from __future__ import annotations

from enum import Enum

from fencelock.backends.mysql.link import Link, Reply
from fencelock.backends.mysql.statements import Taking
from fencelock.core import seats
from fencelock.core.world import World
from fencelock.model import Busy, Claim, Grant

SHORTEST = 0.3
"""Seconds that an answer is waited for at the least."""


class Stage(Enum):
    """How far a claim has come."""

    TRYING = "trying"
    WAITING = "waiting"
    HELD = "held"


class Seat(seats.Seat):
    """A claim and its connection. Whatever becomes of the claim, the end of the connection is its end."""

    __slots__ = ("heard", "key", "link", "replies", "sent", "stage", "taking", "token")

    def __init__(self, world: World, claim: Claim, link: Link, taking: Taking) -> None:
        super().__init__(world, claim, SHORTEST)
        self.link = link
        self.taking = taking
        self.key = taking.key
        self.stage = Stage.TRYING
        self.replies: list[Reply] = []
        self.token = 0
        self.sent = self.heard = world.now()

    def grant(self, since: float) -> Grant:
        """Return what is held."""
        return Grant(self.claim, self.token, since, self)

    def busy(self) -> Busy:
        """Return that it has to wait."""
        return Busy(self.claim, self.sent, None, self)

    def is_silent(self) -> bool:
        """Return whether it has the lock."""
        return self.stage is Stage.HELD

    def lives(self) -> bool:
        """Return whether the server has not hung up."""
        return self.link.wire.alive()
