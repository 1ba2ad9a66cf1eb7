"""The relay of an outbox, awaited. `fencelock.lockfree.relay` describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.aio.fences.sql import SqlFence
from fencelock.aio.lockfree.outbox import Outbox
from fencelock.lockfree.outbox import Message
from fencelock.lockfree.relay import BaseRelay
from fencelock.runtime.half import ASYNCIO

__all__ = ["Relay"]


class Relay(BaseRelay):
    """Delivers the messages of an outbox while it holds the outbox's lock. Start one in every process.

    `connect` opens a connection of asyncio, or an asynchronous context manager around one; `deliver` is a coroutine function;
    `locks` is a client of `fencelock.aio.connect`.

    >>> async def main(outbox, pool, publish, locks):
    ...     await Relay(outbox, pool.connection, publish, locks).run()
    """

    half = ASYNCIO
    _fence = SqlFence()

    def __init__(
        self,
        outbox: Outbox,
        connect: Callable[[], Any],
        deliver: Callable[[Message], Awaitable[object]],
        locks: Any,
        *,
        poll: float = 0.5,
        batch: int = 100,
        ttl: float | None = None,
    ) -> None:
        super().__init__(outbox, connect, deliver, locks, poll=poll, batch=batch, ttl=ttl)

    run = BaseRelay._run
    drain = BaseRelay._drain
