"""The file fence, awaited: each call runs in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from fencelock.aio.wrap import in_thread, in_threads
from fencelock.fences import Fenced, file
from fencelock.fences.file import Path


class FileFence:
    """Replaces files, and refuses old tokens; the resource is the path. `fencelock.fences.file` describes it.

    >>> import os, tempfile, types
    >>> async def main(path):
    ...     fence, lease = FileFence(), types.SimpleNamespace(token=7, id="me")
    ...     await fence.enter(lease, path)
    ...     async with fence.replace(lease, path) as file:
    ...         file.write(b"done")
    ...     return await fence.token(path)
    >>> asyncio.run(main(os.path.join(tempfile.mkdtemp(), "report")))
    7
    """

    def __init__(self) -> None:
        self._blocking = file.FileFence()

    enter = in_thread(file.FileFence.enter)
    write = in_thread(file.FileFence.write)
    token = in_thread(file.FileFence.token)
    rebase = in_thread(file.FileFence.rebase)
    rebase_all = in_thread(file.FileFence.rebase_all)
    prune = in_thread(file.FileFence.prune)

    @asynccontextmanager
    async def replace(self, lease: Fenced, path: Path) -> AsyncIterator[IO[bytes]]:
        """Open a new file, which replaces the old one at the end of the block; then raise StaleToken if the token is old."""
        async with in_threads(self._blocking.replace(lease, path)) as new:
            yield new
