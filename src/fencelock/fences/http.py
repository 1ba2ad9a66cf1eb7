"""Fencing over HTTP: a lease's token as a header, and middleware that refuses a request with an old one.

    Fencing-Token: 1790000000000034; id="5f1d0c…"

The middleware is a door: what it lets in runs to its end even if somebody newer comes meanwhile. It hands the credentials on,
so that the application can check them once more in the transaction that writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import isawaitable
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError, StaleToken
from fencelock.fences import Credentials, Fenced
from fencelock.fences.core import bearer, check_resource
from fencelock.fences.sql.door import SqlDoor

HEADER = "Fencing-Token"
STALE = "urn:fencelock:stale-token"
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

R = TypeVar("R")

_SHAPE = re.compile(r'\s*(\d{1,16})\s*;\s*id="([!-~]{1,1000})"\s*')


class BadHeader(FencelockError, ValueError):
    """A Fencing-Token header that is none."""


def header(lease: Fenced) -> str:
    """Return a lease's token and id, as the value of the header.

    >>> from types import SimpleNamespace
    >>> header(SimpleNamespace(token=34, id="worker 7"))
    '34; id="worker%207"'
    """
    mine = bearer(lease)
    return f'{mine.token}; id="{quote(mine.id)}"'


def parse(value: str) -> Credentials:
    """Return the credentials in the value of the header; raise BadHeader.

    >>> parse('34; id="worker%207"')
    Credentials(token=34, id='worker 7')
    """
    found = _SHAPE.fullmatch(value)
    if found is None:
        raise BadHeader(f'{HEADER} must be a token and an owner\'s id, as in 34; id="5f1d"; not {value!r:.80}')
    try:
        return bearer(Credentials(int(found[1]), unquote(found[2], errors="strict")))
    except ValueError as error:
        raise BadHeader(f"{HEADER}: {error}") from error


class TokenAuth:
    """Puts the lease's token on every request: `auth=TokenAuth(lease)`, for httpx of both colours and for requests.

    `then` is the auth that you have already, if it is one that takes a request and returns it.

    >>> def order(client: httpx.Client, lease: fencelock.Lease) -> None:
    ...     answer = client.post("/orders", json={"apples": 5}, auth=TokenAuth(lease))
    ...     raise_for_stale(answer)
    """

    def __init__(self, lease: Fenced, then: Callable[[Any], Any] | None = None) -> None:
        self._lease = lease
        self._then = then

    def __call__(self, request: R) -> R:
        """Add the header; httpx and requests call this for each request that they send."""
        request.headers[HEADER] = header(self._lease)  # type: ignore[attr-defined]
        return request if self._then is None else self._then(request)


def raise_for_stale(response: Any) -> None:
    """Raise StaleToken if the answer says that the token was refused; for httpx and requests.

    >>> from types import SimpleNamespace
    >>> raise_for_stale(SimpleNamespace(status_code=200))
    """
    if response.status_code != 409 or not response.headers.get("content-type", "").startswith(
        "application/problem+json"
    ):
        return
    try:
        problem = response.json()
    except ValueError:
        return  # somebody else's 409: the caller looks at the status in any case
    if isinstance(problem, dict) and problem.get("type") == STALE:
        said = problem.get("detail", "the service refused the token")
        raise StaleToken(said, problem.get("instance"), token=problem.get("token"), seen=problem.get("seen"))


class _Gate:
    """What both kinds of middleware do: find the credentials, ask the fence, and put a refusal into words."""

    def __init__(self, fence: Any, methods: Iterable[str], required: bool) -> None:
        if isinstance(methods, str):
            raise TypeError(f"methods are several, as in [{methods!r}]: the letters of one would let everything pass")
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
            return 400, _problem(400, "urn:fencelock:bad-resource", str(error))
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

    `fence` keeps the highest token of each resource: anything with `enter(resource, lease)`, blocking or awaited, such as
    RedisFence or MemoryFence, or a function that connects to a database, for a SqlDoor. One that blocks is better called
    in a thread: `run=asyncio.to_thread`. `resource` says from the scope what is written (default: the path); None lets the
    request pass. The application finds the credentials in `scope["fencelock"]`.

    >>> import sqlite3
    >>> async def app(scope, receive, send): ...
    >>> fenced = FencedAsgi(app, lambda: sqlite3.connect("fences.db"), run=asyncio.to_thread)
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        fence: Any,
        *,
        resource: Callable[[Mapping[str, Any]], str | None] = lambda scope: scope["path"] or "/",
        methods: Iterable[str] = WRITES,
        required: bool = True,
        run: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        self._app = app
        self._gate = _Gate(fence, methods, required)
        self._resource = resource
        self._run = run

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
                await self._enter(resource, mine)
            except StaleToken as stale:
                return await _answer(send, *self._gate.refused(stale))
            scope = {**scope, "fencelock": mine}
        elif mine is not None:
            return await _answer(send, *mine)
        return await self._app(scope, receive, send)

    async def _enter(self, resource: str, mine: Credentials) -> None:
        enter = self._gate.fence.enter
        entered = enter(resource, mine) if self._run is None else await self._run(enter, resource, mine)
        if isawaitable(entered):
            await entered


async def _answer(send: Any, status: int, problem: dict[str, Any]) -> None:
    body = json.dumps(problem).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _path(environ: Mapping[str, Any]) -> str:
    """Return the path as ASGI has it; WSGI hands on its bytes as Latin-1."""
    path: str = environ.get("PATH_INFO") or "/"
    try:
        return path.encode("latin-1").decode()
    except UnicodeError:
        return path


class FencedWsgi:
    """WSGI middleware: the same as FencedAsgi, with a fence that blocks; `environ["fencelock"]` has the credentials.

    >>> from fencelock.fences.memory import MemoryFence
    >>> def app(environ, start_response): ...
    >>> fenced = FencedWsgi(app, MemoryFence(), resource=lambda environ: environ["PATH_INFO"].split("/")[1])
    """

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        fence: Any,
        *,
        resource: Callable[[Mapping[str, Any]], str | None] = _path,
        methods: Iterable[str] = WRITES,
        required: bool = True,
    ) -> None:
        self._app = app
        self._gate = _Gate(fence, methods, required)
        self._resource = resource

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Let a request in, or answer it."""
        resource = self._resource(environ)
        value = environ.get("HTTP_FENCING_TOKEN")
        mine = self._gate.credentials(environ["REQUEST_METHOD"], resource, [] if value is None else [value])
        problem = mine if not isinstance(mine, Credentials) else None
        if isinstance(mine, Credentials):
            try:
                entered = self._gate.fence.enter(resource, mine)
                if isawaitable(entered):
                    getattr(entered, "close", lambda: None)()  # a coroutine would be missed
                    raise TypeError("this fence is to be awaited, which WSGI cannot: give it one that blocks")
                environ["fencelock"] = mine
            except StaleToken as stale:
                problem = self._gate.refused(stale)
        if problem is None:
            return self._app(environ, start_response)
        status, body = problem[0], json.dumps(problem[1]).encode()
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(body)))]
        start_response(f"{status} {problem[1]['title']}", headers)
        return [body]
