"""Both colours from one text: what is written here as coroutines runs to its end in a thread, or is awaited."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock.worlds.blocking import BlockingWorld, drive

if TYPE_CHECKING:
    from fencelock.core.world import World

T = TypeVar("T")


def world_of(*, awaited: bool) -> World:
    """Return the world of a colour, for its clock and its sleep."""
    if not awaited:
        return BlockingWorld()
    from fencelock.worlds.aio import AioWorld  # asyncio is only for those who use it

    return AioWorld()


async def settled(value: Any) -> Any:
    """Return what a driver's function returned, awaited if that is its colour."""
    return await value if hasattr(value, "__await__") else value


def straight(work: Coroutine[Any, Any, T], thing: object, *, awaited: bool, instead: str) -> T:
    """Run it in this thread; raise TypeError if what it works on has to be awaited."""
    if awaited:
        work.close()
        raise TypeError(f"{type(thing).__module__}.{type(thing).__name__} is for asyncio: use {instead}")
    return drive(work)


async def awaiting(work: Coroutine[Any, Any, T], thing: object, *, awaited: bool, instead: str) -> T:
    """Await it; raise TypeError if what it works on would block the event loop."""
    if not awaited:
        work.close()
        raise TypeError(f"{type(thing).__module__}.{type(thing).__name__} would block the event loop: use {instead}")
    return await work
