"""How long a session must still live, as far as the answers of any one server can tell.

The leader decides when a session is over: its timeout after it last heard of it, rounded up to a tick. But it hears of a
session on one of its followers only by the way: a follower notes who was heard of, and reports it when the leader asks, every
half tick (LearnerSessionTracker, Learner.ping, LearnerHandler's PING). Not even a write that the leader carries out counts as
a sign of life there (LeaderZooKeeperServer.submitLearnerRequest does not touch the session). If the follower breaks down
before its next report, the leader knows nothing of the latest signs.

What is certain: if a request went by way of the leader (a write, or a sync) and was answered, then everything that the
follower had heard half a tick before that was reported by then, on the same channel. A tick is at most half of a session's
timeout (minSessionTimeout is two ticks unless somebody changes that), so half a tick is at most a quarter of it. So:

- a sign of life counts, from when it was sent, once a request by way of the leader was sent a quarter of the timeout or
  more after its answer, and was answered;
- making a session, and reconnecting to it, is done with the leader and counts at once;
- with a sign every sixteenth of the timeout (`Sessions`), the leader must know one that is at most 5/16 of the timeout old
  whenever it answers: claims get two thirds of the timeout, counted from the request itself.
"""

from __future__ import annotations

from threading import RLock

RELAY = 1 / 4
"""A follower reports within this share of the timeout."""
SHARE = 2 / 3
"""What a claim gets of its session's timeout."""
BEAT = 1 / 16
"""How often a session shows that it lives."""


class Signs:
    """The signs of life of one session."""

    def __init__(self, timeout: float, begun: float) -> None:
        self._timeout = timeout
        self._known = self._begun = begun
        self._signs: tuple[tuple[float, float], ...] = ()
        """When each was sent, and when it was answered: those that the leader may not know of yet."""
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this

    def connected(self, begun: float) -> None:
        """Take in that a connection which was begun at that time was made: what the server before was told may be lost."""
        with self._mutex:
            self._known, self._begun = max(self._known, begun), begun
            self._signs = ()

    def answered(self, sent: float, now: float, by_leader: bool) -> float | None:
        """Take in an answer; return the time from which the session's claims live for their ttl, if that is known anew."""
        with self._mutex:
            # Nothing is changed in place: what a signal handler takes in meanwhile is lost at worst, which claims too little.
            known, signs, since = self._known, self._signs, None
            if by_leader:
                reported = 0
                while reported < len(signs) and signs[reported][1] + self._timeout * RELAY <= sent:
                    known = max(known, signs[reported][0])
                    reported += 1
                if reported:
                    signs = signs[reported:]
                since = min(sent, known + self._timeout * (1 - SHARE))
            # Hundreds in a second tell no more than a few: the gaps between these count.
            fresh = not signs or now - signs[-1][1] >= self._timeout * BEAT / 8
            if fresh and sent >= self._begun:
                signs = (*signs, (sent, now))
            self._known, self._signs = known, signs
            return since
