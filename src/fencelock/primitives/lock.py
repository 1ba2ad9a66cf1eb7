"""The lock: one holder at a time. It makes leases, and its only state is the open `with` blocks."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final, Generic, Literal, TypedDict

from fencelock.core.client import Client, L
from fencelock.core.validation import check_name, check_purpose, check_seconds, check_ttl, warn_long_ttl
from fencelock.model import Claim


class Unset(Enum):
    """The default of `acquire(timeout=…)`: the lock's own timeout."""

    UNSET = "the lock's own"

    def __repr__(self) -> str:
        return "..."


UNSET: Final = Unset.UNSET


class LockOptions(TypedDict, total=False):
    """The options of `lock` and `locked`; see `Locks.lock`."""

    ttl: float | None
    timeout: float | None
    renew: bool
    max_hold: float | None
    reentrant: bool
    purpose: Literal["efficiency", "correctness"]


class LockFactory(Generic[L]):
    """The lock of both APIs, as coroutines. It checks its arguments when it is made, before anything is locked."""

    def __init__(
        self,
        client: Client[L],
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        reentrant: bool = False,
        purpose: Literal["efficiency", "correctness"] = "efficiency",
    ) -> None:
        traits = client.engine.traits
        self._client = client
        self.name = check_name(name)
        self._ttl = client.ttl if ttl is None else check_ttl(ttl, traits, name)
        if ttl is not None:
            warn_long_ttl(ttl, name)
        self._timeout = None if timeout is None else check_seconds(timeout, "timeout", name, zero=True)
        self._renew = renew
        self._max_hold = None if max_hold is None else check_seconds(max_hold, "max_hold", name, zero=False)
        self._reentrant = reentrant
        self._purpose = purpose
        if purpose != "efficiency":
            check_purpose(purpose, traits, name)
        self.current_task = client.runtime.current_task
        self._entered: list[tuple[Hashable, L]] = []

    async def acquire(self, timeout: float | Unset | None = UNSET) -> L:
        """Return a lease, or raise LockTimeout."""
        seconds = self._timeout if timeout is UNSET else check_seconds(timeout, "timeout", self.name, zero=True)
        started = self._client.runtime.now()
        lease = await self._acquire(seconds)
        if lease is None:
            assert seconds is not None, "an acquire without a timeout waits until it is granted"
            raise await self._client.lock_timeout(self.name, seconds, started)
        return lease

    async def try_acquire(self) -> L | None:
        """Return a lease, or None if the lock is not free now."""
        return await self._acquire(0.0)

    async def _acquire(self, timeout: float | None) -> L | None:
        client = self._client
        claim = Claim(self.name, self._ttl, client.owner)
        if not self._reentrant:
            return await self._acquire_new(claim, timeout)
        if (held := self._held_here()) is not None:
            if held.is_lost():
                raise held._loss()
            if held._reenter():
                return held
        lease = await self._acquire_new(claim, timeout)
        if lease is not None:
            lease._reentry = (self.name, client.runtime.current_task())
            client.reentrant[lease._reentry] = lease
        return lease

    async def _acquire_new(self, claim: Claim, timeout: float | None) -> L | None:
        if self._purpose != "efficiency":
            # Check again: the engine reads the server's settings on the first connection, and they may change.
            await self._client.check_purpose(self._purpose, self.name, timeout)
        return await self._client.acquire(claim, timeout, self._renew, self._max_hold)

    def _held_here(self) -> L | None:
        """Return the lease that this thread or task holds through a reentrant lock of the same client."""
        lease = self._client.reentrant.get((self.name, self._client.runtime.current_task()))
        return None if lease is None or lease._is_released else lease

    def entered(self, task: Hashable, lease: L) -> L:
        """Begin a `with` block with a new lease. `task` is `current_task()`, which the caller reads before it acquires."""
        lease._blocks.enter(lease, task)
        self._entered.append((task, lease))
        return lease

    def leaving(self) -> L:
        """Remove and return the lease of the last `with` block of this thread or task; the caller exits the block.

        Other threads may enter and leave their blocks meanwhile.
        """
        entered = self._entered
        if len(entered) == 1:
            return entered.pop(0)[1]  # the only open block; a block that is entered now is appended after it
        current_task = self.current_task()
        blocks = entered.copy()
        # A fixture or an exit stack may enter in another task: then take the last block.
        block = next((block for block in reversed(blocks) if block[0] == current_task), blocks[-1])
        entered.remove(block)  # blocks of one lease are equal
        return block[1]
