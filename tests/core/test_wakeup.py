"""Wake-ups that a stranger sends without end: anybody on the machine can send to these sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from fencelock.runtime.asyncio import AsyncioRuntime
from fencelock.runtime.blocking_wakeup import SocketWakeup


def test_flood_of_wakeups_does_not_block_a_thread() -> None:
    """A thread that waits reads a bounded number of wake-ups and continues."""
    flooded = SimpleNamespace(recv=lambda size: b"x" * size)
    wakeup = SocketWakeup(flooded, "name")  # type: ignore[arg-type]
    assert wakeup.drain()


def test_flood_of_wakeups_does_not_block_a_loop() -> None:
    """An event loop reads a bounded number of wake-ups and continues."""

    async def main() -> None:
        runtime = AsyncioRuntime()
        runtime.check_usable()
        runtime._socket = SimpleNamespace(recv=lambda size: b"0", close=lambda: None)  # type: ignore[assignment]
        runtime._read_datagrams()
        runtime._socket = None
        await runtime.close()

    asyncio.run(asyncio.wait_for(main(), 15))
