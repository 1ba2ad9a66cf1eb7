"""Makes coroutines of blocking methods, for resources that have no driver of asyncio: the fences of memory, files and others.

An object of the asyncio half has the blocking object in `_blocking`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a blocking method in a thread. Cancelling it does not stop the thread."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._blocking, *args, **kwargs)

    return call


def at_once(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a method which never waits."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._blocking, *args, **kwargs)

    return call


@asynccontextmanager
async def in_threads(block: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a blocking context manager in threads."""
    entered = await asyncio.to_thread(block.__enter__)
    try:
        yield entered
    except BaseException as error:
        if not await asyncio.shield(asyncio.to_thread(block.__exit__, type(error), error, error.__traceback__)):
            raise
    else:
        await asyncio.to_thread(block.__exit__, None, None, None)
