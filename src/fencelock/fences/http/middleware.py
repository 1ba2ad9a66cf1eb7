"""The service's side: the WSGI middleware, and what it shares with the ASGI middleware."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

from fencelock.errors import InvalidType, StaleToken
from fencelock.fences import TokenPair
from fencelock.fences.core import check_resource
from fencelock.fences.http.header import HEADER, STALE, BadHeader, parse
from fencelock.fences.sql import StandaloneSqlFence
from fencelock.runtime.half import check_not_awaitable
from fencelock.sqlio import other_half

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_TITLES = {400: "Bad fencing token", 409: "Stale fencing token", 428: "Fencing token required"}


class Problem(NamedTuple):
    """A refused request: the status, the title, and the body as RFC 9457 defines it."""

    status: int
    title: str
    body: bytes


def problem(status: int, kind: str, detail: str, **more: Any) -> Problem:
    """Return the response to a refused request."""
    fields = {"type": kind, "title": _TITLES[status], "status": status, "detail": detail, **more}
    return Problem(
        status,
        fields["title"],
        json.dumps({key: value for key, value in fields.items() if value is not None}).encode(),
    )


def refused(stale: StaleToken) -> Problem:
    """Return the response to a request with an old token."""
    return problem(409, STALE, str(stale), instance=stale.name, token=stale.token, seen=stale.seen)


class TokenGuard:
    """What both kinds of middleware share: check their options, and find the token of a request."""

    def __init__(
        self, fence: Any, standalone: type[Any], resource: Any, methods: Iterable[str], required: bool, *, awaited: bool
    ) -> None:
        if not callable(resource):
            raise InvalidType(
                "resource is a function that takes the scope or environ of a request and returns the name of what is "
                f"written, or None, as in resource=lambda request: 'stock', not {type(resource).__name__}"
            )
        if isinstance(methods, str):
            raise InvalidType(f"methods are a list, as in [{methods!r}], not one str")
        if not hasattr(fence, "enter") and not callable(fence):
            raise InvalidType(
                "the middleware needs a fence with enter(lease, resource), such as MemoryFence or RedisFence, or a function "
                f"that opens a connection to a database, such as lambda: psycopg.connect(…), not {type(fence).__name__}"
            )
        self.fence: Any = fence if hasattr(fence, "enter") else standalone(fence)
        if iscoroutinefunction(self.fence.enter) is not awaited:
            raise other_half(fence, "fences", awaited=awaited)
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required

    def credentials(self, method: str, resource: str | None, values: list[str]) -> TokenPair | Problem | None:
        """Return the token of a request, None if the request needs none, or the response that refuses it."""
        # Some applications accept `post` for `POST`, so a method in lower case needs a token, too.
        if method.upper() not in self._methods or resource is None:
            return None
        try:
            check_resource(resource)
        except ValueError as error:
            return problem(400, "urn:fencelock:bad-resource", str(error), title="Bad resource of a fence")
        if not values:
            detail = f"{method} needs the header {HEADER}, with the token and the id of the caller's lease"
            return problem(428, "urn:fencelock:token-required", detail) if self._required else None
        try:
            return parse(values[0] if len(values) == 1 else ", ".join(values))._replace(name=resource)
        except BadHeader as error:
            return problem(400, "urn:fencelock:bad-token", str(error))


def path_of(request: Mapping[str, Any]) -> str:
    """Return the whole path of a request, the same for an ASGI scope and a WSGI environ.

    It includes the application's mount point, and has no slash at its end, as many applications treat both alike.

    >>> path_of({"type": "http", "path": "/shop/stock/"}), path_of({"SCRIPT_NAME": "/shop", "PATH_INFO": "/stock"})
    ('/shop/stock', '/shop/stock')
    """
    if "path" in request:
        path: str = request["path"]
    else:
        path = request.get("SCRIPT_NAME", "") + request.get("PATH_INFO", "")
        try:
            path = path.encode("latin-1").decode()  # WSGI decodes the bytes of the path as Latin-1
        except UnicodeError:
            pass
    return path.rstrip("/") or "/"


class WsgiFencingMiddleware:
    """WSGI middleware: 409 and a problem+json body for an old token, 428 without a token, 400 for a malformed one.

    `fence` stores the highest token of each resource: a fence with `enter(lease, resource)`, such as RedisFence or
    MemoryFence, or a function that opens a connection to a database, for a StandaloneSqlFence.

    `resource` takes the environ and returns the name of what is written, or None to let the request pass. Each name that it
    returns is stored: return only names of things that exist and that this caller may write, and put the middleware behind
    the one that authenticates. `path_of(environ)` is the request's path.

    The application finds the token, with the resource as its name, in `environ["fencelock"]`.

    >>> from fencelock.fences.memory import MemoryFence
    >>> def app(environ, start_response): ...
    >>> names = {"/stock": "stock", "/prices": "prices"}
    >>> fenced = WsgiFencingMiddleware(app, MemoryFence(), resource=lambda environ: names.get(path_of(environ)))
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
        self._guard = TokenGuard(fence, StandaloneSqlFence, resource, methods, required, awaited=False)
        self._resource = resource

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Pass a request on, or refuse it."""
        value = environ.get("HTTP_FENCING_TOKEN")
        values = [] if value is None else [value]
        found = self._guard.credentials(environ["REQUEST_METHOD"], self._resource(environ), values)
        if isinstance(found, TokenPair):
            try:
                check_not_awaitable(self._guard.fence.enter(found, found.name))
                environ["fencelock"] = found
            except StaleToken as stale:
                found = refused(stale)
        if not isinstance(found, Problem):
            return self._app(environ, start_response)
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(found.body)))]
        start_response(f"{found.status} {found.title}", headers)
        return [found.body]
