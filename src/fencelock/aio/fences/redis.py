"""The Redis fence, awaited."""

from __future__ import annotations

from fencelock.fences.redis import BaseRedisFence, FencedPipeline
from fencelock.runtime.both_apis import AsyncioApi

__all__ = ["FencedPipeline", "RedisFence"]


class RedisFence(BaseRedisFence, AsyncioApi):
    """Fenced SET, HSET and DEL, and your own scripts, for a `redis.asyncio.Redis`. `fencelock.fences.redis` describes it.

    >>> async def sell(client: redis.asyncio.Redis, lease: fencelock.aio.Lease) -> None:
    ...     fence = RedisFence(client)
    ...     await fence.enter(lease)                                  # before the first read
    ...     left = int(await client.get("apples") or 0) - 5
    ...     await fence.set(lease, "apples", left)                    # StaleToken if a newer holder has entered
    """
