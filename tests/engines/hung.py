"""What happens to whoever asks for a lock while its server hangs, the same on every engine that is asked by SQL."""

from __future__ import annotations

import asyncio

import pytest

from fencelock import EngineUnavailable
from fencelock.core.clock import boottime
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, take, wait_until_free
from tests.engines.conftest import Clients
from tests.servers.server import Server
from tests.support.waiting import SOON


async def in_vain(locks: LocksView, name: str, ttl: float, timeout: float) -> float:
    """Ask for a lock while the server hangs; return how long that took."""
    begun = boottime()
    with pytest.raises(EngineUnavailable):
        await locks.lock(name, ttl=ttl, timeout=timeout).acquire()
    return boottime() - begun


async def hurried(server: Server, url: str, clients: Clients) -> None:
    """See that those with little time are told in time, connected or not, and that nothing is left of what they asked for.

    Whoever has time gets its lock, on the same client even.
    """
    locks, short, fresh = (clients.connect(f"{url}?connect_timeout=20") for _ in range(3))
    for _ in range(3):  # once it is prepared, a statement is sent without waiting for anything
        await take(locks, "x")
        await take(short, "y")
    server.pause()
    async with background(fresh.lock("w").acquire()) as (patient,):
        try:
            took = await asyncio.gather(
                in_vain(locks, "x", 60, 0), in_vain(short, "y", 2, 1.5), in_vain(fresh, "z", 60, 1)
            )
        finally:
            server.resume()
        await (await asyncio.wait_for(patient, SOON)).release()
    assert max(took) < 9
    await wait_until_free(locks, "x")
