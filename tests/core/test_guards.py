"""Blocks of one lease that nobody leaves while its event loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import fencelock
from fencelock import aio


def test_tasks_that_end_after_their_loop_release_the_shared_lease() -> None:
    """Tasks that share a lease, and end after their event loop was closed, release it."""

    async def stay(lease: aio.Lease) -> None:
        async with lease:
            await asyncio.sleep(60)

    async def share(locks: aio.Locks) -> tuple[aio.Lease, list[asyncio.Task[None]]]:
        lease = await locks.lock("x").acquire()
        tasks = [asyncio.create_task(stay(lease)) for _ in range(2)]
        await asyncio.sleep(0)
        return lease, tasks

    loop = asyncio.new_event_loop()
    lease, tasks = loop.run_until_complete(share(aio.connect("memory://closed-loop")))
    loop.close()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        cast("Coroutine[Any, Any, None]", task.get_coro()).close()
    assert not lease.remaining
    with fencelock.connect("memory://closed-loop") as others:
        assert not others.inspect("x").holders
