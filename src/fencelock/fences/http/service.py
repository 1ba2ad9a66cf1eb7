"""The side that is written to: middleware, for ASGI and WSGI, that lets a request in or refuses it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from fencelock.errors import InvalidType, StaleToken
from fencelock.fences import Credentials
from fencelock.fences.core import check_resource
from fencelock.fences.http.wire import HEADER, STALE, BadHeader, parse
from fencelock.fences.sql.door import SqlDoor

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class _Gate:
    """What both kinds of middleware do: find the credentials, ask the fence, and put a refusal into words."""

    def __init__(self, fence: Any, resource: Any, methods: Iterable[str], required: bool) -> None:
        if not callable(resource):
            raise InvalidType(
                "resource is a function that takes the scope or environ of a request and returns the name of what is "
                f"written, or None, as in resource=lambda request: 'stock', not {type(resource).__name__}"
            )
        if isinstance(methods, str):
            raise InvalidType(f"methods are several, as in [{methods!r}]: the letters of one would let everything pass")
        if not hasattr(fence, "enter") and not callable(fence):
            raise InvalidType(
                "the middleware needs a fence with enter(lease, resource), such as MemoryFence or RedisFence, or a function "
                f"that gives a connection to a database, such as lambda: psycopg.connect(…), not {type(fence).__name__}"
            )
        self.fence: Any = fence if hasattr(fence, "enter") else SqlDoor(fence)
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required

    def credentials(
        self, method: str, resource: str | None, values: list[str]
    ) -> Credentials | tuple[int, dict[str, Any]] | None:
        """Return who comes, None if the request is none of ours, or the problem with it."""
        # Some applications take `post` for `POST`, so it must not go past us.
        if method.upper() not in self._methods or resource is None:
            return None
        try:
            check_resource(resource)
        except ValueError as error:
            return 400, _problem(400, "urn:fencelock:bad-resource", str(error), {"title": "Bad resource of a fence"})
        if not values:
            detail = f"{method} needs the header {HEADER}, with the token and the id of the lease that it is done under"
            return (428, _problem(428, "urn:fencelock:token-required", detail)) if self._required else None
        try:
            return parse(values[0] if len(values) == 1 else ", ".join(values))
        except BadHeader as error:
            return 400, _problem(400, "urn:fencelock:bad-token", str(error))

    def refused(self, stale: StaleToken) -> tuple[int, dict[str, Any]]:
        more = {"instance": stale.name, "token": stale.token, "seen": stale.seen}
        return 409, _problem(409, STALE, str(stale), more)


_TITLES = {400: "Bad fencing token", 409: "Stale fencing token", 428: "Fencing token required"}


def _problem(status: int, kind: str, detail: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    problem = {"type": kind, "title": _TITLES[status], "status": status, "detail": detail, **(more or {})}
    return {key: value for key, value in problem.items() if value is not None}


class FencedAsgi:
    """ASGI middleware: 409 and a problem+json body for an old token, 428 for none, 400 for one that cannot be read.

    `fence` keeps the highest token of each resource: anything with `enter(lease, resource)`, blocking or awaited, such as
    RedisFence or MemoryFence, or a function that connects to a database, for a SqlDoor.

    `resource` takes the scope and returns the name of what is written, or None to let the request pass. Each name that it
    returns is stored: return only names of things that exist and that this caller may write, and put the middleware behind
    the one that authenticates. `path_of(scope)` is the request's path.

    The fence is called in a thread, so that one that blocks does not stop the event loop: `run` is `asyncio.to_thread`, or
    what another event loop has in its place. What it returns is awaited on the loop if it has to be.

    The application finds the credentials, with the resource as their name, in `scope["fencelock"]`.

    >>> import sqlite3
    >>> async def app(scope, receive, send): ...
    >>> def stock(scope):
    ...     return "stock" if path_of(scope) == "/stock" else None
    >>> fenced = FencedAsgi(app, lambda: sqlite3.connect("fences.db"), resource=stock)
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        fence: Any,
        *,
        resource: Callable[[Mapping[str, Any]], str | None],
        methods: Iterable[str] = WRITES,
        required: bool = True,
        run: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        self._app = app
        self._gate = _Gate(fence, resource, methods, required)
        self._resource = resource
        self._run = _in_thread if run is None else run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request in, or answer it."""
        resource = self._resource(scope) if scope["type"] == "http" else None
        if resource is None:
            return await self._app(scope, receive, send)
        name = HEADER.lower().encode()
        values = [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]
        mine = self._gate.credentials(scope["method"], resource, values)
        if isinstance(mine, Credentials):
            try:
                await self._enter(mine, resource)
            except StaleToken as stale:
                return await _answer(send, *self._gate.refused(stale))
            scope = {**scope, "fencelock": mine._replace(name=resource)}
        elif mine is not None:
            return await _answer(send, *mine)
        return await self._app(scope, receive, send)

    async def _enter(self, mine: Credentials, resource: str) -> None:
        enter = self._gate.fence.enter
        entered = enter(mine, resource) if iscoroutinefunction(enter) else await self._run(enter, mine, resource)
        if isawaitable(entered):
            await entered


async def _in_thread(work: Callable[..., Any], *args: Any) -> Any:
    from asyncio import to_thread  # not for those who only use WSGI

    return await to_thread(work, *args)


async def _answer(send: Any, status: int, problem: dict[str, Any]) -> None:
    body = json.dumps(problem).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def path_of(request: Mapping[str, Any]) -> str:
    """Return the whole path of a request, the same for an ASGI scope and a WSGI environ.

    It begins with where the application is mounted, and has no slash at its end: many applications take both for one thing.

    >>> path_of({"type": "http", "path": "/shop/stock/"}), path_of({"SCRIPT_NAME": "/shop", "PATH_INFO": "/stock"})
    ('/shop/stock', '/shop/stock')
    """
    if "path" in request:
        path: str = request["path"]
    else:
        path = request.get("SCRIPT_NAME", "") + request.get("PATH_INFO", "")
        try:
            path = path.encode("latin-1").decode()  # WSGI hands on its bytes as Latin-1
        except UnicodeError:
            pass
    return path.rstrip("/") or "/"


class FencedWsgi:
    """WSGI middleware: the same as FencedAsgi, with a fence that blocks; `environ["fencelock"]` has the credentials.

    >>> from fencelock.fences.memory import MemoryFence
    >>> def app(environ, start_response): ...
    >>> names = {"/stock": "stock", "/prices": "prices"}
    >>> fenced = FencedWsgi(app, MemoryFence(), resource=lambda environ: names.get(path_of(environ)))
    """

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        fence: Any,
        *,
        resource: Callable[[Mapping[str, Any]], str | None],
        methods: Iterable[str] = WRITES,
        required: bool = True,
    ) -> None:
        self._app = app
        self._gate = _Gate(fence, resource, methods, required)
        self._resource = resource

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Let a request in, or answer it."""
        resource = self._resource(environ)
        value = environ.get("HTTP_FENCING_TOKEN")
        mine = self._gate.credentials(environ["REQUEST_METHOD"], resource, [] if value is None else [value])
        problem = mine if not isinstance(mine, Credentials) else None
        if isinstance(mine, Credentials):
            try:
                entered = self._gate.fence.enter(mine, resource)
                if isawaitable(entered):
                    getattr(entered, "close", lambda: None)()  # a coroutine would be missed
                    raise InvalidType("this fence is to be awaited, which WSGI cannot: give it one that blocks")
                environ["fencelock"] = mine._replace(name=resource)
            except StaleToken as stale:
                problem = self._gate.refused(stale)
        if problem is None:
            return self._app(environ, start_response)
        status, body = problem[0], json.dumps(problem[1]).encode()
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(body)))]
        start_response(f"{status} {problem[1]['title']}", headers)
        return [body]
