"""The blocking API of rate limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fencelock.core.validation import check_function
from fencelock.primitives.api_hints import NoBlock
from fencelock.primitives.rate_limit import BaseRateLimit, RateState
from fencelock.runtime.blocking import run_sync

T = TypeVar("T")
P = ParamSpec("P")


class RateLimit(NoBlock):
    """A limit on calls in the whole fleet; threads and tasks may share it.

    >>> from fencelock import connect
    >>> with connect("memory://rate") as locks:
    ...     limit = locks.rate_limit("stripe", 80, per=60, burst=2)
    ...     [limit.try_acquire() for _ in range(3)]
    [True, True, False]
    """

    __slots__ = ("_limit",)

    def __init__(self, limit: BaseRateLimit) -> None:
        self._limit = limit

    @property
    def name(self) -> str:
        """The name of the limit; of several, their names."""
        return self._limit.name

    def acquire(self, cost: int = 1, timeout: float | None = None) -> None:
        """Wait until the call may go. Raise RateLimited at once, without a charge, if the timeout is too short for that.

        The caller reserves its time on the engine and sleeps here, so callers go in the order in which they came. If it is
        interrupted, its reservation is given back unless others have reserved after it.
        """
        run_sync(self._limit.acquire(cost, timeout))

    def try_acquire(self, cost: int = 1) -> bool:
        """Return whether the call may go now. A refused call is not charged."""
        return run_sync(self._limit.try_acquire(cost))

    def state(self) -> RateState:
        """Return how many calls may go now, and when the next one may; it charges nothing."""
        return run_sync(self._limit.state())

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """As a decorator: each call of the function waits for its turn."""
        check_function(function, "the decorated function")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            self.acquire()
            return function(*args, **kwargs)

        return call

    def __repr__(self) -> str:
        return f"<RateLimit {self.name!r}>"
