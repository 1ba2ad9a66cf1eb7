"""The asyncio API: the same names as `fencelock`, awaited.

>>> import asyncio
>>> from fencelock import aio
>>> async def main():
...     async with aio.connect("memory://aio") as locks:
...         async with locks.lock("order:42", ttl=30) as lease:
...             return lease.token > 0
>>> asyncio.run(main())
True
"""

from fencelock.api.aio import Lease, Lock, Locks, Lost, connect

__all__ = ["Lease", "Lock", "Locks", "Lost", "connect"]
