"""The side that holds the lease: it puts the token on requests, and understands a refusal."""

from __future__ import annotations

from base64 import b64encode
from functools import cache, partial
from typing import Any, Self, TypeVar

from fencelock.errors import InvalidType, StaleToken
from fencelock.fences import Fenced
from fencelock.fences.core import bearer
from fencelock.fences.http.wire import HEADER, STALE, header

R = TypeVar("R")


class TokenAuth:
    """Puts the lease's token on every request: `auth=TokenAuth(lease)`, for httpx of both colours and for requests.

    `then` is the auth that you have already: one of httpx's, such as `httpx.BasicAuth` or `DigestAuth`, one of requests', a
    function that takes a request and returns it, or a pair of a user and a password.

    >>> def order(client: httpx.Client, lease: fencelock.Lease) -> None:
    ...     answer = client.post("/orders", json={"apples": 5}, auth=TokenAuth(lease))
    ...     raise_for_stale(answer)
    """

    def __new__(cls, lease: Fenced, then: Any = None) -> Self:  # noqa: ARG004
        """Make one of httpx's kind where it has to answer for one of those: they may send a request more than once."""
        kind: type[Self] = _of_httpx() if cls is TokenAuth and hasattr(then, "sync_auth_flow") else cls
        return super().__new__(kind)

    def __init__(self, lease: Fenced, then: Any = None) -> None:
        if isinstance(then, tuple) and len(then) == 2:
            then = partial(_basic, then)
        elif then is not None and not callable(then) and not hasattr(then, "sync_auth_flow"):
            raise InvalidType(
                "`then` is an auth of httpx's or requests', a function that takes a request and returns it, or a pair of a "
                f"user and a password, not {type(then).__name__}"
            )
        bearer(lease)
        self._lease = lease
        self._then = then

    def __call__(self, request: R) -> R:
        """Add the header; httpx and requests call this for each request that they send."""
        self._mark(request)
        return request if self._then is None else self._then(request)

    def _mark(self, request: Any) -> None:
        request.headers[HEADER] = header(self._lease)


@cache
def _of_httpx() -> Any:
    from httpx import Auth

    class HttpxTokenAuth(TokenAuth, Auth):
        """Puts the token on a request, and lets the other auth do the rest."""

        def sync_auth_flow(self, request: Any) -> Any:
            self._mark(request)
            return self._then.sync_auth_flow(request)

        def async_auth_flow(self, request: Any) -> Any:
            self._mark(request)
            return self._then.async_auth_flow(request)

    return HttpxTokenAuth


def _basic(who: tuple[str, str], request: R) -> R:
    coded = b64encode(":".join(who).encode()).decode()
    request.headers["Authorization"] = f"Basic {coded}"  # type: ignore[attr-defined]
    return request


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
