"""How long a session must still live on the leader, as far as the replies of one server show.

The leader expires a session when it has not heard of it for its timeout, rounded up to a tick. But it hears of a session on a
follower only indirectly: the follower notes which sessions were active, and reports them when the leader pings it, every half
tick (LearnerSessionTracker, Learner.ping, LearnerHandler's PING). Not even a write that the leader carries out counts as
activity there (LeaderZooKeeperServer.submitLearnerRequest does not touch the session). If the follower dies before its next
report, the leader knows nothing of the latest activity.

What is certain: if a request went through the leader (a write or a sync) and was answered, then everything that the follower
had received half a tick before that was reported by then, on the same channel. A tick is at most half of a session's timeout
(minSessionTimeout is two ticks unless an administrator changes it), so half a tick is at most a quarter of the timeout. So:

- a request counts as activity, from when it was sent, once a request through the leader was sent a quarter of the timeout or
  more after its reply, and was answered;
- the creation of a session, and a reconnect, go through the leader and count immediately;
- with a heartbeat every sixteenth of the timeout (`SessionPool`), the leader must know activity that is at most 5/16 of the
  timeout old whenever it answers: claims get two thirds of the timeout, counted from the request itself.
"""

from __future__ import annotations

from threading import RLock

REPORT_SHARE = 1 / 4
"""A follower reports within this share of the timeout."""
CLAIM_SHARE = 2 / 3
"""The share of its session's timeout that a claim gets as its ttl."""
HEARTBEAT_SHARE = 1 / 16
"""A session sends a heartbeat this often."""


class SessionClock:
    """The activity of one session, and what the leader must know of it."""

    def __init__(self, timeout: float, begun: float) -> None:
        self._timeout = timeout
        self._known = self._begun = begun
        self._unreported: tuple[tuple[float, float], ...] = ()
        """When each request was sent and answered, for those that the leader may not know of yet."""
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this

    def reconnected(self, begun: float) -> None:
        """Record a new connection, begun at that time. Activity that only the previous server knew of may be lost."""
        with self._mutex:
            self._known, self._begun = max(self._known, begun), begun
            self._unreported = ()

    def answered(self, sent: float, now: float, by_leader: bool) -> float | None:
        """Record a reply; return the time from which the session's claims live for their ttl, if that is new."""
        with self._mutex:
            # Nothing changes in place: a reply that a signal handler records meanwhile may get lost, which is safe.
            known, unreported, since = self._known, self._unreported, None
            if by_leader:
                reported = 0
                while reported < len(unreported) and unreported[reported][1] + self._timeout * REPORT_SHARE <= sent:
                    known = max(known, unreported[reported][0])
                    reported += 1
                if reported:
                    unreported = unreported[reported:]
                since = min(sent, known + self._timeout * (1 - CLAIM_SHARE))
            # Hundreds of replies in a second show no more than a few: only the gaps between them count.
            fresh = not unreported or now - unreported[-1][1] >= self._timeout * HEARTBEAT_SHARE / 8
            if fresh and sent >= self._begun:
                unreported = (*unreported, (sent, now))
            self._known, self._unreported = known, unreported
            return since
