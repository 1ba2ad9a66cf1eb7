"""The two APIs of the lock-free tools, for tests that run on every kind of connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from fencelock.aio.lockfree import idempotency as aio_idempotency
from fencelock.aio.lockfree import optimistic as aio_optimistic
from fencelock.aio.lockfree import outbox as aio_outbox
from fencelock.aio.lockfree import relay as aio_relay
from fencelock.lockfree import idempotency, optimistic, outbox, relay
from fencelock.sqlio import ConnectionAdapter
from fencelock.sqlio.drivers import find_adapter, resolve

__all__ = ["api_of", "resolve"]


class Api(NamedTuple):
    """The classes of one API, and the adapter of a connection of it."""

    sql: ConnectionAdapter
    idempotency: Any
    optimistic: Any
    outbox: Any
    relay: Any

    @asynccontextmanager
    async def run(self, connection: Any, key: str, **options: Any) -> AsyncIterator[idempotency.Run]:
        """Enter the block of an idempotency key."""
        block = self.idempotency.IdempotencyKey(connection, key, **options)
        if self.sql.awaited:
            async with block as run:
                yield run
        else:
            with block as run:
                yield run


def api_of(connection: Any) -> Api:
    """Return the API of a connection."""
    sql = find_adapter(connection)
    if sql.awaited:
        return Api(sql, aio_idempotency, aio_optimistic, aio_outbox, aio_relay)
    return Api(sql, idempotency, optimistic, outbox, relay)
