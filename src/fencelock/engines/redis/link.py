"""A link to a server: one wire, and who is to be called on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from fencelock.core.runtime import NO_REPLY, Connection

EARLY_KEPT = 1000
"""Calls that are kept for claims of which nobody knows yet that they wait."""


class Bell(Protocol):
    """What is rung when somebody is called."""

    def set(self) -> None: ...


class Link:
    """One wire, the channel that it listens to, and the bells of those who wait there."""

    __slots__ = ("bells", "calls", "channel", "connection", "undos", "used")

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.bells: dict[str, Bell] = {}
        self.calls: dict[str, str] = {}
        """What was called out, `token:round` by the id of the claim; perhaps before the answer that makes it wait is read."""
        self.undos: deque[bytes] = deque()
        """What undoes something, was sent and not waited for; it may be lost with the wire."""
        self.used = 0.0
        self.connection: Connection

    def heard(self, push: Any) -> bool:
        """Take in a push: a call on our channel, `id:token:round`, or the answer to SUBSCRIBE, for which it returns True.

        Any other is ignored, whatever its form: servers push more than we ask for, such as maintenance notifications.
        """
        if push[:1] == [b"subscribe"]:
            return True
        if push[:1] != [b"message"] or len(push) != 3 or type(push[2]) is not bytes:
            return False
        id, _, called = push[2].decode(errors="replace").partition(":")
        if (bell := self.bells.get(id)) is not None:
            bell.set()
        elif len(self.calls) >= EARLY_KEPT:
            self.calls.clear()
        self.calls[id] = called
        return False

    def sent_undo(self, undo: bytes) -> None:
        """Remember it until it is answered: what is owed is answered in order."""
        self.undos.append(undo)
        while len(self.undos) > len(self.connection.owed):
            self.undos.popleft()

    def ended(self) -> None:
        """Let those who wait look for themselves."""
        for bell in list(self.bells.values()):
            bell.set()


def all_there(answers: Sequence[Any]) -> bool:
    """Return whether nothing is left to wait for."""
    return NO_REPLY not in answers
