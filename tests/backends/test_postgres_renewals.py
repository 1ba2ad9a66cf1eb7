"""Advisory locks that are renewed while something else goes on: every answer counts for the renewal that asked for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import fencelock.aio
from fencelock import LeaseLost
from tests.backends.postgres_server import advisory, empty
from tests.contract.subject import SOON
from tests.engines.postgres import Postgres


@pytest.fixture
def url(postgres: Postgres) -> str:
    """The shared PostgreSQL, empty."""
    return advisory(empty(postgres))


async def test_renewal_cancelled(url: str) -> None:
    """The answer to a renewal that was cancelled does not pass for that of the next, which the server never heard of."""
    async with fencelock.aio.connect(url) as locks, fencelock.aio.connect(url) as others:
        lease = await locks.lock("x", ttl=3, renew=False).acquire()
        task = asyncio.ensure_future(lease.renew())
        while not any(seat.link.pending for seat in locks._client.backend._seats.values()):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(2)
        with suppress(LeaseLost):
            await lease.renew()
        successor = asyncio.ensure_future(others.lock("x", ttl=3).acquire(SOON))
        await asyncio.wait([successor], timeout=2)
        assert not successor.done() or lease.is_lost()
        await lease.release()
        await (await successor).release()
