"""A server that hangs and goes on: what it was asked meanwhile is carried out then, and must be undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencelock import EngineUnavailable
from tests.backends.conftest import Clients
from tests.contract.subject import eventually, is_free, take
from tests.engines.redis import Redis


async def test_nothing_is_left_of_what_a_hung_server_was_asked(
    own_redis: Callable[..., Redis], clients: Clients
) -> None:
    """A lock that was asked for in vain is free as soon as the server goes on, and not only after a ttl."""
    server = own_redis()
    locks = clients.connect(f"{server.url}?socket_timeout=0.5&socket_connect_timeout=0.5")
    await take(locks, "x")
    server.pause()
    with pytest.raises(EngineUnavailable):
        await locks.lock("x", ttl=60, timeout=0.5).acquire()
    server.resume()

    async def free() -> bool:
        try:
            return await is_free(locks, "x")
        except EngineUnavailable:
            return False

    await eventually(free, "the lock is free")
