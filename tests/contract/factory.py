"""Makes clients, engines and worker processes for one URL in one runtime, and closes them at the end of the test."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from fencelock.core.engine import Engine
from fencelock.core.runtime import Runtime
from fencelock.core.urls import open_engine
from fencelock.runtime.asyncio import AsyncioRuntime
from fencelock.runtime.blocking import BlockingRuntime
from tests.contract import runtimes
from tests.contract.runtimes import LocksView, Threads
from tests.contract.ttl_scale import UNSCALED, TtlScale
from tests.contract.worker import Worker


class MakeClient:
    """Makes clients, engines and worker processes for one URL in one runtime; `finish` closes them."""

    def __init__(self, url: str, runtime_name: str, ttl_scale: TtlScale = UNSCALED) -> None:
        self.url = url
        self.runtime_name = runtime_name
        self.ttl_scale = ttl_scale
        self.call = Threads()
        self._clients: list[LocksView] = []
        self._workers: list[Worker] = []
        self._engines: list[tuple[Engine, Runtime]] = []

    def connect(self, **options: Any) -> LocksView:
        """Return a new client."""
        locks = runtimes.connect(self.runtime_name, self.call, self.url, self.ttl_scale, **options)
        self._clients.append(locks)
        return locks

    def stop_event(self) -> Any:
        """Return an event of this runtime, for `stop`."""
        return asyncio.Event() if self.runtime_name == "aio" else threading.Event()

    def runtime(self) -> Runtime:
        """Return a new runtime. The blocking one never suspends, so its coroutines run in any event loop."""
        return AsyncioRuntime() if self.runtime_name == "aio" else BlockingRuntime()

    def engine(self, namespace: str = "fencelock") -> Engine:
        """Return an engine without a client, for tests of the engine protocol."""
        runtime = self.runtime()
        engine = open_engine(runtime, self.url, namespace)
        self._engines.append((engine, runtime))
        return engine

    async def worker(self, **options: Any) -> Worker:
        """Return another process, with a client `locks` of the same URL and runtime."""
        worker = await Worker.start(self.url, self.runtime_name, self.ttl_scale, **options)
        self._workers.append(worker)
        return worker

    async def finish(self) -> None:
        """Kill the workers and close the clients and engines."""
        for worker in self._workers:
            await worker.kill()
        for locks in self._clients:
            await locks.close()
        for engine, runtime in self._engines:
            await engine.close()
            await runtime.close()
