"""What is said of a lease whose renewal was answered too late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from fencelock import LossReason, aio
from fencelock.model import Grant, Renewal


@pytest.mark.parametrize("answer", Renewal)
def test_reply_after_the_deadline_expires_the_lease(monkeypatch: pytest.MonkeyPatch, answer: Renewal) -> None:
    """Whatever a renewal replies after the deadline, the lease is lost as expired by the client's clock."""

    async def main() -> None:
        async with aio.connect("memory://late-renewal") as locks:
            lease = await locks.lock("x", ttl=0.3).acquire()

            async def late(grants: Sequence[Grant]) -> list[Renewal]:
                time.sleep(0.5)  # noqa: ASYNC251  the whole loop: the renewer must not see the end first
                return [answer] * len(grants)

            monkeypatch.setattr(locks._client.engine, "renew", late)
            assert await lease.lost.wait(20)
            assert lease.reason is LossReason.EXPIRED

    asyncio.run(main())
