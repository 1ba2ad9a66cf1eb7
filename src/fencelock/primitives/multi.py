"""The multi-lock: several names at once, all or nothing. All contenders acquire in one global order, so none deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, TypeVar, Unpack

from fencelock.core.client import Client
from fencelock.core.clock import Deadline
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.group import BaseGroup
from fencelock.core.validation import check_name, check_timeout
from fencelock.errors import FencelockError, InvalidArgument, InvalidType
from fencelock.model import Mode
from fencelock.primitives.lock import UNSET, BaseLock, EnteredBlocks, Unset, WaitOptions

MAX_NAMES = 32

G = TypeVar("G", bound=BaseGroup)


def modes_of(names: Iterable[str], read: Iterable[str], write: Iterable[str]) -> dict[str, Mode]:
    """Return the mode of each name, in the order in which they are acquired; a name to read and to write is written."""
    for given in (read, write):
        if isinstance(given, str):
            raise InvalidType(f"read and write take several names, as in read=[{given!r}]")
    names = tuple(names)
    if len(names) == 1 and isinstance(names[0], list | tuple | set):
        raise InvalidType("multi() takes the names one by one, as in multi('a', 'b')")
    modes = {check_name(name): Mode.SHARED for name in read}
    modes |= {check_name(name): Mode.EXCLUSIVE for name in (*names, *write)}
    if not 1 <= len(modes) <= MAX_NAMES:
        raise InvalidArgument(f"a multi-lock takes 1 to {MAX_NAMES} names, not {len(modes)}")
    return {name: modes[name] for name in sorted(modes, key=str.encode)}


class BaseMultiLock(EnteredBlocks[G]):
    """The multi-lock of both APIs, as coroutines. It checks its arguments when it is made, before anything is locked."""

    def __init__(
        self,
        client: Client[Any],
        make_group: Callable[[Client[Any]], G],
        modes: dict[str, Mode],
        **options: Unpack[WaitOptions],
    ) -> None:
        super().__init__(client)
        self._client = client
        self._make_group = make_group
        self.names = tuple(modes)
        self._timeout = check_timeout(options.pop("timeout", None), self.names[0])
        self._locks = [BaseLock[Any](client, name, mode, **options) for name, mode in modes.items()]

    async def acquire(self, timeout: float | Unset | None = UNSET) -> G:
        """Return all leases, or raise LockTimeout with the name that was not free in time."""
        seconds = self._timeout if timeout is UNSET else check_timeout(timeout, self.names[0])
        for lock in self._locks:
            self._client.check_deadlock(lock.name, lock.mode)
        started = self._client.runtime.now()
        group, missing = await self._acquire_all(Deadline(self._client.runtime.now, seconds, started))
        if group is None:
            assert seconds is not None, "an acquire without a timeout waits until it is granted"
            raise await self._client.lock_timeout(missing, seconds, started)
        return group

    async def try_acquire(self) -> G | None:
        """Return all leases, or None if one of the names is not free now."""
        if any(self._client.would_deadlock(lock.name, lock.mode) for lock in self._locks):
            return None
        group, _ = await self._acquire_all(Deadline(self._client.runtime.now, 0.0))
        return group

    async def _acquire_all(self, deadline: Deadline) -> tuple[G | None, str]:
        """Acquire one lock after the other; on any failure release what was acquired. Return the name that was missing."""
        leftovers = self._client.renewer.leftovers
        while True:
            group = self._make_group(self._client)
            missing = ""
            try:
                for lock in self._locks:
                    lease = await lock._acquire(None if deadline.at is None else deadline.at_most(inf))
                    if lease is None:
                        missing = lock.name
                        break
                    group._add(lease)
                if not missing and group._complete():
                    return group, ""
            except FencelockError:
                await leftovers.abandon_within(*group._withdraw(), seconds=MIN_REPLY_TIMEOUT)
                raise
            except BaseException:
                await leftovers.abandon_shielded(*group._withdraw())
                raise
            # A lock was not free, or a lease was lost while this waited for the next: this process was stopped.
            await leftovers.abandon_within(*group._withdraw(), seconds=MIN_REPLY_TIMEOUT)
            if missing:
                return None, missing
