"""A release that says False, and what of it is certain."""

from __future__ import annotations

import pytest

import fencelock
from fencelock import LossReason
from fencelock.model import Grant


def test_overtaken_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that leaves its block while another one closes the client gets no LeaseLost."""
    told: list[LossReason] = []
    with fencelock.connect("memory://overtaken", on_lost=lambda lease, reason: told.append(reason)) as locks:
        client = locks._client
        release = client.engine.release

        async def overtaken(grant: Grant) -> bool:
            client.closed = True  # as close() does, step by step, in another thread
            for claim in list(client.in_flight.values()):
                await client.engine.abandon(claim)
            return await release(grant)

        monkeypatch.setattr(client.engine, "release", overtaken)
        with locks.lock("x") as lease:
            lease.check()
        assert lease.reason is None
        assert not told
        client.closed = False
