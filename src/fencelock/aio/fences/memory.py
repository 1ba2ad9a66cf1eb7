"""The in-memory fence, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fencelock.fences import Fenced
from fencelock.fences.memory import BaseMemoryFence
from fencelock.runtime.both_apis import AsyncioApi


class MemoryFence(BaseMemoryFence, AsyncioApi):
    """Refuses old tokens, for each resource in this process. `fencelock.fences.memory` describes it.

    >>> from types import SimpleNamespace
    >>> async def main():
    ...     fence, lease = MemoryFence(), SimpleNamespace(token=7, id="me", name="report")
    ...     await fence.enter(lease)
    ...     async with fence.write(lease):                         # must not await inside
    ...         return await fence.token("report")
    >>> asyncio.run(main())
    7
    """

    @asynccontextmanager
    async def write(self, lease: Fenced, resource: str | None = None) -> AsyncIterator[None]:
        """Check, and let no other task or thread enter until the block ends. The block must not await."""
        with self._write(lease, resource):
            yield
