"""The in-memory fence, for a resource inside one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock

from fencelock.errors import FencelockError
from fencelock.fences import Fenced, core
from fencelock.fences.core import HighWaterMark
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis


class BaseMemoryFence(Api):
    """What both APIs share. Nothing of it waits for anything but the mutex."""

    def __init__(self) -> None:
        self._mutex = RLock()
        self._marks: dict[str, HighWaterMark] = {}
        self._min: HighWaterMark | None = None
        self._writing: dict[str, list[HighWaterMark]] = {}

    @both_apis
    async def enter(self, lease: Fenced, resource: str | None = None) -> None:
        """Refuse older tokens from now on; raise StaleToken or LeaseLost. Call it before the first read."""
        with self._mutex:
            self._advance(lease, resource)

    @both_apis
    async def check(self, lease: Fenced, resource: str | None = None) -> None:
        """Raise StaleToken if the resource has accepted a newer token, or an equal one of another claim.

        Another thread may enter between this and a write that follows: `write` excludes that.
        """
        with self._mutex:
            self._advance(lease, resource)

    @contextmanager
    def _write(self, lease: Fenced, resource: str | None) -> Iterator[None]:
        with self._mutex:
            name = self._advance(lease, resource)
            mark, writing = self._marks[name], self._writing.setdefault(name, [])
            writing.append(mark)
            try:
                yield
            finally:
                writing.remove(mark)
                if not writing:
                    self._writing.pop(name, None)

    @both_apis
    async def token(self, resource: str) -> int | None:
        """Return the lowest token that the resource accepts: the highest one so far, or `min_token`, or None.

        >>> MemoryFence().token("report")
        """
        with self._mutex:
            return core.token_of(self._marks.get(resource, self._min))

    @both_apis
    async def rebase(self, resource: str, token: int, *, reason: str) -> None:
        """Move the fence of a resource on purpose, down or up: it accepts every token from this one on. Logs the reason.

        For locks that moved to an engine whose clock is behind. A holder of an older lease is accepted, too: make sure that
        there is none.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter(SimpleNamespace(token=1000, id="old"), "report")
        >>> fence.rebase("report", 5, reason="another engine")
        >>> fence.enter(SimpleNamespace(token=5, id="new"), "report")
        """
        mark = HighWaterMark(core.check_token(token), "")
        core.check_resource(resource), core.check_reason(reason)
        with self._mutex:
            before = self._marks.get(resource)
            self._marks[resource] = mark
        core.log_rebase(resource, core.token_of(before), token, reason)

    @both_apis
    async def rebase_all(self, token: int, *, reason: str) -> int:
        """Move the fences of all resources, and `min_token`, to one token; return their number. Logs the reason.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter(SimpleNamespace(token=1000, id="old"), "report")
        >>> fence.rebase_all(5, reason="another engine"), fence.token("report")
        (1, 5)
        """
        mark = HighWaterMark(core.check_token(token), "")
        core.check_reason(reason)
        with self._mutex:
            self._marks = dict.fromkeys(self._marks, mark)
            self._min = self._min and mark
            count = len(self._marks)
        core.log_rebase_all(count, token, reason)
        return count

    @both_apis
    async def prune(self, min_token: int) -> int:
        """Remove the marks below `min_token`; return their number.

        From then on, a resource without a mark refuses tokens below `min_token`.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> fence.enter(SimpleNamespace(token=7, id="me"), "report")
        >>> fence.prune(1000), fence.token("report")
        (1, 1000)
        """
        with self._mutex:
            in_force = max(core.check_token(min_token), core.token_of(self._min) or 0)
            self._min = HighWaterMark(in_force, "")
            old = [resource for resource, mark in self._marks.items() if mark.token < min_token]
            for resource in old:
                del self._marks[resource]
        core.log_prune(len(old), in_force)
        return len(old)

    def _advance(self, lease: Fenced, resource: str | None) -> str:
        """Set the mark of a resource to this lease, or raise StaleToken; return the resource."""
        pair, name = core.named_credentials(lease, resource)
        core.admit(name, pair, self._marks.get(name, self._min))
        writing = self._writing.get(name)
        if writing and not writing[0].is_of(pair):
            raise FencelockError(
                f"another task of this thread writes {name!r} under token {writing[0].token}: a block of MemoryFence.write "
                "must not await",
                name,
            )
        self._marks[name] = HighWaterMark.of(pair)
        return name


class MemoryFence(BaseMemoryFence, BlockingApi):
    """Refuses old tokens, for each resource in this process. Threads may share it.

    Call `enter` before the first read that a write depends on; every write checks again.

    >>> import fencelock
    >>> from fencelock.fences import TokenPair
    >>> from fencelock.fences.memory import MemoryFence
    >>> fence, stock = MemoryFence(), {"apples": 100}
    >>> with fencelock.connect("memory://fence") as locks:
    ...     slow = locks.lock("apples", ttl=0.1, renew=False).acquire()
    ...     fence.enter(slow)                                  # before the first read
    ...     seen_by_slow = stock["apples"]
    ...     with locks.lock("apples") as lease:                # after the ttl of the slow holder
    ...         fence.enter(lease)
    ...         with fence.write(lease):                       # check and write in one step
    ...             stock["apples"] -= 10
    ...     for late in (slow, TokenPair(slow.token, slow.id, slow.name)):  # with its own clock, and without it
    ...         try:
    ...             with fence.write(late):
    ...                 stock["apples"] = seen_by_slow - 5
    ...         except fencelock.FencelockError as error:
    ...             print(type(error).__name__)
    LeaseLost
    StaleToken
    >>> stock
    {'apples': 90}
    """

    def write(self, lease: Fenced, resource: str | None = None) -> AbstractContextManager[None]:
        """Check, and let no other thread enter until the block ends. Keep the block short: it delays every resource.

        The block must not await: another task of the same thread that enters meanwhile gets an error.

        >>> from types import SimpleNamespace
        >>> fence = MemoryFence()
        >>> with fence.write(SimpleNamespace(token=7, id="me", name="report")):
        ...     report = "done"
        """
        return self._write(lease, resource)
