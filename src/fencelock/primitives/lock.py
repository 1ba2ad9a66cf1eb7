"""The lock: it makes leases in one mode. A reader, a writer, a permit and a candidate of an election are locks, too."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar

from fencelock.core.acquire import ShouldStop
from fencelock.core.block import take_last
from fencelock.core.client import Client, L
from fencelock.core.group import BaseGroup
from fencelock.core.lease import BaseLease
from fencelock.core.lease_state import HoldOptions
from fencelock.core.validation import (
    check_mode,
    check_name,
    check_purpose,
    check_seconds,
    check_timeout,
    check_ttl,
    warn_long_ttl,
)
from fencelock.model import Claim, Mode


class Unset(Enum):
    """The default of `acquire(timeout=…)`: the lock's own timeout."""

    UNSET = "the lock's own"

    def __repr__(self) -> str:
        return "..."


UNSET: Final = Unset.UNSET

H = TypeVar("H", bound=BaseLease | BaseGroup)


class CommonOptions(TypedDict, total=False):
    """The options of every primitive; see `Locks.lock`. Jobs have no others: they neither wait nor run without renewal."""

    ttl: float | None
    max_hold: float | None
    stall_after: float | None
    purpose: Literal["efficiency", "correctness"]


class WaitOptions(CommonOptions, total=False):
    """The options of every lock."""

    timeout: float | None
    renew: bool


class LockOptions(WaitOptions, total=False):
    """The options of `lock`, `rwlock` and `locked`."""

    reentrant: bool


class EnteredBlocks(Generic[H]):
    """The open `with` blocks of one lock object. Several threads or tasks may be inside at once."""

    def __init__(self, client: Client[Any]) -> None:
        self.current_task = client.runtime.current_task
        self._entered: list[tuple[Hashable, H]] = []

    def enter_block(self, task: Hashable, held: H) -> H:
        """Begin a `with` block with a new lease. `task` is `current_task()`, which the caller reads before it acquires."""
        held._blocks.enter(held, task)
        self._entered.append((task, held))
        return held

    def pop_block(self, popped: list[H] | None = None) -> H:
        """Remove and return the lease of the last `with` block of this thread or task; the caller exits the block.

        If this task has entered none, it is the last block of any task: a fixture or an exit stack may leave a block in
        another task than it entered. The lease is in `popped` before it is removed: a caller that Ctrl-C interrupts finds
        it there, or with `pop_own_block`.
        """
        return take_last(self._entered, self.current_task, popped)[1]

    def pop_own_block(self) -> H | None:
        """Remove and return the lease of the last `with` block of this thread or task, never another's; or None."""
        task = self.current_task()
        if all(entered != task for entered, _ in self._entered.copy()):
            return None
        return self.pop_block()


class BaseLock(EnteredBlocks[L]):
    """The lock of both APIs, as coroutines. It checks its arguments when it is made, before anything is locked."""

    def __init__(
        self,
        client: Client[L],
        name: str,
        mode: Mode = Mode.EXCLUSIVE,
        limit: int | None = None,
        value: str = "",
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        stall_after: float | None = None,
        reentrant: bool = False,
        purpose: Literal["efficiency", "correctness"] = "efficiency",
        on_granted: Callable[[L], object] | None = None,
    ) -> None:
        super().__init__(client)
        traits = client.engine.traits
        self._client = client
        self.name = check_name(name)
        self._ttl = client.ttl if ttl is None else check_ttl(ttl, traits, name)
        if ttl is not None:
            warn_long_ttl(ttl, name)
        self._timeout = None if timeout is None else check_timeout(timeout, name)
        check_mode(mode, traits, name)
        self.mode = mode
        self._limit = limit
        self._value = value
        self._hold = HoldOptions(
            renew,
            check_seconds(max_hold, "max_hold", name, zero=False),
            check_seconds(stall_after, "stall_after", name, zero=False),
        )
        self._reentrant = reentrant
        self._purpose = purpose
        self._on_granted = on_granted
        if purpose != "efficiency":
            check_purpose(purpose, traits, name)

    async def acquire(self, timeout: float | Unset | None = UNSET) -> L:
        """Return a lease, or raise LockTimeout."""
        seconds = self._timeout if timeout is UNSET else check_timeout(timeout, self.name)
        started = self._client.runtime.now()
        lease = await self._acquire(seconds)
        if lease is None:
            assert seconds is not None, "an acquire without a timeout waits until it is granted"
            raise await self._client.lock_timeout(self.name, seconds, started)
        return lease

    async def try_acquire(self) -> L | None:
        """Return a lease, or None if the lock is not free now."""
        held_here = self._reentrant and self._held_here() is not None
        if not held_here and self._client.would_deadlock(self.name, self.mode):
            return None
        return await self._acquire(0.0)

    async def acquire_unless(self, should_stop: ShouldStop | None) -> L | None:
        """Wait without a timeout; return None once `should_stop` says so."""
        return await self._acquire(None, should_stop)

    async def _acquire(self, timeout: float | None, should_stop: ShouldStop | None = None) -> L | None:
        client = self._client
        if self._reentrant and (held := self._held_here()) is not None:
            if held.is_lost():
                raise held._loss()
            if held._reenter():
                return held
        client.check_deadlock(self.name, self.mode)
        if self._purpose != "efficiency":
            # Check again: the engine reads the server's settings on the first connection, and they may change.
            await client.check_purpose(self._purpose, self.name, timeout)
        claim = Claim(self.name, self._ttl, client.owner, self.mode, self._limit, self._value)
        lease = await client.acquire(claim, timeout, self._hold, should_stop)
        if lease is not None and self._reentrant:
            lease._reentrant_in = client.runtime.current_task()
            client.reentrant[self.name, lease._reentrant_in] = lease
        if lease is not None and self._on_granted is not None:
            self._on_granted(lease)
        return lease

    def _held_here(self) -> L | None:
        """Return the lease that this thread or task holds, in this mode, through a reentrant lock of the same client."""
        lease = self._client.reentrant.get((self.name, self._client.runtime.current_task()))
        return None if lease is None or lease._released or lease.mode is not self.mode else lease
