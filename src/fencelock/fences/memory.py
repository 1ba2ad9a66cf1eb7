"""The in-memory fence, for a resource inside one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

from fencelock.errors import StaleToken
from fencelock.fences import Fenced

_log = logging.getLogger("fencelock.fences")


class _Mark(NamedTuple):
    token: int
    id: str | None


class MemoryFence:
    """Refuses whoever comes with an older token than somebody before, resource by resource. Safe to share by threads.

    `enter` comes before the first read that a write depends on; every write is checked again.

    >>> import fencelock
    >>> from fencelock.fences.memory import MemoryFence
    >>> fence, stock = MemoryFence(), {"apples": 100}
    >>> with fencelock.connect("memory://fence") as locks:
    ...     slow = locks.lock("apples", ttl=0.1, renew=False).acquire()
    ...     fence.enter("apples", slow)                        # first, then read
    ...     seen_by_slow = stock["apples"]
    ...     with locks.lock("apples") as lease:                # the slow one was stopped for longer than its ttl
    ...         fence.enter("apples", lease)
    ...         with fence.write("apples", lease):             # nobody gets in between check and write
    ...             stock["apples"] -= 10
    ...     try:
    ...         with fence.write("apples", slow):
    ...             stock["apples"] = seen_by_slow - 5
    ...     except fencelock.StaleToken:
    ...         print("refused")
    refused
    >>> stock
    {'apples': 90}
    """

    def __init__(self) -> None:
        self._mutex = RLock()
        self._marks: dict[str, _Mark] = {}

    def enter(self, resource: str, lease: Fenced) -> None:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        with self._mutex:
            self._pass(resource, lease)

    def check(self, resource: str, lease: Fenced) -> None:
        """Raise StaleToken if a newer token, or an equal one of another owner, was here.

        Between this and a write that follows it another thread may enter: use `write` where that can be.
        """
        with self._mutex:
            self._pass(resource, lease)

    @contextmanager
    def write(self, resource: str, lease: Fenced) -> Iterator[None]:
        """Check, and let nobody else enter until the block ends. Keep it short: it holds up every resource.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> with fence.write("report", SimpleNamespace(token=7, id="me")):
        ...     report = "done"
        """
        with self._mutex:
            self._pass(resource, lease)
            yield

    def token(self, resource: str) -> int | None:
        """Return the highest token that was here, or None.

        >>> MemoryFence().token("report")
        """
        with self._mutex:
            mark = self._marks.get(resource)
            return None if mark is None else mark.token

    def rebase(self, resource: str, token: int) -> None:
        """Move the fence on purpose: from now on every token from this one on is let in. It is logged.

        For when tokens start anew, as after a move to an engine whose clock is behind. Whoever still holds an older lease
        could get in as well: make sure that nobody does.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter("report", SimpleNamespace(token=1000, id="old"))
        >>> fence.rebase("report", 5)
        >>> fence.enter("report", SimpleNamespace(token=5, id="new"))
        """
        with self._mutex:
            before = self._marks.get(resource)
            self._marks[resource] = _Mark(token, None)
        _log.warning(
            "the fence of %r was moved from %s to %d", resource, "nowhere" if before is None else before.token, token
        )

    def _pass(self, resource: str, lease: Fenced) -> None:
        mark = self._marks.get(resource)
        mine = _Mark(lease.token, lease.id)
        if mark is not None:
            if mine.token < mark.token:
                raise StaleToken(
                    f"{resource!r} has seen token {mark.token}, and this one is {mine.token}: the lease was lost and "
                    "somebody else has the lock. Acquire again and start over.",
                    resource,
                )
            if mine.token == mark.token and mark.id not in (None, mine.id):
                raise StaleToken(
                    f"{resource!r} has seen token {mark.token} of another owner, and this one is {mine.token} too: the "
                    "engine lost its data and its clock went back. Acquire again and start over.",
                    resource,
                )
        self._marks[resource] = mine
