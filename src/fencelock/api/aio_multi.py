"""The asyncio API of multi-locks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Never, NoReturn

from fencelock.api.aio_lock import Lease, Lost
from fencelock.core.group import BaseGroup
from fencelock.primitives.api_hints import AsyncioOnly, no_keyword
from fencelock.primitives.lock import UNSET, Unset
from fencelock.primitives.multi import BaseMultiLock


class Group(BaseGroup):
    """The leases of a multi-lock, by name. The loss of one is the loss of all.

    >>> from fencelock.aio import connect
    >>> async def main():
    ...     async with connect("memory://group") as locks, locks.multi("a", "b") as group:
    ...         return group["a"].token > 0, len(group), group.remaining > 29
    >>> asyncio.run(main())
    (True, 2, True)
    """

    @property
    def leases(self) -> Mapping[str, Lease]:
        """The leases by name, in the order in which they were acquired."""
        return {lease.name: lease for lease in self._members if isinstance(lease, Lease)}

    def __getitem__(self, name: str) -> Lease:
        return self.leases[name]

    @property
    def lost(self) -> Lost:
        """The event that a lease of the group is lost: `is_set()`, which is also its truth value, and `wait(timeout)`."""
        return Lost(self)

    async def release(self) -> bool:
        """Release all leases, even if one fails; return True if the group still held all of them. Safe to call again."""
        return await self._release()

    async def __aenter__(self) -> Group:
        self._enter_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._exit_block(error)


class MultiLock(AsyncioOnly):
    """A lock on several names, all or nothing.

    >>> from fencelock.aio import connect
    >>> async def main():
    ...     async with connect("memory://multi") as locks:
    ...         transfer = locks.multi("account:1", "account:2", timeout=5)
    ...         async with transfer:
    ...             return await locks.lock("account:2").try_acquire()
    >>> asyncio.run(main()) is None
    True
    """

    __slots__ = ("_multi",)

    def __init__(self, multi: BaseMultiLock[Group]) -> None:
        self._multi = multi

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they are acquired."""
        return self._multi.names

    async def acquire(self, timeout: float | Unset | None = UNSET, **unknown: Never) -> Group:
        """Wait for all locks; raise LockTimeout with the name that was not free in time. Nothing is held then."""
        if unknown:
            raise no_keyword("acquire", unknown)
        return await self._multi.acquire(timeout)

    async def try_acquire(self, **unknown: Never) -> Group | None:
        """Return all leases, or None if one of the names is not free now."""
        if unknown:
            raise no_keyword("try_acquire", unknown)
        return await self._multi.try_acquire()

    async def __aenter__(self) -> Group:
        return self._multi.enter_block(self._multi.current_task(), await self._multi.acquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._multi.pop_block()._exit_block(error)

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(self.names)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock lock cannot be sent to another process; call connect() there")
