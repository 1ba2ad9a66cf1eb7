"""The token base of ZooKeeper: the production engine in the simulated runtime, and mistakes that the checks must find.

A seed does not repeat a run exactly: a session wakes the callers that wait for its connection in the order of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from kazoo.protocol.serialization import Delete, SetData

from fencelock.engines.zookeeper import namespace
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from fencelock.engines.zookeeper.namespace import Namespace
from fencelock.engines.zookeeper.protocol import Multi
from fencelock.engines.zookeeper.queue import Queue, QueuedClaim
from fencelock.engines.zookeeper.url import parse
from fencelock.model import Grant
from tests.sim.token_lab import LABEL, Lab
from tests.sim.zookeeper_server import SimulatedZooKeeper

SEEDS, BATCH = 80, 20
MISTAKE_SEEDS = 400
"""A mistake must be found within so many seeds."""


def play(seed: int) -> Lab:
    """Run a seed; the lab has its violations."""
    url = parse(f"zookeeper://{LABEL}")
    lab = Lab(seed, SimulatedZooKeeper, lambda runtime: ZooKeeperEngine(runtime, url, "fencelock"))
    lab.run("fencelock.engines.zookeeper")
    return lab


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_tokens_rise_and_follow_the_clock(first: int) -> None:
    """With clocks that differ and jump, lost replies, crashes and new leaders, tokens rise, and no base is lowered."""
    tokens = raises = 0
    for seed in range(first, first + BATCH):
        lab = play(seed)
        assert lab.violations == [], f"seed {seed}"
        tokens += len(lab.tokens)
        raises += len(lab.server.bases) - 1
    assert tokens > 20 * BATCH, "hardly any lock was granted"
    assert raises > 2 * BATCH, "hardly any base was raised"


@contextmanager
def claim_does_not_check_the_base() -> Iterator[None]:
    """The transaction that creates a claim succeeds although the base was raised."""
    with patch.object(Namespace, "use_base", lambda self, _: SetData(self.paths.locks, b"", -1)):
        yield


@contextmanager
def holder_uses_the_base_that_it_knows() -> Iterator[None]:
    """A token is computed from the base that the client knows when it gets the lock, not from the copy in the claim."""
    granted = Queue._granted

    def wrong(self: Queue, queued: QueuedClaim) -> Grant:
        grant = granted(self, queued)
        return grant._replace(token=grant.token - queued.data.base + self._namespace.base)

    with patch.object(Queue, "_granted", wrong):
        yield


@contextmanager
def raise_leaves_the_old_base() -> Iterator[None]:
    """A raise adds a base and leaves the old one, so that clients which know the old one may use it."""

    def wrong(steps: Sequence[Any]) -> Multi:
        return Multi([step for step in steps if not isinstance(step, Delete)])

    with patch.object(namespace, "Multi", wrong):
        yield


@contextmanager
def base_follows_a_clock_that_goes_back() -> Iterator[None]:
    """A client whose clock is behind lowers the base."""
    with patch.object(namespace, "MAX_LAG_US", -(2**53)):
        yield


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (claim_does_not_check_the_base, "tokens rise"),
        (holder_uses_the_base_that_it_knows, "tokens rise"),
        (holder_uses_the_base_that_it_knows, "inspect"),
        (raise_leaves_the_old_base, "tokens rise"),
        (base_follows_a_clock_that_goes_back, "base"),
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
