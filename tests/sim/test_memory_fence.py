"""The in-memory fence: what it accepts, what it refuses, and its errors."""

from __future__ import annotations

import doctest
import logging
import threading
from types import ModuleType, SimpleNamespace

import pytest

import fencelock.fences.memory
import fencelock.sim.check
import fencelock.sim.history
from fencelock.errors import StaleToken
from fencelock.fences import Fenced
from fencelock.fences.memory import MemoryFence


def holder(token: int, id: str = "me") -> Fenced:
    return SimpleNamespace(token=token, id=id)


@pytest.mark.parametrize("module", [fencelock.fences.memory, fencelock.sim.check, fencelock.sim.history])
def test_examples(module: ModuleType) -> None:
    """The examples in the docstrings do what they say."""
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_it_starts_at_the_first_token_seen() -> None:
    """An unknown resource accepts any token, and remembers it."""
    fence = MemoryFence()
    fence.enter(holder(5), "a")
    assert (fence.token("a"), fence.token("b")) == (5, None)


def test_an_older_token_is_refused() -> None:
    """An older token is refused everywhere, and the error names the resource and both tokens."""
    fence = MemoryFence()
    fence.enter(holder(34), "a")
    for step in (fence.enter, fence.check):
        with pytest.raises(StaleToken, match=r"'a' refused token 33: it has accepted token 34") as caught:
            step(holder(33), "a")
        assert (caught.value.name, caught.value.token, caught.value.seen) == ("a", 33, 34)
    fence.check(holder(34), "a")
    fence.check(holder(33), "b")


def test_an_equal_token_of_another_owner_is_refused() -> None:
    """Tokens that repeat after an engine lost its data differ by the claim's id."""
    fence = MemoryFence()
    fence.enter(holder(7, "one"), "a")
    with pytest.raises(StaleToken, match="token 7 of another claim"):
        fence.enter(holder(7, "other"), "a")
    fence.check(holder(7, "one"), "a")


def test_a_refused_write_does_not_begin() -> None:
    """The block of a write is not entered by an older token."""
    fence = MemoryFence()
    fence.enter(holder(2), "a")
    with pytest.raises(StaleToken):
        with fence.write(holder(1), "a"):
            pytest.fail("a stale write was accepted")


def test_no_other_token_enters_during_a_write() -> None:
    """Between the check of a write and its end no other thread enters, so no stale write can follow a check."""
    fence = MemoryFence()
    entered = threading.Event()

    def enter() -> None:
        fence.enter(holder(2), "a")
        entered.set()

    thread = threading.Thread(target=enter)
    with fence.write(holder(1), "a"):
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()


def test_rebase_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A fence that is rebased accepts lower tokens, and the change is logged."""
    fence = MemoryFence()
    fence.enter(holder(1000), "a")
    with caplog.at_level(logging.WARNING, "fencelock.fences"):
        fence.rebase("a", 5, reason="another engine")
    assert "the fence of 'a' was moved from token 1000 to token 5: another engine" in caplog.text
    with pytest.raises(StaleToken):
        fence.enter(holder(4), "a")
    fence.enter(holder(5, "one"), "a")
    with pytest.raises(StaleToken):
        fence.enter(holder(5, "other"), "a")
