"""The blocking API of cached functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

from fencelock.core.client import Client
from fencelock.core.validation import check_function
from fencelock.primitives.cached_values import SingleFlightOptions, cache_options, invalidate
from fencelock.primitives.locked import check_template, name_template
from fencelock.primitives.single_flight import SingleFlight
from fencelock.runtime.blocking import run_sync

T = TypeVar("T")
P = ParamSpec("P")


class CachedFunction(Generic[P, T]):
    """A function whose results are shared in the whole fleet.

    >>> from fencelock import connect
    >>> with connect("memory://function") as locks:
    ...     @locks.cached("square:{n}", ttl=60)
    ...     def square(n):
    ...         return n * n
    ...     square(3), square.refresh(3)
    (9, 9)
    """

    __wrapped__: Callable[P, T]

    def __init__(
        self, client: Client[Any], template: str, options: SingleFlightOptions, function: Callable[P, T]
    ) -> None:
        self._client = client
        self._function = function
        self._key_of = name_template(template, function, awaited=False, decorator="cached")
        self._options = cache_options("cached", template, options)
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the call, built by one caller in the fleet."""
        return run_sync(self._flight(*args, **kwargs).get())

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function now, share its result, and return it."""
        return run_sync(self._flight(*args, **kwargs).refresh())

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Remove the result of this call. A build that has begun before is not stored."""
        run_sync(invalidate(self._client, self._key_of(*args, **kwargs)))

    def _flight(self, *args: P.args, **kwargs: P.kwargs) -> SingleFlight[T]:
        async def build() -> T:
            return self._function(*args, **kwargs)

        return SingleFlight(self._client, self._key_of(*args, **kwargs), build, self._options)


def cached_function(
    client: Client[Any], template: str, options: SingleFlightOptions
) -> Callable[[Callable[P, T]], CachedFunction[P, T]]:
    """Return the decorator."""
    check_template(template, decorator="cached")

    def decorate(function: Callable[P, T]) -> CachedFunction[P, T]:
        check_function(function, "the decorated function")
        return CachedFunction(client, template, options, function)

    return decorate
