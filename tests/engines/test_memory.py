"""What is peculiar to the memory engine: stores by name, a clock of its own, abandoned claims."""

from __future__ import annotations

import pytest

import fencelock
from fencelock import InvalidURL
from fencelock.engines.memory import AttemptReply, MemoryStore
from fencelock.model import Claim, Renewal


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    """The store's clock."""
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """A store on that clock."""
    return MemoryStore(now=clock, wall=lambda: 1_000_000)


def token(answer: AttemptReply) -> int:
    """Return the token of an answer that has one."""
    assert answer.token is not None
    return answer.token


def test_stores_by_name() -> None:
    """Clients of one name share a store; other names and namespaces are other stores."""
    with (
        fencelock.connect("memory://one") as one,
        fencelock.connect("memory://one") as same,
        fencelock.connect("memory://two") as two,
        fencelock.connect("memory://one", namespace="other") as other,
        one.lock("x"),
    ):
        assert same.lock("x").try_acquire() is None
        for free in (two, other):
            lease = free.lock("x").try_acquire()
            assert lease is not None
            lease.release()


@pytest.mark.parametrize("url", ["memory://a/b", "memory://a?b", "memory://a#b", "memory://u:s3cr3t@h"])
def test_bad_url(url: str) -> None:
    """A URL with more than a name is refused, without its password."""
    with pytest.raises(InvalidURL) as caught:
        fencelock.connect(url)
    assert "s3cr3t" not in str(caught.value)


def test_expiry(store: MemoryStore, clock: Clock) -> None:
    """A holder that is not renewed is over at its ttl, to the moment."""
    holder, waiter = Claim("x", 10), Claim("x", 10)
    first = token(store.attempt(holder, True))
    assert store.attempt(waiter, True) == AttemptReply(None, 10.0)
    clock.seconds += 9.999
    store.attempt(waiter, True)
    assert store.renew([holder]) == [Renewal.RENEWED]
    clock.seconds += 10
    assert store.renew([holder]) == [Renewal.LOST]
    assert token(store.attempt(Claim("x", 10), True)) > first
    assert store.release(holder) is False


def test_attempt_that_arrives_after_its_abandon(store: MemoryStore, clock: Clock) -> None:
    """An attempt that arrives after its own abandon is not granted, for one ttl."""
    claim = Claim("x", 10)
    store.abandon(claim)
    assert store.attempt(claim, True) == AttemptReply(None)
    assert store.inspect("x").holders == ()
    assert store.inspect("x").waiters == ()
    assert store.attempt(Claim("x", 10), True).token is not None


def test_tokens_rise_without_a_clock(store: MemoryStore) -> None:
    """Tokens rise although the wall clock stands still, over all names."""
    tokens = [token(store.attempt(Claim(f"n{number}", 10), False)) for number in range(100)]
    assert tokens == sorted(set(tokens))


def test_nothing_is_kept(store: MemoryStore) -> None:
    """A name that nobody uses any more leaves nothing behind."""
    for number in range(100):
        claim = Claim(f"n{number}", 10)
        store.attempt(claim, True)
        store.release(claim)
    assert store._queues == {}
