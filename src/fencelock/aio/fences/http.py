"""Fencing over HTTP: the middleware for ASGI, and everything of `fencelock.fences.http` that needs no await."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.aio.asgi import problem
from fencelock.fences import TokenPair
from fencelock.fences.http import (
    HEADER,
    STALE,
    WRITES,
    BadHeader,
    BaseFencingMiddleware,
    FencingTokenAuth,
    Problem,
    header,
    parse,
    path_of,
    raise_for_stale,
)
from fencelock.runtime.both_apis import AsyncioApi

__all__ = [
    "HEADER",
    "STALE",
    "WRITES",
    "BadHeader",
    "FencingMiddleware",
    "FencingTokenAuth",
    "header",
    "parse",
    "path_of",
    "raise_for_stale",
]


class FencingMiddleware(BaseFencingMiddleware[Callable[..., Awaitable[None]]], AsyncioApi):
    """ASGI middleware: 409 and a problem+json body for an old token, 428 without a token, 400 for a malformed one.

    `fence` is a fence of `fencelock.aio.fences` with `enter(lease, resource)`, such as RedisFence, StandaloneSqlFence or
    MemoryFence. The application finds the token, with the resource as its name, in `scope["fencelock"]`.
    `fencelock.fences.http.WsgiFencingMiddleware` describes the rest.

    >>> import aiosqlite
    >>> from fencelock.aio.fences.sql import StandaloneSqlFence
    >>> async def app(scope, receive, send): ...
    >>> def stock(scope):
    ...     return "stock" if path_of(scope) == "/stock" else None
    >>> fence = StandaloneSqlFence(lambda: aiosqlite.connect("fences.db"))
    >>> fenced = FencingMiddleware(app, fence, resource=stock)
    """

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        resource = self._resource(scope) if scope["type"] == "http" else None
        if resource is None:
            return await self._app(scope, receive, send)
        name = HEADER.lower().encode()
        values = [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]
        found = await self._check(scope["method"], resource, values)
        if isinstance(found, TokenPair):
            scope = {**scope, "fencelock": found}
        if not isinstance(found, Problem):
            return await self._app(scope, receive, send)
        return await problem(found.body, found.status).send(send)
