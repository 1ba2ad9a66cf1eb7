"""A stand-in for a lease, as another lock service could have it."""

from __future__ import annotations

from types import SimpleNamespace

from fencelock.fences import Fenced


def fake_lease(token: int, id: str | None = None, ttl: float = 10.0) -> Fenced:
    """Return an object with a token and an id."""
    return SimpleNamespace(token=token, id=id or f"holder of {token}", ttl=ttl)
