"""The asyncio API: the same names as `fencelock`, awaited.

>>> import asyncio
>>> from fencelock import aio
>>> async def main():
...     async with aio.connect("memory://aio") as locks:
...         async with locks.lock("order:42", ttl=30) as lease:
...             return lease.token > 0
>>> asyncio.run(main())
True

`fencelock.aio.fences` and `fencelock.aio.lockfree` are imported when they are used.
"""

from fencelock.api.aio import Locks, connect
from fencelock.api.aio_cache import CachedFunction
from fencelock.api.aio_election import Election
from fencelock.api.aio_jobs import Once, Schedule, Slot
from fencelock.api.aio_lock import Lease, Lock, Lost, RWLock
from fencelock.api.aio_multi import Group, MultiLock
from fencelock.api.aio_rate_limit import RateLimit
from fencelock.primitives.api_hints import no_module_attribute

__all__ = [
    "CachedFunction",
    "Election",
    "Group",
    "Lease",
    "Lock",
    "Locks",
    "Lost",
    "MultiLock",
    "Once",
    "RWLock",
    "RateLimit",
    "Schedule",
    "Slot",
    "connect",
]

TYPE_CHECKING = False  # as in typing, without importing it
if not TYPE_CHECKING:  # a type checker would take any name for a public one

    def __getattr__(name: str) -> object:
        """Import a subpackage when it is first used."""
        from importlib import import_module

        if name in ("fences", "lockfree"):
            return import_module(f"fencelock.aio.{name}")
        raise no_module_attribute(__name__, name)
