"""The in-memory fence, for a resource inside one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from fencelock.errors import FencelockError
from fencelock.fences import Fenced
from fencelock.fences.core import (
    Mark,
    admit,
    bearer,
    check_reason,
    check_resource,
    check_token,
    resource_of,
    tell_collected,
    tell_moved,
    token_of,
)


class MemoryFence:
    """Refuses whoever comes with an older token than somebody before, resource by resource. Safe to share by threads.

    `enter` comes before the first read that a write depends on; every write is checked again.

    >>> import fencelock
    >>> from fencelock.fences.memory import MemoryFence
    >>> fence, stock = MemoryFence(), {"apples": 100}
    >>> with fencelock.connect("memory://fence") as locks:
    ...     slow = locks.lock("apples", ttl=0.1, renew=False).acquire()
    ...     fence.enter(slow)                                  # first, then read
    ...     seen_by_slow = stock["apples"]
    ...     with locks.lock("apples") as lease:                # the slow one was stopped for longer than its ttl
    ...         fence.enter(lease)
    ...         with fence.write(lease):                       # nobody gets in between check and write
    ...             stock["apples"] -= 10
    ...     try:
    ...         with fence.write(slow):
    ...             stock["apples"] = seen_by_slow - 5
    ...     except fencelock.StaleToken:
    ...         print("refused")
    refused
    >>> stock
    {'apples': 90}
    """

    def __init__(self) -> None:
        self._mutex = RLock()
        self._marks: dict[str, Mark] = {}
        self._floor: Mark | None = None
        self._open: dict[str, list[Mark]] = {}

    def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Keep older tokens out from now on, or raise StaleToken. Call it before the first read."""
        with self._mutex:
            self._pass(lease, resource)

    def check(self, lease: Fenced, resource: str | None = None) -> None:
        """Raise StaleToken if a newer token, or an equal one of another owner, was here.

        Between this and a write that follows it another thread may enter: use `write` where that can be.
        """
        with self._mutex:
            self._pass(lease, resource)

    @contextmanager
    def write(self, lease: Fenced, resource: str | None = None) -> Iterator[None]:
        """Check, and let nobody else enter until the block ends. Keep it short: it holds up every resource.

        In asyncio it must not await: tasks share a thread, and one that came amid the block gets an error.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> with fence.write(SimpleNamespace(token=7, id="me", name="report")):
        ...     report = "done"
        """
        with self._mutex:
            name = self._pass(lease, resource)
            mine, open_ = self._marks[name], self._open.setdefault(name, [])
            open_.append(mine)
            try:
                yield
            finally:
                open_.remove(mine)
                if not open_:
                    self._open.pop(name, None)

    def token(self, resource: str) -> int | None:
        """Return the lowest token that would be let in: the highest that was, or the floor, or None.

        >>> MemoryFence().token("report")
        """
        with self._mutex:
            return token_of(self._marks.get(resource, self._floor))

    def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence on purpose, down or up: every token from this one on is let in. Logged, with the reason.

        For when tokens start anew, as after a move to an engine whose clock is behind. Whoever still holds an older lease
        could get in as well: make sure that nobody does.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter(SimpleNamespace(token=1000, id="old"), "report")
        >>> fence.rebase("report", 5, reason="another engine")
        >>> fence.enter(SimpleNamespace(token=5, id="new"), "report")
        """
        mark = Mark(check_token(token), "")
        check_reason(check_resource(resource), reason)
        with self._mutex:
            before = self._marks.get(resource)
            self._marks[resource] = mark
        tell_moved(resource, token_of(before), token, reason)

    def collect(self, floor: int) -> int:
        """Forget every resource whose token is below the floor; return how many there were.

        A resource that is forgotten, or that was never seen, refuses tokens below the floor from then on.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter(SimpleNamespace(token=7, id="me"), "report")
        >>> fence.collect(1000), fence.token("report")
        (1, 1000)
        """
        with self._mutex:
            self._floor = Mark(max(check_token(floor), 0 if self._floor is None else self._floor.token), "")
            old = [resource for resource, mark in self._marks.items() if mark.token < floor]
            for resource in old:
                del self._marks[resource]
            in_force = self._floor.token
        tell_collected(len(old), in_force)
        return len(old)

    def _pass(self, lease: Fenced, resource: str | None) -> str:
        mine = bearer(lease)
        name = resource_of(mine, resource)
        admit(name, mine, self._marks.get(name, self._floor))
        writing = self._open.get(name)
        if writing and not writing[0].is_of(mine):
            raise FencelockError(
                f"{name!r} is being written under token {writing[0].token} by another task of this thread: a block of "
                "MemoryFence.write must not await",
                name,
            )
        self._marks[name] = Mark.of(mine)
        return name
