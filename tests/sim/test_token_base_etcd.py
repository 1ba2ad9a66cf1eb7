"""The token base of etcd: the production engine in the simulated runtime, and mistakes that the checks must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest

from fencelock.engines.etcd import lock, messages, token_base
from fencelock.engines.etcd.engine import EtcdEngine
from fencelock.engines.etcd.keyspace import Numbering
from fencelock.engines.etcd.url import parse
from tests.sim.etcd_server import SimulatedEtcd, simulated_connections
from tests.sim.token_lab import LABEL, Lab

SEEDS, BATCH = 80, 20
MISTAKE_SEEDS = 400
"""A mistake must be found within so many seeds."""


def play(seed: int) -> Lab:
    """Run a seed; the lab has its violations."""
    lab = Lab(seed, SimulatedEtcd, lambda runtime: EtcdEngine(runtime, parse(f"etcd://{LABEL}"), "fencelock"))
    with simulated_connections():
        lab.run("fencelock.engines.etcd")
    return lab


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_tokens_rise_and_follow_the_clock(first: int) -> None:
    """With clocks that differ and jump, lost replies and crashes, tokens rise, no base is lowered, and none is behind."""
    tokens = raises = 0
    for seed in range(first, first + BATCH):
        lab = play(seed)
        assert lab.violations == [], f"seed {seed}"
        tokens += len(lab.tokens)
        raises += len(lab.server.bases) - 1
    assert tokens > 20 * BATCH, "hardly any lock was granted"
    assert raises > 2 * BATCH, "hardly any base was raised"


@contextmanager
def claim_does_not_compare_the_base() -> Iterator[None]:
    """The transaction that creates a claim succeeds although the base was raised."""

    def always(_: bytes, __: int) -> bytes:
        return messages.is_absent(b"no such key")

    with patch.object(messages, "is_modified_at", always):  # as lock.py calls it
        yield


@contextmanager
def holder_uses_the_base_that_it_knows() -> Iterator[None]:
    """A token is computed from the base that the client knows when it gets the lock, not from the copy in the claim."""
    decide = lock.Acquisition._decide

    async def wrong(self: lock.Acquisition, claim, own, *rest):  # type: ignore[no-untyped-def]
        known = self._token_base._known
        if own.data is not None and known is not None:
            own.data = own.data._replace(base=known.base)
        return await decide(self, claim, own, *rest)

    with patch.object(lock.Acquisition, "_decide", wrong):
        yield


@contextmanager
def raise_does_not_compare() -> Iterator[None]:
    """A client overwrites a base that another client has raised since it was read."""

    def always(_: bytes, __: int) -> bytes:
        return messages.is_absent(b"no such key")

    with patch.object(token_base, "is_modified_at", always):
        yield


@contextmanager
def base_follows_a_clock_that_goes_back() -> Iterator[None]:
    """A client whose clock is behind lowers the base."""
    right = token_base.next_numbering

    def wrong(stored: Numbering | None, revision: int, clock: int, min_token: int) -> Numbering:
        if stored is not None and stored.base + revision > clock + token_base.MAX_LAG:
            return stored._replace(base=clock - revision)
        return right(stored, revision, clock, min_token)

    with patch.object(token_base, "next_numbering", wrong):
        yield


@contextmanager
def base_is_never_raised() -> Iterator[None]:
    """A namespace keeps the base of its first use."""
    with patch.object(token_base, "MAX_LAG", 2**53):
        yield


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (claim_does_not_compare_the_base, "tokens rise"),
        (holder_uses_the_base_that_it_knows, "tokens rise"),
        (holder_uses_the_base_that_it_knows, "inspect"),
        (raise_does_not_compare, "base"),
        (base_follows_a_clock_that_goes_back, "base"),
        (base_is_never_raised, "behind the clock"),
    ],
)
def test_mistake_is_caught(broken: Callable[[], AbstractContextManager[None]], check: str) -> None:
    """The check that is there for a mistake finds it."""
    for seed in range(MISTAKE_SEEDS):
        with broken():
            lab = play(seed)
        if any(violation.startswith(f"{check}:") for violation in lab.violations):
            return
    pytest.fail(f"not found within {MISTAKE_SEEDS} seeds")
