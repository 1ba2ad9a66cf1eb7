"""The in-memory fence, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fencelock.aio.wrap import at_once
from fencelock.fences import Fenced, memory


class MemoryFence:
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

    def __init__(self) -> None:
        self._blocking = memory.MemoryFence()

    enter = at_once(memory.MemoryFence.enter)
    check = at_once(memory.MemoryFence.check)
    token = at_once(memory.MemoryFence.token)
    rebase = at_once(memory.MemoryFence.rebase)
    rebase_all = at_once(memory.MemoryFence.rebase_all)
    prune = at_once(memory.MemoryFence.prune)

    @asynccontextmanager
    async def write(self, lease: Fenced, resource: str | None = None) -> AsyncIterator[None]:
        """Check, and let no other task or thread enter until the block ends. The block must not await."""
        with self._blocking.write(lease, resource):
            yield
