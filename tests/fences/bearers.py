"""Whoever comes to a fence with a token: the tests' stand-in for a lease, as another lock service's numbers would be."""

from __future__ import annotations

from types import SimpleNamespace

from fencelock.fences import Fenced


def bearer(token: int, id: str | None = None, ttl: float = 10.0) -> Fenced:
    """Return a bearer of a token, with an id of its own unless one is given."""
    return SimpleNamespace(token=token, id=id or f"holder of {token}", ttl=ttl)
