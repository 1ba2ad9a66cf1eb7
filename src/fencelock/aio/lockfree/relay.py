"""The relay of an outbox, awaited. `fencelock.lockfree.relay` describes it."""

from __future__ import annotations

from fencelock.aio.fences.sql import SqlFence
from fencelock.lockfree.relay import BaseRelay
from fencelock.runtime.both_apis import AsyncioApi

__all__ = ["Relay"]


class Relay(BaseRelay, AsyncioApi):
    """Delivers the messages of an outbox while it holds the outbox's lock. Start one in every process.

    `connect` opens a connection of asyncio, or an asynchronous context manager around one; `deliver` is a coroutine function;
    `locks` is a client of `fencelock.aio.connect`.

    >>> async def main(outbox, pool, publish, locks):
    ...     await Relay(outbox, pool.connection, publish, locks).run()
    """

    _fence = SqlFence()
