"""A release that says False, and what of it is certain."""

from __future__ import annotations

import pytest

import fencelock
from fencelock import LossReason
from fencelock.model import Grant


def test_release_overtaken_by_close_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that leaves its block while another one closes the client gets no LeaseLost."""
    losses: list[LossReason] = []
    with fencelock.connect("memory://overtaken", on_lost=lambda lease, reason: losses.append(reason)) as locks:
        client = locks._client
        release = client.engine.release

        async def overtaken(grant: Grant) -> bool:
            client.closed = True  # as close() does, step by step, in another thread
            for claim in list(client.unfinished.values()):
                await client.engine.abandon(claim)
            return await release(grant)

        monkeypatch.setattr(client.engine, "release", overtaken)
        with locks.lock("x") as lease:
            lease.check()
        assert lease.reason is None
        assert not losses
        client.closed = False
