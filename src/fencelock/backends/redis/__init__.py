"""Redis. `connect` is what the URL table calls; `adopt` is for a user's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fencelock.backends.redis.dial import from_client, from_sentinel, from_url
from fencelock.backends.redis.engine import RedisBackend

if TYPE_CHECKING:
    from fencelock.core.world import World


def connect(world: World, url: str, namespace: str) -> RedisBackend:
    """Open `redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`, or `redis+sentinel://` and its like."""
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower().replace("valkeys", "rediss").replace("valkey", "redis")
    if scheme.endswith("+sentinel"):
        return RedisBackend(world, from_sentinel(f"{scheme}:{rest}"), namespace)
    return RedisBackend(world, from_url(f"{scheme}:{rest}"), namespace)


def adopt(world: World, client: Any, namespace: str) -> RedisBackend:
    """Connect as a `redis.Redis` or `redis.asyncio.Redis` does; its own connections are left alone."""
    dialer = from_client(client, aio=world.shares_wires)
    return RedisBackend(world, dialer, namespace, f"redis://{dialer.address}")
