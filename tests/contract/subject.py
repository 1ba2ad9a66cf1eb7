"""What a contract test is about: one engine, seen through one colour."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fencelock.core.engine import Engine
from fencelock.core.runtime import Runtime
from fencelock.core.urls import open_engine
from fencelock.errors import EngineUnavailable
from fencelock.runtime.asyncio import AsyncioRuntime
from fencelock.runtime.blocking import BlockingRuntime
from tests.contract import runtimes
from tests.contract.runtimes import LeaseView, LocksView, Threads, core_of
from tests.contract.ttl_scale import UNSCALED, TtlScale
from tests.contract.worker import Worker

SOON = 15.0
"""What "soon" may take on a machine that is busy with something else. Never a promise about speed."""


class Subject:
    """One engine, one colour, one URL, one pace; whatever is opened through it is closed at the end of the test."""

    def __init__(self, url: str, runtime_name: str, pace: TtlScale = UNSCALED) -> None:
        self.url = url
        self.runtime_name = runtime_name
        self.pace = pace
        self.call = Threads()
        self._clients: list[LocksView] = []
        self._workers: list[Worker] = []
        self._backends: list[tuple[Engine, Runtime]] = []

    def connect(self, **options: Any) -> LocksView:
        """Return a new client."""
        locks = runtimes.connect(self.runtime_name, self.call, self.url, self.pace, **options)
        self._clients.append(locks)
        return locks

    def stop_event(self) -> Any:
        """Return an event of this colour, for `stop`."""
        return asyncio.Event() if self.runtime_name == "aio" else threading.Event()

    def runtime(self) -> Runtime:
        """Return a new world of this colour. The blocking one never suspends, so its coroutines run in any loop."""
        return AsyncioRuntime() if self.runtime_name == "aio" else BlockingRuntime()

    def engine(self, namespace: str = "fencelock") -> Engine:
        """Return the engine itself, for what the façade does not show yet (readers, permits)."""
        runtime = self.runtime()
        engine = open_engine(runtime, self.url, namespace)
        self._backends.append((engine, runtime))
        return engine

    async def worker(self, **options: Any) -> Worker:
        """Return another process, with a client `locks` of this engine in this colour."""
        worker = await Worker.start(self.url, self.runtime_name, self.pace, **options)
        self._workers.append(worker)
        return worker

    async def finish(self) -> None:
        """Close and end whatever was opened."""
        for worker in self._workers:
            await worker.kill()
        for locks in self._clients:
            await locks.close()
        for engine, runtime in self._backends:
            await engine.close()
            await runtime.close()


async def eventually(condition: Callable[[], Awaitable[object]], what: str, within: float = SOON) -> None:
    """Wait until the condition holds."""
    end, pause = time.monotonic() + within, 0.005
    while not await condition():
        assert time.monotonic() < end, f"within {within:g} s it never was so that {what}"
        await asyncio.sleep(pause)
        pause = min(0.04, pause * 1.3)  # what has not come at once comes with the end of a ttl


async def waiting(locks: LocksView, name: str, number: int = 1) -> None:
    """Wait until so many claims are in line."""

    async def are() -> bool:
        return len((await locks.inspect(name)).waiters) == number

    await eventually(are, f"{number} wait for {name!r}")


async def nobody(locks: LocksView, name: str, within: float = SOON) -> None:
    """Wait until the name has neither holders nor waiters."""

    async def free() -> bool:
        seen = await locks.inspect(name)
        return not seen.holders and not seen.waiters

    await eventually(free, f"nobody holds or waits for {name!r}", within)


async def renewed(lease: LeaseView, times: int = 1) -> None:
    """Wait until the lease is renewed so many times more: nothing else moves its deadline."""
    core = core_of(lease)
    for _ in range(times):
        before = core.deadline

        async def moved(before: float = before) -> bool:
            lease.check()
            return core.deadline > before

        await eventually(moved, f"the lease on {lease.name!r} is renewed")


@asynccontextmanager
async def background(*work: Awaitable[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run these beside the body, and see to their end."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_at_every_step(work: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[None]]) -> int:
    """Run the work again and again, cancelled after 0, 1, 2… steps of the loop, until it gets to its end; count the steps."""
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
    raise AssertionError("it never came to its end")


async def told_once(told: list[Any]) -> None:
    """Wait until a loss was told, and a little longer, for nobody must be told twice."""

    async def any_told() -> bool:
        return bool(told)

    await eventually(any_told, "the loss is told")
    await asyncio.sleep(0.1)
    assert len(told) == 1


async def take(locks: LocksView, name: str, within: float = SOON) -> int:
    """Take the lock and give it back; return the token."""
    async with locks.lock(name, timeout=within) as lease:
        return lease.token


async def is_free(locks: LocksView, name: str) -> bool:
    """Return whether another thread or task can have the lock now; give it back.

    Inside its own block, this one would get None without asking the engine.
    """

    async def attempt() -> bool:
        lease = await locks.lock(name).try_acquire()
        if lease is not None:
            await lease.release()
        return lease is not None

    return await asyncio.create_task(attempt())


async def free_again(locks: LocksView, name: str) -> None:
    """Wait until a lock can be had, from a server that may need a moment before it answers again."""

    async def free() -> bool:
        try:
            return await is_free(locks, name)
        except EngineUnavailable:
            return False

    await eventually(free, f"{name!r} is free")
