"""Doorbells that a stranger rings without end: anybody on the machine can send to them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from fencelock.worlds.aio import AioWorld
from fencelock.worlds.blocking import SocketBell


def test_flood_in_a_thread() -> None:
    """A waiter takes in some rings and goes on."""
    flooded = SimpleNamespace(recv=lambda size: b"x" * size)
    bell = SocketBell(flooded, "name", SocketBell.destroy)  # type: ignore[arg-type]
    assert bell.silence()


def test_flood_in_a_loop() -> None:
    """An event loop takes in some rings and goes on."""

    async def main() -> None:
        world = AioWorld()
        world.check_usable()
        world._socket = SimpleNamespace(recv=lambda size: b"0", close=lambda: None)  # type: ignore[assignment]
        world._rung()
        world._socket = None
        await world.close()

    asyncio.run(asyncio.wait_for(main(), 15))
