"""Fences: what lets a resource refuse the holder of an old lease. They know tokens and owners, nothing of locks."""

from __future__ import annotations

from typing import Protocol


class Fenced(Protocol):
    """As much of a lease as a fence looks at: anything that has a token and an owner's id will do.

    >>> from types import SimpleNamespace
    >>> other_service: Fenced = SimpleNamespace(token=34, id="worker-7")
    """

    @property
    def token(self) -> int: ...
    @property
    def id(self) -> str: ...
