"""The ZooKeeper fence, awaited: each call of kazoo runs in a thread."""

from __future__ import annotations

from typing import Any

from fencelock.aio.wrap import in_thread
from fencelock.fences import Fenced, zookeeper


class ZooKeeperFence:
    """Adds a check to kazoo's transactions. `fencelock.fences.zookeeper` describes it.

    `client` is a started `KazooClient`, whose calls run in threads.

    >>> async def sell(client: KazooClient, lease: fencelock.aio.Lease) -> None:
    ...     fence = ZooKeeperFence(client)
    ...     await fence.enter(lease)                               # before the first read
    ...     transaction = client.transaction()
    ...     transaction.set_data("/apples", b"95")
    ...     await fence.commit(lease, transaction)                 # StaleToken if a newer holder has entered
    """

    def __init__(self, client: Any, *, root: str = "/fencelock-fence") -> None:
        self._blocking = zookeeper.ZooKeeperFence(client, root=root)

    enter = in_thread(zookeeper.ZooKeeperFence.enter)
    commit = in_thread(zookeeper.ZooKeeperFence.commit)
    token = in_thread(zookeeper.ZooKeeperFence.token)
    rebase = in_thread(zookeeper.ZooKeeperFence.rebase)
    rebase_all = in_thread(zookeeper.ZooKeeperFence.rebase_all)
    prune = in_thread(zookeeper.ZooKeeperFence.prune)

    def check(self, lease: Fenced, transaction: Any, resource: str | None = None) -> None:
        """Add the check to a transaction of your own: no newer holder has entered since you did. Nothing is sent."""
        self._blocking.check(lease, transaction, resource)
