"""For code that is written once for both APIs: `fencelock.X` blocks, `fencelock.aio.X` is awaited.

A base class has the coroutines, each decorated with `both_apis`. A subclass with `BlockingApi` has a blocking method for
each of them; a subclass with `AsyncioApi` has the coroutines themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from fencelock.errors import InvalidType
from fencelock.runtime.blocking import BlockingRuntime, run_sync

if TYPE_CHECKING:
    from fencelock.core.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")


class Api:
    """What the shared code needs to know of its API."""

    _awaited: ClassVar[bool]
    """Whether it is the asyncio API."""

    async def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of a driver, or of a user, and return its result; in the asyncio API, await it.

        Raise InvalidType in the blocking API if the result has to be awaited: it would do nothing.
        """
        result = function(*args, **kwargs)
        if self._awaited:
            return await result
        if hasattr(result, "__await__"):
            getattr(result, "close", lambda: None)()  # a coroutine would warn that it was never awaited
            raise InvalidType(
                "this client or function is for asyncio: use the module of the same name in fencelock.aio"
            )
        return result

    def _runtime(self) -> Runtime:
        """Return a runtime, for its clock, sleep and events."""
        if not self._awaited:
            return BlockingRuntime()
        from fencelock.runtime.asyncio import AsyncioRuntime  # imported only by those who use asyncio

        return AsyncioRuntime()


class BlockingApi(Api):
    """Makes a class one of `fencelock`: its methods block."""

    _awaited = False


class AsyncioApi(Api):
    """Makes a class one of `fencelock.aio`: its methods are coroutines."""

    _awaited = True


class both_apis(Generic[P, T]):  # noqa: N801
    """Decorates a coroutine method: it stays one in the asyncio API, and blocks the calling thread in the blocking API."""

    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> None:
        @wraps(method)
        def blocking(*args: Any, **kwargs: Any) -> T:
            return run_sync(method(*args, **kwargs))

        self._methods: dict[bool, Any] = {False: blocking, True: method}
        update_wrapper(cast(Any, self), method)  # for doctest and help

    @overload
    def __get__(self, instance: BlockingApi, owner: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncioApi, owner: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> Callable[..., Any]: ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        return self._methods[issubclass(owner, AsyncioApi)].__get__(instance, owner)


def in_thread(method: Callable[Concatenate[Any, P], T]) -> both_apis[P, T]:
    """Decorate a blocking method of a resource that has no driver for asyncio: in the asyncio API it runs in a thread.

    Cancelling the caller does not stop the thread.
    """

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._awaited:
            return method(self, *args, **kwargs)
        from asyncio import to_thread

        return await to_thread(method, self, *args, **kwargs)

    return both_apis(call)
