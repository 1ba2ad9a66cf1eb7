"""Leftovers: claims that the engine may still have although this process no longer needs them.

There are three kinds: what a timed-out or cancelled acquire could not abandon, what a failed release could not release, and
leases that ended by this client's own clock (the engine may have applied a renewal whose reply was lost). The renewer
abandons them as soon as the engine can be reached, and `close` does so for all that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from fencelock.core.log import ERROR, log
from fencelock.errors import FencelockError

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.model import Claim

CLEANUP_SECONDS = 5.0
"""Seconds for which a cancelled caller waits for its clean-up."""
MAX_LEFTOVERS = 10_000
FIRST_PAUSE = 0.02
MAX_PAUSE = 1.0
HANGING_AFTER = 0.5
"""Seconds. A clean-up that takes longer and fails ends the pass: the engine hangs, and the next one would hang too."""


class Leftover(NamedTuple):
    """A claim to abandon, when to do that, and when the engine cannot have it any more."""

    claim: Claim
    due: float
    drop_at: float


class Leftovers:
    """The leftovers of one client, by the ids of their claims."""

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._table: dict[str, Leftover] = {}
        self._pause = FIRST_PAUSE
        self._processing = False

    def __contains__(self, id: str) -> bool:
        return id in self._table

    def claims(self) -> list[Claim]:
        """Return the claims that still have to be abandoned."""
        return [leftover.claim for leftover in list(self._table.values())]

    def add(self, claim: Claim, due: float, drop_at: float | None = None) -> None:
        """Remember to abandon the claim at that time or later.

        This neither blocks nor wakes the renewer: a finalizer may call it.
        By default it is dropped one ttl after it is due: whatever the engine got before that time has run out by then.
        """
        while len(self._table) >= MAX_LEFTOVERS:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster, or changed the table
                del self._table[next(iter(self._table))]
        self._table[claim.id] = Leftover(claim, due, due + claim.ttl if drop_at is None else drop_at)

    def remove(self, id: str) -> bool:
        """Remove a claim that was abandoned or released; return whether it was there."""
        return self._table.pop(id, None) is not None

    async def abandon_within(self, *claims: Claim, seconds: float) -> None:
        """Abandon the claims in the background; return when that is done, or after `seconds`."""
        if not claims:
            return
        self._add_in_flight(claims)
        with suppress(TimeoutError):
            await self._client.runtime.run_with_time_limit(self._abandon_all(claims), seconds)

    async def abandon_shielded(self, *claims: Claim) -> None:
        """Abandon the claims of a caller that is being cancelled or interrupted, before the caller continues."""
        self._add_in_flight(claims)
        with suppress(TimeoutError):
            await self._client.runtime.shield(self._abandon_all(claims), CLEANUP_SECONDS)

    def next_due(self) -> float:
        """Return when the next leftover is due: never if there is none, or if a pass is running."""
        if self._processing:
            return inf
        return min((min(leftover.due, leftover.drop_at) for leftover in list(self._table.values())), default=inf)

    def start_pass(self, now: float) -> bool:
        """Return whether the caller should run `process` now. Until that ends, other callers get False."""
        if self._processing or now < self.next_due():
            return False
        self._processing = True
        return True

    def skip_pass(self) -> None:
        """Postpone the leftovers that are due: no thread could be started for the pass."""
        self._processing = False
        now = self._client.runtime.now()
        for id, leftover in list(self._table.items()):
            if leftover.due <= now:
                self._table[id] = leftover._replace(due=now + MAX_PAUSE)

    async def process(self) -> None:
        """Abandon everything that is due. What fails is due again after a pause."""
        now = self._client.runtime.now
        try:
            for id, leftover in list(self._table.items()):
                started = now()
                if leftover.drop_at <= started:
                    self.remove(id)
                elif (
                    leftover.due <= started
                    and not await self._abandon(leftover.claim)
                    and now() - started >= HANGING_AFTER
                ):
                    break
        finally:
            self._processing = False
        self._client.renewer.look_at(self.next_due())

    async def process_all(self) -> None:
        """Abandon all leftovers, due or not."""
        for claim in self.claims():
            await self._abandon(claim)

    def _add_in_flight(self, claims: Sequence[Claim]) -> None:
        """Add claims that are being abandoned now: they are due only if that never ends."""
        now = self._client.runtime.now()
        for claim in claims:
            self.add(claim, now + CLEANUP_SECONDS, now + claim.ttl)

    async def _abandon_all(self, claims: Sequence[Claim]) -> None:
        """Abandon claims while a caller waits. If the engine fails, try again; after HANGING_AFTER the renewer does it."""
        now = self._client.runtime.now
        until = now() + HANGING_AFTER
        for at, claim in enumerate(claims):
            while claim.id in self._table and not await self._abandon(claim):
                if now() >= until:
                    for left in claims[at + 1 :]:
                        self.add(left, now())
                    self._client.renewer.look_at(self.next_due())
                    return
                await self._client.runtime.sleep(self._pause)

    async def _abandon(self, claim: Claim) -> bool:
        """Abandon the claim; return whether the engine did it. If not, it is due again after a pause."""
        client = self._client
        try:
            await client.engine.abandon(claim)
        except Exception as error:
            if not isinstance(error, FencelockError):
                message = f"the clean-up of {claim.name!r} failed unexpectedly; it is tried again: {error}"
                log("renewer", ERROR, message, error=error, lock=claim.name)
        else:
            self._pause = FIRST_PAUSE
            self.remove(claim.id)
            return True
        self._pause = min(self._pause * 2, MAX_PAUSE)
        if (leftover := self._table.get(claim.id)) is not None:
            self._table[claim.id] = leftover._replace(due=client.runtime.now() + min(self._pause, claim.ttl / 10))
        return False
