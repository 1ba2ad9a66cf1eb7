"""The file fence, awaited: each call runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from fencelock.fences import Fenced
from fencelock.fences.file import BaseFileFence, Path
from fencelock.runtime.both_apis import AsyncioApi


class FileFence(BaseFileFence, AsyncioApi):
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

    @asynccontextmanager
    async def replace(self, lease: Fenced, path: Path) -> AsyncIterator[IO[bytes]]:
        """Open a new file, which replaces the old one at the end of the block; then raise StaleToken if the token is old."""
        block = self._replace(lease, path)
        new = await asyncio.to_thread(block.__enter__)
        try:
            yield new
        except BaseException as error:
            # Shielded: a cancelled block removes its temporary file, too.
            if not await asyncio.shield(asyncio.to_thread(block.__exit__, type(error), error, error.__traceback__)):
                raise
        else:
            await asyncio.to_thread(block.__exit__, None, None, None)
