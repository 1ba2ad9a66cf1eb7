"""Who waits for a Redlock, and the hints that the nodes give."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencelock.core.runtime import Event
    from fencelock.engines.redis.link import Link


class Hint:
    """Counts the nodes that say that the lock came free; the bell rings when they are a majority."""

    __slots__ = ("_seat", "given")

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.given = False

    def set(self) -> None:
        """Take a hint."""
        if not self.given:
            self.given = True
            self._seat.hinted()


class Seat:
    """A claim that waits: its links, on which the nodes call it, and how often it has tried.

    Whoever takes it out of `_seats` has it, and its links, to itself.
    """

    __slots__ = ("_majority", "bell", "hints", "links", "ticket", "tries")

    def __init__(self, links: list[Link | None], bell: Event, majority: int, ticket: int) -> None:
        self.links = links
        self.bell = bell
        self.hints = [Hint(self) for _ in links]
        self.ticket = ticket
        self.tries = 0
        self._majority = majority

    def hinted(self) -> None:
        """Ring when a majority has called."""
        if sum(hint.given for hint in self.hints) >= self._majority:
            self.bell.set()

    def clear(self) -> None:
        """Forget what was called so far."""
        for hint in self.hints:
            hint.given = False
        self.bell.clear()
