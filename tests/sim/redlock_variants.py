"""Broken variants of fenced Redlock, Python and Lua: each has one mistake that the checker must find.

To see one fail: `python -m fencelock.sim --engine redlock --seeds 500 --variant tests.sim.redlock_variants:two_of_five`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from fencelock.core.clock import Deadline
from fencelock.engines.redis.scripts import Script
from fencelock.engines.redlock import commands
from fencelock.engines.redlock.engine import RedlockEngine
from fencelock.model import Claim, Grant, Renewal, Waiting
from tests.sim.variants import Variant


def script(name: str, old: str, new: str) -> AbstractContextManager[object]:
    """Replace a piece of a script by another."""
    text = getattr(commands, name).text
    assert old in text, f"{name} has changed: {old!r} is not in it"
    return patch.object(commands, name, Script(name.lower(), text.replace(old, new)))


@contextmanager
def any_proposal() -> Iterator[None]:
    """A free node takes any proposal, however low: tokens are then the clients' clocks."""
    with script("CLAIM", "local is_higher = tonumber(proposal) > highest_seen", "local is_higher = true"):
        yield


@contextmanager
def two_of_five() -> Iterator[None]:
    """Two nodes of five count as a majority, and one of three."""
    init = RedlockEngine.__init__

    def generous(self: RedlockEngine, *args: Any) -> None:
        init(self, *args)
        self._cluster.majority -= 1

    with patch.object(RedlockEngine, "__init__", generous):
        yield


@contextmanager
def undo_without_owner() -> Iterator[None]:
    """An undo or a release frees the node, whatever claim holds it."""
    with script("UNDO", "string.sub(holder, 1, #mine) == mine and ", ""):
        yield


@contextmanager
def heal_takes_over() -> Iterator[None]:
    """A heal takes a node that another claim has held since."""
    with script("HEAL", "if redis.call('EXISTS', LOCK) == 1 or tonumber(proposal) < last then return 0 end", ""):
        yield


@contextmanager
def deadline_from_reply() -> Iterator[None]:
    """The ttl counts from the last reply."""
    attempt = RedlockEngine.attempt

    async def late(self: RedlockEngine, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        return (await attempt(self, claim, enqueue=enqueue, deadline=deadline))._replace(since=self._runtime.now())

    with patch.object(RedlockEngine, "attempt", late):
        yield


@contextmanager
def one_renewal_is_enough() -> Iterator[None]:
    """A lease counts as renewed if any node renewed it."""
    renew = RedlockEngine.renew

    async def hopeful(self: RedlockEngine, grants: Sequence[Grant]) -> list[Renewal]:
        majority, self._cluster.majority = self._cluster.majority, 1
        try:
            return await renew(self, grants)
        finally:
            self._cluster.majority = majority

    with patch.object(RedlockEngine, "renew", hopeful):
        yield


VARIANTS = (
    Variant(any_proposal, "calm", "tokens", 50),
    Variant(two_of_five, "calm", "exclusion", 100),
    Variant(undo_without_owner, "calm", "exclusion", 50),
    Variant(heal_takes_over, "restarts", "exclusion", 200),
    Variant(deadline_from_reply, "late", "exclusion", 300),
    Variant(one_renewal_is_enough, "outage", "exclusion", 300),
)
