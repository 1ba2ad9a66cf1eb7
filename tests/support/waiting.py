"""Wait for a condition instead of a period of time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from inspect import isawaitable
from typing import Any, TypeVar

T = TypeVar("T")

SOON = 15.0
"""Seconds that "soon" may take on a machine that is busy with something else. Never a promise about speed."""
LONG = 60.0
"""The same for a condition that needs new processes, which take seconds to start on a busy machine."""


async def eventually(condition: Callable[[], Awaitable[Any] | Any], what: str, timeout: float = SOON) -> Any:
    """Call `condition`, awaiting it if it is a coroutine, until it returns something true, and return that.

    Raise AssertionError, which names `what` did not happen, after `timeout` seconds.
    """
    pauses = _pauses(what, timeout)
    while True:
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(next(pauses))


def eventually_blocking(condition: Callable[[], T], what: str = "the condition holds", timeout: float = LONG) -> T:
    """Do the same for tests without an event loop."""
    pauses = _pauses(what, timeout)
    while not (value := condition()):
        time.sleep(next(pauses))
    return value


def _pauses(what: str, timeout: float) -> Iterator[float]:
    end, pause = time.monotonic() + timeout, 0.005
    while time.monotonic() < end:
        yield pause
        pause = min(0.04, pause * 1.3)  # a condition that does not hold at once often holds at the end of a ttl
    raise AssertionError(f"not within {timeout:g} s: {what}")
