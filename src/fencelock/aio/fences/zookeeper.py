"""The ZooKeeper fence, awaited: each call of kazoo runs in a thread."""

from __future__ import annotations

from fencelock.fences.zookeeper import BaseZooKeeperFence
from fencelock.runtime.both_apis import AsyncioApi


class ZooKeeperFence(BaseZooKeeperFence, AsyncioApi):
    """Adds a check to kazoo's transactions. `fencelock.fences.zookeeper` describes it.

    `client` is a started `KazooClient`, whose calls run in threads. `check` sends nothing, so it is not awaited.

    >>> async def sell(client: KazooClient, lease: fencelock.aio.Lease) -> None:
    ...     fence = ZooKeeperFence(client)
    ...     await fence.enter(lease)                               # before the first read
    ...     transaction = client.transaction()
    ...     transaction.set_data("/apples", b"95")
    ...     await fence.commit(lease, transaction)                 # StaleToken if a newer holder has entered
    """
