"""Idempotency keys, awaited. `fencelock.lockfree.idempotency` describes them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from fencelock.lockfree.canonical import Json
from fencelock.lockfree.idempotency import (
    DAY,
    BaseIdempotencyKey,
    KeyInProgress,
    KeyReused,
    ResultTooLarge,
    Run,
    key_arguments,
)
from fencelock.lockfree.idempotency_sql import prune_expired
from fencelock.runtime.both_apis import AsyncioApi
from fencelock.sqlio import AsyncConnection, adapt

__all__ = ["IdempotencyKey", "KeyInProgress", "KeyReused", "ResultTooLarge", "Run", "idempotent", "prune"]

P = ParamSpec("P")
T = TypeVar("T")


class IdempotencyKey(BaseIdempotencyKey, AsyncioApi):
    """An `async with` block that does the work of a key once, in all processes.

    `connection`: yours, of asyncio, in a transaction that you commit; or a client of `fencelock.aio.connect`.

    >>> import fencelock.aio
    >>> async def main():
    ...     async with fencelock.aio.connect("memory://idempotency-aio") as locks:
    ...         for _ in range(2):
    ...             async with IdempotencyKey(locks, "7f3a", payload={"amount": 10}) as run:
    ...                 if not run.replayed:
    ...                     run.result = {"charged": 10}
    ...             print(run.replayed, run.result)
    >>> asyncio.run(main())
    False {'charged': 10}
    True {'charged': 10}
    """

    async def __aenter__(self) -> Run:
        return await self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end(error)


def idempotent(
    key: str,
    *,
    connection: str = "connection",
    payload: Callable[..., Json | bytes] | None = None,
    ttl: float = DAY,
    wait: bool | float = True,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Return a decorator for `async def`: a repeated call returns the result of the first one.

    >>> import fencelock.aio
    >>> @idempotent("pay:{order}", connection="locks")
    ... async def pay(locks, order, amount):
    ...     return {"charged": amount}
    >>> async def main():
    ...     async with fencelock.aio.connect("memory://idempotent-aio") as locks:
    ...         return await pay(locks, 42, 10)
    >>> asyncio.run(main())
    {'charged': 10}
    """

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        arguments_of = key_arguments(function, key, connection, payload, awaited=True)

        @wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            store, name, asked = arguments_of(args, kwargs)
            async with IdempotencyKey(store, name, payload=asked, ttl=ttl, wait=wait) as run:
                if not run.replayed:
                    run.result = await function(*args, **kwargs)
            return cast(T, run.result)

        return call

    return decorate


async def prune(connection: AsyncConnection, limit: int = 1000) -> int:
    """Remove at most `limit` expired results, in the caller's transaction; return their number.

    Commit after each call, also if it returns 0.
    """
    return await prune_expired(adapt(connection, "lockfree", awaited=True), limit)
