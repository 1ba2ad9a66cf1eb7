"""What is said of a lease whose renewal was answered too late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from fencelock import LossReason, aio
from fencelock.model import Grant, Renewal


@pytest.mark.parametrize("answer", Renewal)
def test_answer_after_the_deadline(monkeypatch: pytest.MonkeyPatch, answer: Renewal) -> None:
    """Whatever the engine says then, it was our own clock that ended the lease: engines end a session with its last one."""

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
