"""The etcd fence, awaited."""

from __future__ import annotations

from fencelock.fences.etcd import BaseEtcdFence, coded
from fencelock.runtime.both_apis import AsyncioApi

__all__ = ["EtcdFence", "coded"]


class EtcdFence(BaseEtcdFence, AsyncioApi):
    """Adds a compare to transactions, for a client whose `transaction` is `async def`. `fencelock.fences.etcd` describes it.

    >>> async def sell(client: Etcd3Client, lease: fencelock.aio.Lease) -> None:
    ...     fence = EtcdFence(client)
    ...     await fence.enter(lease)                                         # before the first read
    ...     put = {"request_put": {"key": coded("apples"), "value": coded("95")}}
    ...     await fence.transaction(lease, {"success": [put]})               # StaleToken if a newer holder has entered
    """
