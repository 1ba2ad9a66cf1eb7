"""Steps that many tests share: wait for waiters, a renewal or a free lock, acquire and release, run beside the body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fencelock.errors import EngineUnavailable
from tests.contract.runtimes import LeaseView, LocksView, core_of
from tests.support.waiting import SOON, eventually


async def waiting(locks: LocksView, name: str, number: int = 1) -> None:
    """Wait until so many claims are queued."""

    async def are() -> bool:
        return len((await locks.inspect(name)).waiters) == number

    await eventually(are, f"{number} claims wait for {name!r}")


async def wait_until_unclaimed(locks: LocksView, name: str, timeout: float = SOON) -> None:
    """Wait until the name has neither holders nor waiters."""

    async def free() -> bool:
        seen = await locks.inspect(name)
        return not seen.holders and not seen.waiters

    await eventually(free, f"nobody holds or waits for {name!r}", timeout)


async def renewed(lease: LeaseView, times: int = 1) -> None:
    """Wait until the lease has been renewed so many more times. Only a renewal moves its deadline."""
    core = core_of(lease)
    for _ in range(times):
        before = core.deadline

        async def moved(before: float = before) -> bool:
            lease.check()
            return core.deadline > before

        await eventually(moved, f"the lease on {lease.name!r} is renewed")


@asynccontextmanager
async def background(*work: Awaitable[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run these while the body runs, and cancel those that have not ended by then."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_at_every_step(work: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[None]]) -> int:
    """Cancel the work after 0, 1, 2… steps of the event loop, until it ends by itself; return the number of steps."""
    for steps in range(10_000):
        task = asyncio.ensure_future(work())
        for _ in range(steps):
            await asyncio.sleep(0)
            if task.done():
                break
        finished = task.done()
        task.cancel()
        try:
            lease = await task
        except asyncio.CancelledError:
            lease = None
        if lease is not None:
            await lease.release()
        await after()
        if finished:
            return steps
    raise AssertionError("the work never ended by itself")


async def assert_notified_once(calls: list[Any]) -> None:
    """Wait until a loss callback was called, and a little longer: it must not be called twice."""
    await eventually(lambda: bool(calls), "the loss callback is called")
    await asyncio.sleep(0.1)
    assert len(calls) == 1


async def take(locks: LocksView, name: str, timeout: float = SOON) -> int:
    """Acquire and release the lock; return its token."""
    async with locks.lock(name, timeout=timeout) as lease:
        return lease.token


async def is_free(locks: LocksView, name: str) -> bool:
    """Return whether a new task can acquire the lock now; release it again.

    The calling task would get None inside its own block, without a request to the engine.
    """

    async def attempt() -> bool:
        lease = await locks.lock(name).try_acquire()
        if lease is not None:
            await lease.release()
        return lease is not None

    return await asyncio.create_task(attempt())


async def wait_until_free(locks: LocksView, name: str) -> None:
    """Wait until the lock can be acquired; the server may need a moment before it replies again."""

    async def free() -> bool:
        try:
            return await is_free(locks, name)
        except EngineUnavailable:
            return False

    await eventually(free, f"{name!r} is free")
