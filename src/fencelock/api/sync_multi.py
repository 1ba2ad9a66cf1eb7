"""The blocking API of multi-locks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Never, NoReturn

from fencelock.api.sync_lock import Lease, Lost, after_interrupt
from fencelock.core.group import BaseGroup
from fencelock.primitives.api_hints import BlockingOnly, no_keyword
from fencelock.primitives.lock import UNSET, Unset
from fencelock.primitives.multi import BaseMultiLock
from fencelock.runtime.blocking import run_sync


class Group(BaseGroup):
    """The leases of a multi-lock, by name. The loss of one is the loss of all.

    >>> from fencelock import connect
    >>> with connect("memory://group") as locks, locks.multi("a", "b") as group:
    ...     group["a"].token > 0, len(group), group.remaining > 29
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

    def release(self) -> bool:
        """Release all leases, even if one fails; return True if the group still held all of them. Safe to call again."""
        return run_sync(self._release())

    def __enter__(self) -> Group:
        self._enter_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            run_sync(self._exit_block(error))
        except BaseException as failure:
            after_interrupt(failure, self)
            raise


class MultiLock(BlockingOnly):
    """A lock on several names, all or nothing.

    >>> from fencelock import connect
    >>> with connect("memory://multi") as locks:
    ...     transfer = locks.multi("account:1", "account:2", timeout=5)
    ...     with transfer:
    ...         locks.lock("account:2").try_acquire() is None
    True
    """

    __slots__ = ("_multi",)

    def __init__(self, multi: BaseMultiLock[Group]) -> None:
        self._multi = multi

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they are acquired."""
        return self._multi.names

    def acquire(self, timeout: float | Unset | None = UNSET, **unknown: Never) -> Group:
        """Wait for all locks; raise LockTimeout with the name that was not free in time. Nothing is held then."""
        if unknown:
            raise no_keyword("acquire", unknown)
        return run_sync(self._multi.acquire(timeout))

    def try_acquire(self, **unknown: Never) -> Group | None:
        """Return all leases, or None if one of the names is not free now."""
        if unknown:
            raise no_keyword("try_acquire", unknown)
        return run_sync(self._multi.try_acquire())

    def __enter__(self) -> Group:
        return self._multi.enter_block(self._multi.current_task(), run_sync(self._multi.acquire()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        popped: list[Group] = []
        try:
            run_sync(self._multi.pop_block(popped)._exit_block(error))
        except BaseException as failure:
            after_interrupt(failure, popped[0] if popped else self._multi.pop_own_block())
            raise

    def __repr__(self) -> str:
        return f"<MultiLock {', '.join(self.names)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock lock cannot be sent to another process; call connect() there")
