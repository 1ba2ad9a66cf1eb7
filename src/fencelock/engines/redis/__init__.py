"""Redis. `core/urls.py` calls `connect` for a URL, and `adopt` for an application's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fencelock.engines.redis.connector import from_client, from_sentinel, from_url
from fencelock.engines.redis.engine import RedisEngine

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime


def connect(runtime: Runtime, url: str, namespace: str) -> RedisEngine:
    """Open `redis://`, `rediss://`, `unix://`, `valkey://`, `valkeys://`, or one of these with `+sentinel`."""
    scheme, _, rest = url.partition(":")
    scheme = scheme.lower().replace("valkeys", "rediss").replace("valkey", "redis")
    if scheme.endswith("+sentinel"):
        return RedisEngine(runtime, from_sentinel(f"{scheme}:{rest}"), namespace)
    return RedisEngine(runtime, from_url(f"{scheme}:{rest}"), namespace)


def adopt(runtime: Runtime, client: Any, namespace: str) -> RedisEngine:
    """Connect with the settings of a `redis.Redis` or `redis.asyncio.Redis`, over connections of our own."""
    connector = from_client(client, aio=runtime.shares_connections)
    return RedisEngine(runtime, connector, namespace, f"redis://{connector.address}")
