"""What many claims share: a session, and the end of each claim on it."""

from __future__ import annotations

import pytest

from fencelock.core.sessions import Session, ttl_step

LADDER = (1.0, 2.0, 5.0, 10.0, 30.0)


@pytest.mark.parametrize(("ttl", "expected"), [(1, 1), (1.9, 1), (2, 2), (9.99, 5), (30, 30), (86400, 30), (0.5, 1)])
def test_ttl_step(ttl: float, expected: float) -> None:
    """A session never outlives the ttl of its first claim, unless that is below the lowest step."""
    assert ttl_step(ttl, LADDER) == expected


def test_claim_expires_before_its_session() -> None:
    """A claim that is no longer renewed expires at its own end, also while the session is alive."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 100, 10)
    session.confirm_alive(105)
    session.attach("a", 105, 10)
    assert session.expired(109) == []
    assert session.expired(110) == ["b"]
    session.remove("b")
    assert session.expired(110) == []
    assert session.claims() == ["a"]


def test_answers_overtake_each_other() -> None:
    """An answer to an earlier sign of life never shortens what a later one has given."""
    session = Session("handle", ttl=10, since=100)
    session.confirm_alive(105)
    session.confirm_alive(103)
    assert session.since == 105
    assert session.alive(114.9)
    assert not session.alive(115)


def test_renewals_overtake_each_other() -> None:
    """An earlier renewal that is answered later never shortens what a lease was given."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 105, 10)
    session.attach("a", 103, 10)
    assert session.end_of("a") == 115
    assert session.expired(114) == []
    session.remove("a")
    session.attach("a", 101, 10)  # attached again
    assert session.end_of("a") == 111


def test_claim_that_is_given_up() -> None:
    """A claim that is given up is over at once, whatever it was kept for; the others stay."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 100, 10)
    session.expire_claim("a")
    assert session.expired(100) == ["a"]
    session.remove("a")
    assert session.expired(100) == []


def test_claim_that_is_over_cannot_be_extended() -> None:
    """A claim that is over is being removed: a renewal that comes late does not extend it, a new attempt does."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 105, 10)
    assert session.extend("a", 101, 10)
    assert session.expire(110.9) == []
    assert session.expire(111) == ["a"]
    assert not session.extend("a", 110, 10)
    assert session.expire(111) == ["a"], "it is returned until somebody has removed it"
    assert session.extend("b", 110, 10)
    assert not session.extend("c", 110, 10)
    session.attach("a", 111, 10)
    assert session.expire(111) == []


def test_session_that_the_engine_ended_is_expired() -> None:
    """A session that the engine has ended is not alive, whatever the clock says."""
    session = Session("handle", ttl=10, since=100)
    session.ended = True
    assert not session.alive(101)
