"""The client's side: adds the token to requests, and raises StaleToken for a refusal."""

from __future__ import annotations

from base64 import b64encode
from functools import cache, partial
from typing import Any, Self, TypeVar

from fencelock.errors import InvalidType, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.core import credentials_of
from fencelock.fences.http.header import HEADER, STALE, header

R = TypeVar("R")


class FencingTokenAuth:
    """Adds the lease's token to every request: `auth=FencingTokenAuth(lease)`, for httpx (blocking and asyncio) and requests.

    `auth` is the auth that you use already: one of httpx, such as `httpx.BasicAuth` or `DigestAuth`, one of requests, a
    function that takes a request and returns it, or a pair of a user and a password.

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
