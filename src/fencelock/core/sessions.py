"""Sessions: the liveness that many claims share, on engines where a key lives for as long as the session that made it.

A session has a ttl of its own and is kept alive by one sign of life for all its claims. That alone would keep a claim for
ever that nobody renews any more (its lease was dropped, or lost by its own clock while the session came back), as long as
others of the same session are renewed. So each claim has an end of its own here, and a session is given a sign of life only
after every claim that is over by now was taken from the engine: either they go, or the session goes with all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from threading import RLock
from typing import Generic, TypeVar

H = TypeVar("H")


def rung(ttl: float, ladder: Sequence[float]) -> float:
    """Return the ttl of the session for a claim: the largest rung at or below what was asked for.

    Above it, a holder that was killed would be missed for longer than its ttl.

    >>> rung(30, (1, 2, 5, 10, 30, 60)), rung(29.9, (1, 2, 5, 10, 30, 60))
    (30, 10)
    """
    return ladder[max(0, bisect_right(ladder, ttl) - 1)]


class Session(Generic[H]):
    """One session: how long it lives, when it last showed that it does, and the claims that hang on it.

    `handle` is the engine's own: a lease's number, a driver's client. All methods may be called from any thread.
    """

    def __init__(self, handle: H, ttl: float, since: float) -> None:
        self.handle = handle
        self.ttl = ttl
        self.since = since
        """When the last sign of life that was answered was sent: the session lives for its ttl from there at least."""
        self.ended = False
        """Whether the engine has ended it, or we have given it up: no claim may be made on it."""
        self._ends: dict[str, float] = {}
        self._first_end = inf
        """No claim is over before this: most looks are spared going through them all."""
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this

    def alive(self, now: float) -> bool:
        """Return whether the engine must still have it."""
        return not self.ended and now < self.since + self.ttl

    def keep(self, id: str, since: float, ttl: float) -> None:
        """Note that a claim hangs on the session, and is over unless it is kept again within its ttl.

        Renewals may overtake each other: an earlier one never shortens what a later one has given.
        """
        with self._mutex:
            self._ends[id] = end = max(since + ttl, self._ends.get(id, -inf))
            if end < self._first_end:
                self._first_end = end

    def extend(self, id: str, since: float, ttl: float) -> bool:
        """Extend a claim that hangs on the session; return False if it was removed, or is over and about to be removed."""
        with self._mutex:
            end = self._ends.get(id, -inf)
            if end == -inf:
                return False
            self._ends[id] = max(since + ttl, end)
            return True

    def give_up(self, id: str) -> None:
        """Have a claim be over now, however long it was kept for: it goes before the next sign of life."""
        with self._mutex:
            self._ends[id] = self._first_end = -inf

    def let_go(self, id: str) -> None:
        """Forget a claim that is no longer on the engine."""
        with self._mutex:
            self._ends.pop(id, None)

    def end_of(self, id: str) -> float | None:
        """Return when a claim is over, or None if it does not hang on this session."""
        return self._ends.get(id)

    def over(self, now: float) -> list[str]:
        """Return the claims that are over: they go before the next sign of life, or the session must end."""
        if now < self._first_end:
            return []
        with self._mutex:
            self._first_end = min(self._ends.values(), default=inf)
            return [id for id, end in self._ends.items() if end <= now]

    def expire(self, now: float) -> list[str]:
        """Return the claims that are over, and give them up: none of them can be extended while they are being removed."""
        with self._mutex:
            over = self.over(now)
            for id in over:
                self._ends[id] = -inf
            return over

    def claims(self) -> list[str]:
        """Return all claims that hang on it."""
        with self._mutex:
            return list(self._ends)

    def answered(self, sent: float) -> None:
        """Take in that a sign of life which was sent at that time was answered; answers may overtake each other."""
        with self._mutex:
            self.since = max(self.since, sent)
