"""Semaphores whose contenders use different limits: each respects its own, and a warning says so."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from fencelock.core.log import WARNING, log
from fencelock.errors import FencelockError

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.model import Claim

COMPARE_SECONDS = 1.0
"""Seconds between two comparisons for a name, while a client waits for permits."""
MAX_COMPARED = 10_000
"""How many names a client remembers."""


class LimitComparison:
    """Compares the limits of a semaphore's contenders while a claim waits for a permit."""

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._next: dict[str, float] = {}
        """When to compare again, by name."""

    def compare_in_background(self, claim: Claim) -> None:
        """Compare the limits, unless this client has done so for the name within the last second."""
        now = self._client.runtime.now()
        if now < self._next.get(claim.name, 0.0):
            return
        if len(self._next) >= MAX_COMPARED:
            self._next.clear()
        self._next[claim.name] = now + COMPARE_SECONDS
        with suppress(RuntimeError):  # no more threads
            self._client.runtime.spawn(self._compare(claim), "fencelock-compare-limits")

    async def _compare(self, claim: Claim) -> None:
        """Log, once for each name, that others use the semaphore with another limit."""
        client = self._client
        with suppress(FencelockError):
            limits = (await client.engine.inspect(claim.name)).limits
            if len(limits) > 1:
                self._next[claim.name] = inf
                message = (
                    f"the semaphore {claim.name!r} is used with the limits {', '.join(map(str, limits))}: each contender "
                    f"respects its own, this one {claim.limit}. That is normal during a deploy"
                )
                log("client", WARNING, message, lock=claim.name, limits=limits, owner=client.owner)
