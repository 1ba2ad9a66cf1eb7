"""The object-store fence, awaited: each call of boto3 runs in a thread."""

from __future__ import annotations

from fencelock.fences.objects import BaseObjectFence, StoredObject
from fencelock.runtime.both_apis import AsyncioApi

__all__ = ["ObjectFence", "StoredObject"]


class ObjectFence(BaseObjectFence, AsyncioApi):
    """Changes objects of a bucket, and refuses old tokens. `fencelock.fences.objects` describes it.

    `client` is a boto3 client, whose calls run in threads; so does the function that `update` gets.

    >>> async def sell(client: S3Client, lease: fencelock.aio.Lease) -> None:
    ...     fence = ObjectFence(client, "shop")
    ...     await fence.update(lease, "apples", lambda body: str(int(body) - 5).encode())
    """
