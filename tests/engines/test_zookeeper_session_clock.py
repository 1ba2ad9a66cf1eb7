"""How long a session must still live on the leader, computed from the replies of one server."""

from __future__ import annotations

import random

import pytest

from fencelock.engines.zookeeper.session_clock import CLAIM_SHARE, HEARTBEAT_SHARE, SessionClock

TIMEOUT = 16.0
TTL = TIMEOUT * CLAIM_SHARE


def test_new_session_counts_immediately() -> None:
    """A new session counts from its first request."""
    clock = SessionClock(TIMEOUT, 100.0)
    assert clock.answered(100.5, 100.6, True) == 100.5


def test_regular_heartbeats_count_from_their_send_time() -> None:
    """With a heartbeat every sixteenth of the timeout, each reply of the leader counts from when its request was sent."""
    clock = SessionClock(TIMEOUT, 0.0)
    for beat in range(1, 200):
        sent = beat * TIMEOUT * HEARTBEAT_SHARE
        assert clock.answered(sent, sent + 0.1, True) == sent


def test_activity_after_a_silence_counts_once_it_was_reported() -> None:
    """After a silence the leader may know the old clock only: until a quarter of the timeout later, only those count."""
    clock = SessionClock(TIMEOUT, 0.0)
    assert clock.answered(9.0, 9.1, True) == pytest.approx(0.0 + TIMEOUT - TTL)
    assert clock.answered(13.0, 13.05, True) == pytest.approx(0.0 + TIMEOUT - TTL)
    assert clock.answered(13.1, 13.2, True) == 13.1  # the request of 9.0 was received by 9.1, and reported by 13.1


def test_reads_alone_prove_nothing() -> None:
    """A follower that is cut off answers reads: they count only after a later reply of the leader."""
    clock = SessionClock(TIMEOUT, 0.0)
    for step in range(1, 9):
        assert clock.answered(float(step), step + 0.1, False) is None
    assert clock.answered(9.0, 9.1, True) == 9.0


def test_reconnect_counts_immediately_and_drops_unreported_activity() -> None:
    """What the previous server received may never have been reported; a reconnect goes through the leader."""
    clock = SessionClock(TIMEOUT, 0.0)
    clock.answered(4.0, 4.1, False)
    clock.reconnected(6.0)
    clock.answered(5.9, 6.1, False)  # a reply of the previous server
    assert clock.answered(12.0, 12.1, True) == pytest.approx(6.0 + TIMEOUT - TTL)


def test_never_more_than_the_leader_can_know() -> None:
    """On random histories no lease outlives the session on a leader whose half tick is at most a quarter of the timeout."""
    for seed in range(300):
        rng = random.Random(seed)
        half_tick = rng.uniform(0.05, TIMEOUT / 4)
        report = rng.uniform(0, half_tick)
        clock, touched, unreported, now = SessionClock(TIMEOUT, 0.0), 0.0, False, 0.0
        while now < 200:
            now += rng.choice([0.2, 1.0, 1.0, 3.0, 9.0]) * rng.random()
            sent = now
            now += rng.random() * 0.3
            while report <= now:  # the follower reports to its leader
                if unreported:
                    touched, unreported = report, False
                report += half_tick
            unreported = True  # the follower receives our request just too late for that report
            if touched + TIMEOUT <= now:
                break  # the leader has expired the session
            since = clock.answered(sent, now, rng.random() < 0.7)
            if since is not None:
                assert since <= sent
                assert since + TTL <= touched + TIMEOUT + 1e-9, seed
