"""The rules for input, by themselves: an engine's traits may narrow the ttl, nothing else differs."""

from __future__ import annotations

from typing import Any

import pytest

import fencelock
from fencelock import aio
from fencelock.core import validation
from fencelock.core.validation import check_name, check_purpose, check_seconds, check_ttl
from fencelock.engines.memory import TRAITS
from fencelock.errors import GuaranteeUnavailable, InvalidName, InvalidTTL
from fencelock.model import TokenGuarantee, Traits

NARROW = Traits(engine="narrow", guarantee=TokenGuarantee.CLOCKED, fair=False, loss_pushed=False, ttl_min=2, ttl_max=60)


def test_traits_narrow_the_ttl() -> None:
    """An engine with a narrower range of ttls refuses others, and the error names its range."""
    assert check_ttl(2, NARROW) == 2.0
    assert check_ttl(60.0, NARROW) == 60.0
    for ttl in (1.99, 60.01):
        with pytest.raises(InvalidTTL, match="between 2 and 60 seconds on narrow"):
            check_ttl(ttl, NARROW, "x")
    assert isinstance(check_ttl(30, TRAITS), float)


@pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])
def test_ttl_above_one_hour_logs_one_warning(
    connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A ttl that was probably meant in milliseconds is logged once, with the lock's name if there is one."""
    monkeypatch.setattr(validation, "_warned_long_ttl", False)
    connect("memory://long-ttl", ttl=3600).lock("x", ttl=3600)
    assert caplog.records == []
    locks = connect("memory://long-ttl")
    for ttl in (30000, 7200):
        locks.lock("x", ttl=ttl)
    (warning,) = caplog.records
    assert warning.name == "fencelock.client"
    assert warning.getMessage().startswith("'x': ttl is in seconds: 30000 is 8.3 hours")
    monkeypatch.setattr(validation, "_warned_long_ttl", False)
    connect("memory://long-ttl", ttl=7200)
    assert caplog.messages[1].startswith("ttl is in seconds: 7200 is 2.0 hours")


@pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])
def test_timeout_above_one_hour_logs_one_warning(
    connect: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A timeout that was probably meant in milliseconds is logged once, with the lock's name."""
    monkeypatch.setattr(validation, "_warned_long_timeout", False)
    locks = connect("memory://long-timeout")
    locks.lock("x", timeout=3600)
    assert caplog.records == []
    locks.lock("x", timeout=30000)
    locks.multi("x", "y", timeout=30000)
    (warning,) = caplog.records
    assert warning.name == "fencelock.client"
    assert warning.getMessage().startswith("'x': timeout is in seconds: 30000 is 8.3 hours")


def test_name_is_returned_unchanged() -> None:
    """A valid name is returned as the same string."""
    for name in ("x", "e\u0301", "é", " x ", "X" * 1024):
        assert check_name(name) is name


@pytest.mark.parametrize(("name", "why"), [
    ("", "empty"), ("a\x00", "U\\+0000"), ("a\x85", "U\\+0085"), ("é" * 513, "1026"), ("\ud800", "surrogate"), (3, "int"),
])  # fmt: skip
def test_bad_name_error_says_why(name: Any, why: str) -> None:
    """The error for a bad name says what is wrong with it."""
    with pytest.raises(InvalidName, match=why):
        check_name(name, "a thing")
    with pytest.raises(InvalidName, match="a thing"):
        check_name(name, "a thing")


def test_check_seconds() -> None:
    """check_seconds returns a number of seconds, or None for None and infinite ones, and refuses all else."""
    assert check_seconds(None, "t", "x", zero=True) is None
    assert check_seconds(float("inf"), "t", "x", zero=True) is None
    assert check_seconds(10**400, "t", "x", zero=True) is None
    assert check_seconds(0, "t", "x", zero=True) == 0
    assert check_seconds(2, "t", "x", zero=False) == 2.0
    for bad in (-1, float("nan"), "1", True, -(10**400)):
        with pytest.raises(ValueError, match=r"^'x': t must"):
            check_seconds(bad, "t", "x", zero=True)
    with pytest.raises(ValueError, match="more than 0"):
        check_seconds(0, "t", "x", zero=False)


@pytest.mark.parametrize("guarantee", TokenGuarantee)
def test_check_purpose(guarantee: TokenGuarantee) -> None:
    """purpose="correctness" accepts consensus and durable tokens, and refuses quorum, clocked and memory ones."""
    traits = Traits(engine="some", guarantee=guarantee, fair=True, loss_pushed=True)
    check_purpose("efficiency", traits, "x")
    if guarantee in (TokenGuarantee.CONSENSUS, TokenGuarantee.DURABLE):
        check_purpose("correctness", traits, "x")
    else:
        with pytest.raises(GuaranteeUnavailable, match=guarantee.value) as caught:
            check_purpose("correctness", traits, "x")
        assert caught.value.name == "x"
