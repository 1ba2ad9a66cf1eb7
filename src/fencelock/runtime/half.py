"""The two halves of an API that is written once, as coroutines: `fencelock.X` blocks, `fencelock.aio.X` is awaited.

A base class has the coroutines and a `half`. Its blocking subclass makes methods of them with `blocking`; its asyncio
subclass offers them as they are. Where a driver exists only in a blocking form, the asyncio half runs the blocking method
in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from fencelock.errors import InvalidType
from fencelock.runtime.blocking import BlockingRuntime, run_sync

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")


class Half:
    """What differs between the two halves."""

    def __init__(self, *, awaited: bool) -> None:
        self.awaited = awaited
        """Whether it is the asyncio half."""

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of a driver, or of a user, and return its result; in the asyncio half, await it.

        Raise InvalidType in the blocking half if the result has to be awaited: it would do nothing.
        """
        result = function(*args, **kwargs)
        return await result if self.awaited else check_not_awaitable(result)

    def runtime(self) -> Runtime:
        """Return a runtime, for its clock, sleep and events."""
        if not self.awaited:
            return BlockingRuntime()
        from fencelock.runtime.asyncio import AsyncioRuntime  # imported only by those who use asyncio

        return AsyncioRuntime()


def check_not_awaitable(result: T) -> T:
    """Return a result of the blocking half; raise InvalidType if it has to be awaited."""
    if hasattr(result, "__await__"):
        getattr(result, "close", lambda: None)()  # a coroutine would warn that it was never awaited
        raise InvalidType("this client or function is for asyncio: use the module of the same name in fencelock.aio")
    return result


BLOCKING = Half(awaited=False)
ASYNCIO = Half(awaited=True)


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that runs a coroutine of the blocking half to its end in the caller's own thread."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(self, *args, **kwargs))

    return call
