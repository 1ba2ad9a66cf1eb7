"""Moving a lock from one engine to another: one fence accepts the tokens of every engine after those of every other one."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from uuid import uuid4

import pytest

import fencelock
from fencelock.core.clock import wall_us
from fencelock.fences.memory import MemoryFence
from tests.contract.engines import ENGINE_CASES
from tests.servers.plugin import Session
from tests.support.waiting import eventually_blocking


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis_node", "redis_nodes", "etcd1", "zookeeper1", "postgres", "mariadb")
def test_fence_accepts_tokens_after_a_move_between_any_two_engines(engines: Session, tmp_path: Path) -> None:
    """For every ordered pair of engines, a fence that has seen a token of the first accepts the first token of the second.

    Tokens may run ahead of the clock a little (less than a second): a move takes longer than that.
    """
    urls = {}
    for case in ENGINE_CASES:
        folder = tmp_path / case.id
        folder.mkdir()
        urls[case.id] = case.url(None if case.server is None else engines.get(case.server), folder)
    assert len(urls) >= 9
    for pair in permutations(urls, 2):
        fence = MemoryFence()
        for name in pair:
            with (
                fencelock.connect(urls[name], namespace=f"move-{uuid4().hex}") as locks,
                locks.lock("account", timeout=30) as lease,
            ):
                fence.enter(lease)
                token = lease.token
            eventually_blocking(lambda token=token: wall_us() > token, "the clock has passed the token", timeout=1.0)  # type: ignore[misc]
