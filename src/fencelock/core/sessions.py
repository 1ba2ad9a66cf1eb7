"""Sessions that many claims share, on engines where a key lives as long as the session that created it.

One keep-alive extends a session and all its claims. That alone would keep a claim for ever that its lease no longer renews
(the lease was dropped, or expired by its own clock), as long as other claims of the session are renewed. So each claim has
its own expiry here, and the engine sends a keep-alive only after it has removed every expired claim: either the expired
claims go, or the whole session ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from threading import RLock
from typing import Generic, TypeVar

H = TypeVar("H")


def ttl_step(ttl: float, steps: Sequence[float]) -> float:
    """Return the session ttl for a claim: the largest step at or below the claim's ttl.

    A longer session would hold the lock of a killed process for longer than the claim's ttl.

    >>> ttl_step(30, (1, 2, 5, 10, 30, 60)), ttl_step(29.9, (1, 2, 5, 10, 30, 60))
    (30, 10)
    """
    return steps[max(0, bisect_right(steps, ttl) - 1)]


class Session(Generic[H]):
    """One session: its ttl, its last confirmed keep-alive, and its claims.

    `handle` is the engine's own object: the id of an etcd lease, a driver's client. Any thread may call all methods.
    """

    def __init__(self, handle: H, ttl: float, since: float) -> None:
        self.handle = handle
        self.ttl = ttl
        self.since = since
        """When the last keep-alive with a reply was sent: the session lives for its ttl from there at least."""
        self.ended = False
        """Whether the engine or this client has ended it: no claim may use it."""
        self._ends: dict[str, float] = {}
        self._first_end = inf
        """No claim expires before this time, so most checks need not visit all claims."""
        self._mutex = RLock()  # a signal handler may release a lease while this thread holds the mutex

    def alive(self, now: float) -> bool:
        """Return whether the engine must still have the session."""
        return not self.ended and now < self.since + self.ttl

    def attach(self, id: str, since: float, ttl: float) -> None:
        """Attach a claim to the session until `since + ttl`, for an attempt; a claim that is attached ends no earlier.

        An attempt may attach a claim that was removed or has expired: the engine is about to create or find its key.
        """
        with self._mutex:
            self._ends[id] = end = max(since + ttl, self._ends.get(id, -inf))
            if end < self._first_end:
                self._first_end = end

    def extend(self, id: str, since: float, ttl: float) -> bool:
        """Extend an attached claim to `since + ttl`, for a renewal; return False if it was removed, or is being removed.

        Renewals may overtake each other, so an earlier one never shortens a later one.
        """
        with self._mutex:
            end = self._ends.get(id, -inf)
            if end == -inf:
                return False
            self._ends[id] = max(since + ttl, end)
            return True

    def mark_expired(self, id: str) -> None:
        """Expire a claim now: the engine removes it before the next keep-alive."""
        with self._mutex:
            self._ends[id] = self._first_end = -inf

    def remove(self, id: str) -> None:
        """Detach a claim that the engine no longer has."""
        with self._mutex:
            self._ends.pop(id, None)

    def expired_ids(self, now: float) -> list[str]:
        """Return the expired claims: the engine must remove them before the next keep-alive, or end the session."""
        if now < self._first_end:
            return []
        with self._mutex:
            self._first_end = min(self._ends.values(), default=inf)
            return [id for id, end in self._ends.items() if end <= now]

    def mark_expired_ids(self, now: float) -> list[str]:
        """Return the expired claims and mark them, so that no renewal extends them while they are being removed."""
        with self._mutex:
            expired = self.expired_ids(now)
            for id in expired:
                self._ends[id] = -inf
            return expired

    def claims(self) -> list[str]:
        """Return all attached claims."""
        with self._mutex:
            return list(self._ends)

    def confirm_alive(self, sent: float) -> None:
        """Record the reply to a keep-alive that was sent at this time. Replies may overtake each other."""
        with self._mutex:
            self.since = max(self.since, sent)
