"""Fencing over HTTP: a lease's token as a request header, and middleware that refuses a request with an old one.

    Fencing-Token: 1790000000000034; id="5f1d0c…"

The middleware checks when a request arrives: an accepted request runs to its end even if a newer holder arrives meanwhile. It
passes the token on, so that the application can check it again in the transaction that writes.

This module has the middleware for WSGI; `fencelock.aio.fences.http` has the one for ASGI. The rest is the same in both.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from inspect import iscoroutinefunction
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError, InvalidType, StaleToken
from fencelock.fences import Fenced, TokenPair
from fencelock.fences.core import check_resource, credentials_of
from fencelock.runtime.blocking import run_sync
from fencelock.runtime.both_apis import Api, BlockingApi
from fencelock.sqlio import wrong_api

__all__ = [
    "HEADER",
    "STALE",
    "WRITES",
    "BadHeader",
    "FencingTokenAuth",
    "WsgiFencingMiddleware",
    "header",
    "parse",
    "path_of",
    "raise_for_stale",
]

HEADER = "Fencing-Token"
STALE = "urn:fencelock:stale-token"
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})

# The id has no quote and no backslash, so that every parser finds the same end: `header` percent-encodes them.
_SHAPE = re.compile(r'[ \t]*([0-9]{1,16})[ \t]*;[ \t]*id="([!#-\[\]-~]{1,1000})"[ \t]*')
_TITLES = {400: "Bad fencing token", 409: "Stale fencing token", 428: "Fencing token required"}

App = TypeVar("App")
R = TypeVar("R")


class BadHeader(FencelockError, ValueError):
    """The value of a Fencing-Token header is malformed."""


def header(lease: Fenced) -> str:
    """Return the value of the header for a lease; raise LeaseLost if the lease has ended.

    >>> from types import SimpleNamespace
    >>> header(SimpleNamespace(token=34, id="worker 7"))
    '34; id="worker%207"'
    """
    pair = credentials_of(lease)
    return f'{pair.token}; id="{quote(pair.id)}"'


def parse(value: str) -> TokenPair:
    """Return the token and id in the value of the header; raise BadHeader.

    >>> parse('34; id="worker%207"')
    TokenPair(token=34, id='worker 7', name=None)
    """
    found = _SHAPE.fullmatch(value)
    if found is None:
        raise BadHeader(f'{HEADER} must be a token and the id of a claim, as in 34; id="5f1d"; not {value!r:.80}')
    try:
        return credentials_of(TokenPair(int(found[1]), unquote(found[2], errors="strict")))
    except ValueError as error:
        raise BadHeader(f"{HEADER}: {error}") from error


# ---------------------------------------------------------------------- the client's side


class FencingTokenAuth:
    """Adds the lease's token to every request: `auth=FencingTokenAuth(lease)`, for httpx (blocking and asyncio) and requests.

    `auth` is the auth that you use already: one of httpx, such as `httpx.BasicAuth` or `DigestAuth`, one of requests, a
    function that takes a request and returns it, or a pair of a user and a password. A request of a lease that has ended
    raises LeaseLost instead.

    >>> def order(client: httpx.Client, lease: fencelock.Lease) -> None:
    ...     response = client.post("/orders", json={"apples": 5}, auth=FencingTokenAuth(lease))
    ...     raise_for_stale(response)
    """

    def __new__(cls, lease: Fenced, auth: Any = None) -> Self:  # noqa: ARG004
        """Return a subclass of httpx.Auth for an `auth` of httpx, which may send a request several times."""
        kind: type[Self] = _httpx_subclass() if cls is FencingTokenAuth and hasattr(auth, "sync_auth_flow") else cls
        return super().__new__(kind)

    def __init__(self, lease: Fenced, auth: Any = None) -> None:
        if isinstance(auth, tuple) and len(auth) == 2:
            auth = partial(_basic, auth)
        elif auth is not None and not callable(auth) and not hasattr(auth, "sync_auth_flow"):
            raise InvalidType(
                "auth is an auth of httpx or requests, a function that takes a request and returns it, or a pair of a user "
                f"and a password, not {type(auth).__name__}"
            )
        credentials_of(lease)
        self._lease = lease
        self._auth = auth

    def __call__(self, request: R) -> R:
        """Add the header; httpx and requests call this for each request."""
        self._add_header(request)
        return request if self._auth is None else self._auth(request)

    def _add_header(self, request: Any) -> None:
        request.headers[HEADER] = header(self._lease)


@cache
def _httpx_subclass() -> Any:
    from httpx import Auth

    class HttpxFencingTokenAuth(FencingTokenAuth, Auth):
        """Adds the token to a request, and lets the other auth do the rest."""

        def sync_auth_flow(self, request: Any) -> Any:
            self._add_header(request)
            return self._auth.sync_auth_flow(request)

        def async_auth_flow(self, request: Any) -> Any:
            self._add_header(request)
            return self._auth.async_auth_flow(request)

    return HttpxFencingTokenAuth


def _basic(user_and_password: tuple[str, str], request: R) -> R:
    coded = b64encode(":".join(user_and_password).encode()).decode()
    request.headers["Authorization"] = f"Basic {coded}"  # type: ignore[attr-defined]
    return request


def raise_for_stale(response: Any) -> None:
    """Raise StaleToken if the response of httpx or requests says that the service refused the token.

    >>> from types import SimpleNamespace
    >>> raise_for_stale(SimpleNamespace(status_code=200))
    """
    content_type = response.headers.get("content-type", "") if response.status_code == 409 else ""
    if not content_type.startswith("application/problem+json"):
        return
    try:
        problem = response.json()
    except ValueError:
        return  # a 409 of another origin: the caller checks the status anyway
    if isinstance(problem, dict) and problem.get("type") == STALE:
        detail = problem.get("detail", "the service refused the token")
        raise StaleToken(detail, problem.get("instance"), token=problem.get("token"), seen=problem.get("seen"))


# ---------------------------------------------------------------------- the service's side


class Problem(NamedTuple):
    """A refused request: the status, the title, and the body as RFC 9457 defines it."""

    status: int
    title: str
    body: bytes


def _problem(status: int, kind: str, detail: str, **more: Any) -> Problem:
    fields = {"type": f"urn:fencelock:{kind}", "title": _TITLES[status], "status": status, "detail": detail, **more}
    given = {key: value for key, value in fields.items() if value is not None}
    return Problem(status, fields["title"], json.dumps(given).encode())


class BaseFencingMiddleware(Api, Generic[App]):
    """What both kinds of middleware share: check their options, and the token of a request."""

    def __init__(
        self,
        app: App,
        fence: Any,
        *,
        resource: Callable[[Mapping[str, Any]], str | None],
        methods: Iterable[str] = WRITES,
        required: bool = True,
    ) -> None:
        if not callable(resource):
            raise InvalidType(
                "resource is a function that takes the scope or environ of a request and returns the name of what is "
                f"written, or None, as in resource=lambda request: 'stock', not {type(resource).__name__}"
            )
        if isinstance(methods, str):
            raise InvalidType(f"methods are a list, as in [{methods!r}], not one str")
        if not hasattr(fence, "enter"):
            raise InvalidType(
                "the middleware needs a fence with enter(lease, resource), such as RedisFence(client), or "
                "StandaloneSqlFence(connect) with a function that opens a connection to a database, not "
                f"{type(fence).__name__}"
            )
        if iscoroutinefunction(fence.enter) is not self._awaited:
            raise wrong_api(fence, "fences", awaited=self._awaited)
        self._app = app
        self._fence = fence
        self._resource = resource
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required

    async def _check(self, method: str, resource: str | None, values: list[str]) -> TokenPair | Problem | None:
        """Return the accepted token of a request, None if the request needs none, or the response that refuses it."""
        # Some applications accept `post` for `POST`, so a method in lower case needs a token, too.
        if method.upper() not in self._methods or resource is None:
            return None
        try:
            check_resource(resource)
        except ValueError as error:
            return _problem(400, "bad-resource", str(error), title="Bad resource of a fence")
        if not values:
            detail = f"{method} needs the header {HEADER}, with the token and the id of the caller's lease"
            return _problem(428, "token-required", detail) if self._required else None
        try:
            token = parse(", ".join(values))._replace(name=resource)
            await self._call(self._fence.enter, token, resource)
        except BadHeader as error:
            return _problem(400, "bad-token", str(error))
        except StaleToken as stale:
            return _problem(409, "stale-token", str(stale), instance=stale.name, token=stale.token, seen=stale.seen)
        return token


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


class WsgiFencingMiddleware(BaseFencingMiddleware[Callable[..., Iterable[bytes]]], BlockingApi):
    """WSGI middleware: 409 and a problem+json body for an old token, 428 without a token, 400 for a malformed one.

    `fence` stores the highest token of each resource. It has `enter(lease, resource)`, as RedisFence, StandaloneSqlFence and
    MemoryFence have.

    `resource` takes the environ and returns the name of what is written, or None to let the request pass. Each name that it
    returns is stored: return only names of things that exist and that this caller may write, and put the middleware behind
    the one that authenticates. `path_of(environ)` is the request's path.

    `methods`: the requests that have a token; others pass. `required`: whether a request without one is refused (428).

    The application finds the token, with the resource as its name, in `environ["fencelock"]`.

    >>> from fencelock.fences.memory import MemoryFence
    >>> def app(environ, start_response): ...
    >>> names = {"/stock": "stock", "/prices": "prices"}
    >>> fenced = WsgiFencingMiddleware(app, MemoryFence(), resource=lambda environ: names.get(path_of(environ)))
    """

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Pass a request on, or refuse it."""
        value = environ.get("HTTP_FENCING_TOKEN")
        values = [] if value is None else [value]
        found = run_sync(self._check(environ["REQUEST_METHOD"], self._resource(environ), values))
        if isinstance(found, TokenPair):
            environ["fencelock"] = found
        if not isinstance(found, Problem):
            return self._app(environ, start_response)
        headers = [("Content-Type", "application/problem+json"), ("Content-Length", str(len(found.body)))]
        start_response(f"{found.status} {found.title}", headers)
        return [found.body]
