"""The blocking API of locks: Lost, Lease, Lock, RWLock."""

from __future__ import annotations

from types import TracebackType
from typing import Never, NoReturn

from fencelock.core.block import give_up
from fencelock.core.group import BaseGroup
from fencelock.core.lease import BaseLease
from fencelock.errors import FencelockError
from fencelock.primitives.api_hints import BlockingOnly, Hints, NoBlock, no_keyword, no_lock_without_client
from fencelock.primitives.lock import UNSET, BaseLock, Unset
from fencelock.runtime.blocking import run_sync


def after_interrupt(error: BaseException, held: BaseLease | BaseGroup | None) -> None:
    """Stop renewing the lease of a `with` block if its end was interrupted, as by Ctrl-C: no code can release it."""
    if held is not None and not isinstance(error, FencelockError):
        give_up(held)


class Lost:
    """The event that a lease is lost.

    >>> from fencelock import connect
    >>> with connect("memory://lost") as locks, locks.lock("x") as lease:
    ...     lease.lost.is_set(), lease.lost.wait(timeout=0.01)
    (False, False)
    """

    __slots__ = ("_lease",)

    def __init__(self, lease: BaseLease | BaseGroup) -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """Return whether the lease is lost. It reads the clock, so it is right even after this thread was stopped."""
        return self._lease.is_lost()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the lease is lost or released, at most `timeout` seconds; return whether it is lost."""
        return run_sync(self._lease._wait_lost(timeout))

    def __bool__(self) -> bool:
        return self.is_set()

    def __repr__(self) -> str:
        return f"<Lost {self._lease.name!r} {'set' if self.is_set() else 'not set'}>"


class Lease(Hints, BaseLease):
    """A held lock: its name, its fencing token, and the time that is left.

    >>> from fencelock import connect
    >>> with connect("memory://lease") as locks:
    ...     lease = locks.lock("x", ttl=30).acquire()
    ...     lease.remaining > 29, lease.release(), lease.release()
    (True, True, False)
    """

    __slots__ = ()

    @property
    def lost(self) -> Lost:
        """The event that the lease is lost: `is_set()`, which is also its truth value, and `wait(timeout)`."""
        return Lost(self)

    def renew(self) -> None:
        """Renew now; the client also renews in the background. Raises LeaseLost, or EngineUnavailable without a reply."""
        run_sync(self._renew_now())

    def downgrade(self) -> None:
        """Turn a write lease into a read lease, in place, and admit the readers that wait directly behind it.

        Raises LeaseLost, or NotHeld if this is not a write lease. Without a reply of the engine the lease counts as a read
        lease at once, and the client repeats the request.
        """
        run_sync(self._downgrade())

    def release(self) -> bool:
        """Release the lock; return True if the lease still held it. Safe to call again."""
        return run_sync(self._release())

    def __enter__(self) -> Lease:
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


class Lock(BlockingOnly):
    """A lock on a name: it makes leases, and threads may share it.

    >>> from fencelock import connect
    >>> with connect("memory://lock") as locks:
    ...     lock = locks.lock("x", timeout=5)
    ...     with lock as lease:
    ...         lock.try_acquire() is None
    True
    """

    __slots__ = ("_lock",)

    def __init__(self, lock: BaseLock[Lease]) -> None:
        if isinstance(lock, str):
            raise no_lock_without_client(lock)
        self._lock = lock

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._lock.name

    def acquire(self, timeout: float | Unset | None = UNSET, **unknown: Never) -> Lease:
        """Wait for the lock, by default for the lock's own timeout; raise LockTimeout.

        Keep a reference to the lease: without one it is no longer renewed.
        """
        if unknown:
            raise no_keyword("acquire", unknown)
        return run_sync(self._lock.acquire(timeout))

    def try_acquire(self, **unknown: Never) -> Lease | None:
        """Return a lease, or None if the lock is not free now."""
        if unknown:
            raise no_keyword("try_acquire", unknown)
        return run_sync(self._lock.try_acquire())

    def __enter__(self) -> Lease:
        return self._lock.enter_block(self._lock.current_task(), run_sync(self._lock.acquire()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        popped: list[Lease] = []
        try:  # no call before it: Ctrl-C may come at any step
            run_sync(self._lock.pop_block(popped)._exit_block(error))
        except BaseException as failure:
            after_interrupt(failure, popped[0] if popped else self._lock.pop_own_block())
            raise

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock lock cannot be sent to another process; call connect() there")


class RWLock(NoBlock):
    """A reader-writer lock: `read()` and `write()` return locks. Nobody overtakes, so writers do not starve.

    >>> from fencelock import connect
    >>> with connect("memory://rwlock") as locks:
    ...     catalog = locks.rwlock("catalog")
    ...     with catalog.write() as lease:
    ...         lease.downgrade()
    ...         lease.mode.value
    'shared'
    """

    __slots__ = ("_read", "_write")

    def __init__(self, read: Lock, write: Lock) -> None:
        self._read = read
        self._write = write

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._write.name

    def read(self) -> Lock:
        """Return the lock for readers, who hold it together."""
        return self._read

    def write(self) -> Lock:
        """Return the lock for a writer, who holds it alone. Its lease can be downgraded to a read lease."""
        return self._write

    def __repr__(self) -> str:
        return f"<RWLock {self.name!r}>"
