"""A link to a server: one wire, and who is to be called on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from fencelock.backends.redis.scripts import packed
from fencelock.core.world import NO_ANSWER, Likely, Wire

EARLY_KEPT = 1000
"""Calls that are kept for claims of which nobody knows yet that they wait."""
HANDED_OVER = b"handed over"
"""What a release is answered if somebody else has the lock now."""

ID_DIGITS, TOKEN_DIGITS, ROUND_DIGITS = 32, 16, 10
"""As a rule: 128 bits, a time in µs until the year 2286, and what is counted from FIRST_ROUND on. Calls in which one of
them is longer or shorter are only known more slowly."""
FIRST_ROUND = 10 ** (ROUND_DIGITS - 1)
CALL = ID_DIGITS + 1 + TOKEN_DIGITS + 1 + ROUND_DIGITS
"""Bytes that are called, `id:token:round`."""
TOKEN_CALLED = slice(-TOKEN_DIGITS - 1 - ROUND_DIGITS - 2, -1 - ROUND_DIGITS - 2)
"""Where the token is then, before a line's end."""


class Bell(Protocol):
    """What is rung when somebody is called."""

    def set(self) -> None: ...


class Link:
    """One wire, the channel that it listens to, and the bells of those who wait there."""

    __slots__ = (
        "_listens",
        "after_you",
        "bells",
        "call_size",
        "calls",
        "channel",
        "handed_over",
        "release",
        "silent",
        "undos",
        "used",
        "wire",
    )

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.call_size = len(f">3\r\n{packed('message', channel)}{packed('.' * CALL)}")
        """Bytes in which somebody is called, as a rule."""
        self.after_you = f"*2\r\n{packed('SUBSCRIBE', channel)}"
        """Has the server say something to us before it does what follows. It writes first to whoever it had something for
        last: to whoever is called meanwhile then, and not to us, while the name is idle."""
        handed_over = f">3\r\n{packed('subscribe', channel)}:1\r\n{packed(HANDED_OVER.decode())}".encode()
        self.handed_over = Likely(len(handed_over), handed_over, pushed=False)
        """What it most likely says to that, and to the release that follows."""
        self._listens = False
        self.bells: dict[str, Bell] = {}
        self.calls: dict[str, str] = {}
        """What was called out, `token:round` by the id of the claim; perhaps before the answer that makes it wait is read."""
        self.release = "", b""
        """Whose lock may be called next, and what gives it back then, if others are to be called first."""
        self.silent = False
        """Whether the server has shown that it can be asked not to answer, and to call others first."""
        self.undos: deque[bytes] = deque()
        """What undoes something, was sent and not waited for; it may be lost with the wire."""
        self.used = 0.0
        self.wire: Wire

    def heard(self, push: Any) -> bool:
        """Take in a push: a call on our channel, `id:token:round`, or the answer to the first SUBSCRIBE (see `after_you`).

        Any other is ignored, whatever its form: servers push more than we ask for, such as maintenance notifications.
        """
        if push[:1] == [b"subscribe"]:
            listened, self._listens = self._listens, True
            return not listened
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
        while len(self.undos) > len(self.wire.owed):
            self.undos.popleft()

    def ended(self) -> None:
        """Let those who wait look for themselves."""
        for bell in list(self.bells.values()):
            bell.set()


def all_there(answers: Sequence[Any]) -> bool:
    """Return whether nothing is left to wait for."""
    return NO_ANSWER not in answers
