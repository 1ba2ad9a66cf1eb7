"""Asyncio waiters of one client on one name: commands per grant, and connections, for 2, 20 and 200 waiters.

MONITOR counts the commands: it shows whether a client or a script sent one. The server's own counters add both up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from bench import redis_peers as peers
from bench.harness import Goal, progress
from fencelock import aio
from tests.servers import Redis

WAITERS = (2, 20, 200)
BODY = 0.001
SECONDS = 3.0
OURS = "fencelock"
NewLock = Callable[[], AbstractAsyncContextManager[Any]]
Open = Callable[[str, AsyncExitStack], NewLock]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one run."""

    per_second: float
    commands: float
    """Commands per grant."""
    connections: int


class Monitor:
    """Counts what clients send, from `start` to `stop`."""

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url, socket_timeout=None)
        self._thread = threading.Thread(target=self._listen)
        self._ready = threading.Event()
        self.commands = 0

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        # MONITOR shows this ECHO after all earlier commands, so the thread has counted those when it ends.
        self._client.echo("enough")
        self._thread.join()
        self._client.close()

    def _listen(self) -> None:
        with self._client.monitor() as monitor:
            self._ready.set()
            for line in monitor.listen():
                if line["command"] == "ECHO enough":
                    return
                self.commands += line["client_type"] != "lua"


def ours(url: str, stack: AsyncExitStack) -> NewLock:
    locks = aio.connect(url)
    stack.push_async_callback(locks.close)
    return lambda: locks.lock("fencelock")


def redis_py(url: str, stack: AsyncExitStack) -> NewLock:
    # Its pool refuses the 101st connection by default.
    client = redis.asyncio.Redis.from_url(url, max_connections=max(WAITERS) + 10)
    stack.push_async_callback(client.aclose)
    return lambda: client.lock("redis-py", timeout=peers.TTL)


async def measure_waiters(url: str, open: Open, waiters: int) -> Cost:
    monitor, grants, end = Monitor(url), 0, 0.0

    async def waiter(lock: AbstractAsyncContextManager[Any]) -> None:
        nonlocal grants
        while time.monotonic() < end:
            async with lock:
                grants += 1
                await asyncio.sleep(BODY)

    async with AsyncExitStack() as stack:
        new_lock = open(url, stack)
        async with new_lock():
            pass  # connected, scripts loaded
        monitor.start()
        began = time.monotonic()
        end = began + SECONDS
        await asyncio.gather(*(waiter(new_lock()) for _ in range(waiters)))
        seconds = time.monotonic() - began
        monitor.stop()
        with redis.Redis.from_url(url) as client:
            connections = client.info("clients")["connected_clients"] - 1
    return Cost(grants / seconds, monitor.commands / grants, connections)


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Open] = {OURS: ours, "redis-py Lock": redis_py}
    costs: dict[tuple[str, int], Cost] = {}
    with Redis(settings=peers.SETTINGS) as server:
        for number in range(rounds):
            for waiters in WAITERS:
                for name, open in contestants.items():
                    progress(f"round {number + 1} of {rounds}: {name}, {waiters} waiters")
                    cost = asyncio.run(measure_waiters(server.url, open, waiters))
                    best = costs.get((name, waiters))
                    costs[name, waiters] = cost if best is None else min(best, cost, key=lambda cost: cost.commands)
    progress("")
    print(f"\nRedis, asyncio waiters of one client on one name, body of {BODY * 1000:g} ms")
    print(f"  {'':20} {'waiters':>8} {'commands/grant':>15} {'grants/s':>9} {'connections':>12}")
    for (name, waiters), cost in sorted(costs.items(), key=lambda item: (item[0][0] != OURS, *item[0])):
        print(f"  {name:20} {waiters:8} {cost.commands:15.2f} {cost.per_second:9.0f} {cost.connections:12}")
    few, many = (costs[OURS, waiters].commands for waiters in (min(WAITERS), max(WAITERS)))
    return [Goal("Redis: commands per grant with 200 waiters ÷ with 2", many / few, 1.1)]
