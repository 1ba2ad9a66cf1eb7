"""Fencing over HTTP: a lease's token as a request header, and middleware that refuses a request with an old one.

    Fencing-Token: 1790000000000034; id="5f1d0c…"

The middleware checks when a request arrives: an accepted request runs to its end even if a newer holder arrives meanwhile. It
passes the token on, so that the application can check it again in the transaction that writes.

This package has the middleware for WSGI; `fencelock.aio.fences.http` has the one for ASGI. The rest is the same in both.
"""

from __future__ import annotations

from fencelock.fences.http.client import FencingTokenAuth, raise_for_stale
from fencelock.fences.http.header import HEADER, STALE, BadHeader, header, parse
from fencelock.fences.http.middleware import WRITES, WsgiFencingMiddleware, path_of

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
