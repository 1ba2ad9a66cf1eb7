"""The object-store fence, awaited: each call of boto3 runs in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fencelock.aio.wrap import in_thread
from fencelock.fences import objects
from fencelock.fences.objects import StoredObject

__all__ = ["ObjectFence", "StoredObject"]


class ObjectFence:
    """Changes objects of a bucket, and refuses old tokens. `fencelock.fences.objects` describes it.

    `client` is a boto3 client, whose calls run in threads; so does the function that `update` gets.

    >>> async def sell(client: S3Client, lease: fencelock.aio.Lease) -> None:
    ...     fence = ObjectFence(client, "shop")
    ...     await fence.update(lease, "apples", lambda body: str(int(body) - 5).encode())
    """

    def __init__(
        self, client: Any, bucket: str, *, stamp: Callable[[bytes, str], bytes] | None = None, probe: bool = True
    ) -> None:
        self._blocking = objects.ObjectFence(client, bucket, stamp=stamp, probe=probe)

    update = in_thread(objects.ObjectFence.update)
    read = in_thread(objects.ObjectFence.read)
    write = in_thread(objects.ObjectFence.write)
    token = in_thread(objects.ObjectFence.token)
    rebase = in_thread(objects.ObjectFence.rebase)
