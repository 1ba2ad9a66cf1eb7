"""The in-memory fence under asyncio."""

from __future__ import annotations

import asyncio

import pytest

from fencelock import FencelockError, StaleToken
from fencelock.fences.memory import MemoryFence
from tests.fences.fake_lease import fake_lease


def test_write_block_that_awaits() -> None:
    """While a task awaits inside its block, no other task of its thread can enter."""
    fence = MemoryFence()
    stock = {"apples": 100, "pears": 1}

    async def sell(go_on: asyncio.Event) -> None:
        with fence.write(fake_lease(33), "apples"):
            seen = stock["apples"]
            await go_on.wait()
            stock["apples"] = seen - 10

    async def use() -> None:
        go_on = asyncio.Event()
        slow = asyncio.create_task(sell(go_on))
        await asyncio.sleep(0)
        for work in (fence.enter, fence.check):
            with pytest.raises(FencelockError, match="must not await"):
                work(fake_lease(34), "apples")
        with pytest.raises(FencelockError, match="must not await"), fence.write(fake_lease(34), "apples"):
            stock["apples"] -= 5
        with fence.write(fake_lease(34), "pears"):  # another resource, as one may have two in one block
            stock["pears"] -= 1
        go_on.set()
        await asyncio.gather(slow, asyncio.create_task(sell(go_on)))

    asyncio.run(use())
    assert stock == {"apples": 80, "pears": 0}
    with fence.write(fake_lease(34), "apples"), fence.write(fake_lease(34), "apples"):
        stock["apples"] -= 5
    fence.enter(fake_lease(35), "apples")
    with pytest.raises(StaleToken):
        fence.enter(fake_lease(34), "apples")
