"""Fencing over HTTP: a lease's token as a header, and middleware that refuses a request with an old one.

    Fencing-Token: 1790000000000034; id="5f1d0c…"

The middleware is a door: what it lets in runs to its end even if somebody newer comes meanwhile. It hands the credentials on,
so that the application can check them once more in the transaction that writes.
"""

from __future__ import annotations

from fencelock.fences.http.client import TokenAuth, raise_for_stale
from fencelock.fences.http.service import WRITES, FencedAsgi, FencedWsgi, path_of
from fencelock.fences.http.wire import HEADER, STALE, BadHeader, header, parse

__all__ = [
    "HEADER",
    "STALE",
    "WRITES",
    "BadHeader",
    "FencedAsgi",
    "FencedWsgi",
    "TokenAuth",
    "header",
    "parse",
    "path_of",
    "raise_for_stale",
]
