"""What many claims share: a session, and the end of each claim on it."""

from __future__ import annotations

import pytest

from fencelock.core.sessions import Session, ttl_step

LADDER = (1.0, 2.0, 5.0, 10.0, 30.0)


@pytest.mark.parametrize(("ttl", "expected"), [(1, 1), (1.9, 1), (2, 2), (9.99, 5), (30, 30), (86400, 30), (0.5, 1)])
def test_ttl_step_is_at_most_the_ttl(ttl: float, expected: float) -> None:
    """The ttl of a session is at most the ttl of its first claim, unless that is below the lowest step."""
    assert ttl_step(ttl, LADDER) == expected


def test_claim_expires_before_its_session() -> None:
    """A claim that is no longer renewed expires at its own end, also while its session is alive."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 100, 10)
    session.confirm_alive(105)
    session.attach("a", 105, 10)
    assert session.expired_ids(109) == []
    assert session.expired_ids(110) == ["b"]
    session.remove("b")
    assert session.expired_ids(110) == []
    assert session.claims() == ["a"]


def test_late_keep_alive_reply_does_not_shorten_the_session() -> None:
    """The reply to an earlier keep-alive does not shorten what a later one has given."""
    session = Session("handle", ttl=10, since=100)
    session.confirm_alive(105)
    session.confirm_alive(103)
    assert session.since == 105
    assert session.alive(114.9)
    assert not session.alive(115)


def test_late_renewal_does_not_shorten_the_claim() -> None:
    """The reply to an earlier renewal does not shorten the claim."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 105, 10)
    session.attach("a", 103, 10)
    assert session.expired_ids(114.9) == []
    assert session.expired_ids(115) == ["a"]
    session.remove("a")
    session.attach("a", 101, 10)  # attached again
    assert session.expired_ids(110.9) == []
    assert session.expired_ids(111) == ["a"]


def test_removed_claim_is_over_at_once() -> None:
    """A removed claim is over at once, and the other claims of the session stay."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 100, 10)
    session.mark_expired("a")
    assert session.expired_ids(100) == ["a"]
    session.remove("a")
    assert session.expired_ids(100) == []


def test_claim_that_is_over_cannot_be_extended() -> None:
    """An expired claim is being removed: a late renewal does not extend it, a new attempt does."""
    session = Session("handle", ttl=10, since=100)
    session.attach("a", 100, 10)
    session.attach("b", 105, 10)
    assert session.extend("a", 101, 10)
    assert session.mark_expired_ids(110.9) == []
    assert session.mark_expired_ids(111) == ["a"]
    assert not session.extend("a", 110, 10)
    assert session.mark_expired_ids(111) == ["a"], "it is returned until the caller has removed it"
    assert session.extend("b", 110, 10)
    assert not session.extend("c", 110, 10)
    session.attach("a", 111, 10)
    assert session.mark_expired_ids(111) == []


def test_session_that_the_engine_ended_is_expired() -> None:
    """A session that the engine has ended is not alive, whatever the clock says."""
    session = Session("handle", ttl=10, since=100)
    session.ended = True
    assert not session.alive(101)
