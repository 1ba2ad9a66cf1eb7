"""Both colours from one text: what is written here as coroutines runs to its end in a thread, or is awaited.

Which of the two is decided by what the caller hands in: for a connection or client of asyncio's, what is returned has to be
awaited.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from fencelock.errors import InvalidType
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from fencelock.sqlio import settled as settled

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime

T = TypeVar("T")


def world_of(*, awaited: bool) -> Runtime:
    """Return the world of a colour, for its clock and its sleep."""
    if not awaited:
        return BlockingRuntime()
    from fencelock.runtime.asyncio import AsyncioRuntime  # asyncio is only for those who use it

    return AsyncioRuntime()


def in_colour(work: Coroutine[Any, Any, T], *, awaited: bool) -> Any:
    """Return what the work returns, or the work itself, to be awaited."""
    return work if awaited else run_sync(work)


def check_colour(thing: object, *, awaited: bool, asked: bool) -> None:
    """Raise TypeError if a `with` block is of another colour than what it is about."""
    if awaited is not asked:
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        raise InvalidType(
            f"{kind} is for asyncio: write `async with`"
            if awaited
            else f"{kind} would block the event loop: write `with`"
        )
