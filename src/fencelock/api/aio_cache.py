"""The asyncio API of cached functions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from fencelock.core.client import Client
from fencelock.core.validation import check_coroutine_function
from fencelock.primitives.cached_values import SingleFlightOptions, cache_options, invalidate
from fencelock.primitives.locked import check_template, name_template
from fencelock.primitives.single_flight import SingleFlight

T = TypeVar("T")
P = ParamSpec("P")


class CachedFunction(Generic[P, T]):
    """A function whose results are shared in the whole fleet.

    >>> from fencelock.aio import connect
    >>> async def main():
    ...     async with connect("memory://function") as locks:
    ...         @locks.cached("square:{n}", ttl=60)
    ...         async def square(n):
    ...             return n * n
    ...         return await square(3), await square.refresh(3)
    >>> asyncio.run(main())
    (9, 9)
    """

    __wrapped__: Callable[P, Coroutine[Any, Any, T]]

    def __init__(
        self,
        client: Client[Any],
        template: str,
        options: SingleFlightOptions,
        function: Callable[P, Coroutine[Any, Any, T]],
    ) -> None:
        self._client = client
        self._function = function
        self._key_of = name_template(template, function, awaited=True, decorator="cached")
        self._options = cache_options("cached", template, options)
        update_wrapper(self, function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the call, built by one caller in the fleet."""
        return await self._flight(*args, **kwargs).get()

    async def refresh(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function now, share its result, and return it."""
        return await self._flight(*args, **kwargs).refresh()

    async def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Remove the result of this call. A build that has begun before is not stored."""
        await invalidate(self._client, self._key_of(*args, **kwargs))

    def _flight(self, *args: P.args, **kwargs: P.kwargs) -> SingleFlight[T]:
        async def build() -> T:
            return await self._function(*args, **kwargs)

        return SingleFlight(self._client, self._key_of(*args, **kwargs), build, self._options)


def cached_function(
    client: Client[Any], template: str, options: SingleFlightOptions
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], CachedFunction[P, T]]:
    """Return the decorator."""
    check_template(template, decorator="cached")

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> CachedFunction[P, T]:
        check_coroutine_function(function, "the decorated function")
        return CachedFunction(client, template, options, function)

    return decorate
