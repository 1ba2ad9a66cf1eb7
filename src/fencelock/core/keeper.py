"""The keeper: renews all leases of a client, in batches, and tells of a loss on time even if the engine hangs."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from fencelock.core.lease import LeaseCore
from fencelock.errors import FencelockError
from fencelock.model import Grant, Reason, Renewal

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.world import Event

SLACK = 0.1
"""A lease joins a batch if it is due within this share of a third of its ttl."""


REST = 1.0
"""Seconds for which it stays at most when there is nothing to do: to start anew for each lease costs more than the rest."""


class Kept(weakref.ref[LeaseCore]):
    """A lease that may become garbage while it is held, and the grant that stays of it then."""

    __slots__ = ("grant",)

    grant: Grant


class Keeper:
    """One per client. It runs while there are leases and ends, in one place, when there are none.

    Renewals run beside the loop that watches the deadlines: one that hangs delays neither the news of a loss nor the
    renewal of another lease.
    """

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._leases: dict[str, Kept] = {}  # it changes at any moment: to be copied before it is looked through
        self.drop: Callable[[str, None], Kept | None] = self._leases.pop
        """Forgets a lease, by its id, and returns what was kept; a renewal that is under way no longer matters."""
        self._orphans: dict[str, tuple[Grant, float]] = {}
        self.early: dict[str, tuple[Grant, float]] = {}
        """What was lost before the engine would have ended it, by id: for its `release` to give back, or else for `close`."""
        self._untold: deque[tuple[LeaseCore, Reason]] = deque()
        self._renewing: set[str] = set()
        self._gone: set[str] = set()
        self._wake: Event | None = None
        self._planned = inf
        self.trouble: str | None = None
        """Why the last renewals failed, if they did. In words: the error would keep its frames, and the leases in them."""

    def expect(self, lease: LeaseCore) -> Kept:
        """Return what `add` takes for a lease that has no grant yet: it is made while others hold the lock."""
        return Kept(lease, self._dropped)

    def add(self, lease: LeaseCore, kept: Kept) -> None:
        """Look after a lease from now on. Whoever is interrupted in this has to `drop` it."""
        grant = kept.grant = lease._grant
        self._leases[grant.claim.id] = kept
        planned = self._planned
        # Without the mutex, as nothing changes: a plan that was not made in sight of this lease is the end of time until it
        # is made, and only gets earlier then. So where one is seen that is early enough for the lease, it holds.
        if lease._due >= planned and lease.deadline >= planned:
            return
        ours = wake = None
        try:
            with self._client.mutex:
                if self._wake is None:
                    ours = self._client.world.event()
                    self._wake = ours
                wake = self._wake
                self._planned = min(self._planned, lease._due, lease.deadline)
            if ours is None:
                wake.set()
            else:
                self._client.world.spawn(self._run(ours), "fencelock-keeper")
        except BaseException:  # Ctrl-C, or no more threads: whoever comes next must find a loop that runs, or none
            with self._client.mutex:
                if ours is not None:
                    self._ended(ours)
            if wake is not None:
                wake.set()
            raise

    def drop_early(self, id: str) -> None:
        """Forget a lease that is over for its holder, not yet for the engine. The mutex is held."""
        if (kept := self._leases.get(id)) is not None:
            _note(self.early, kept.grant, self._client.world.now())
            if self.drop(id, None) is None:  # a release was faster: it gives it back
                self.early.pop(id, None)

    def __contains__(self, id: str) -> bool:
        """Whether it looks after the lease with this id."""
        return id in self._leases

    def gone(self, id: str) -> None:
        """Note that the engine has dropped a claim, from any thread; the loop tells its lease at once."""
        with self._client.mutex:
            wake = self._wake
            if id not in self._leases or wake is None:
                return  # not ours, or given back, or not a lease yet: then the next renewal says so
            self._gone.add(id)
        wake.set()

    def leases(self) -> list[LeaseCore]:
        """Return the leases that are still held."""
        with self._client.mutex:
            return [lease for kept in list(self._leases.values()) if (lease := kept()) is not None]

    def grants(self) -> list[Grant]:
        """Return what the engine still has of ours: the leases that are held, and those that were dropped or lost early."""
        now = self._client.world.now()
        with self._client.mutex:
            # In this order: whatever goes from the first to the others meanwhile is seen twice rather than never.
            grants = {lease.id: lease._grant for lease in self.leases()}
            for left in (self._orphans, self.early):
                grants |= {id: grant for id, (grant, until) in list(left.items()) if until > now}
        return list(grants.values())

    def _dropped(self, kept: weakref.ref[LeaseCore]) -> None:
        """Warn about a lease that became garbage while it was held. No mutex: this may run anywhere, even under it.

        It is left to run out, or until the client is closed, rather than released at once: whoever dropped the object may
        still be at work under it.
        """
        grant: Grant | None = getattr(kept, "grant", None)
        if grant is None:
            return  # it was never held
        if self._leases.get(grant.claim.id) is kept:
            self._orphan(grant)
        elif grant.claim.id not in self._orphans:  # where the loop puts it, if it is faster than we are
            return
        message = (
            f"the lease on {grant.claim.name!r} (token {grant.token}) was dropped without release(): it is no "
            f"longer renewed and runs out within {grant.claim.ttl:g} s. Keep a reference to it, or use a with block."
        )
        self._client.caution(message)  # Python hides ResourceWarnings unless it is asked for them
        warnings.warn(message, ResourceWarning, stacklevel=2)

    def _orphan(self, grant: Grant) -> None:
        """Note for `close` that the engine has something of ours that nobody else knows of any more."""
        _note(self._orphans, grant, self._client.world.now())
        self.drop(grant.claim.id, None)

    async def _run(self, wake: Event) -> None:
        try:
            while True:
                # No reference may stay here while asleep: it would hide that the user dropped a lease.
                self._act(*self._look())
                with self._client.mutex:
                    delay = self._plan()
                    if delay is None or self._wake is not wake:
                        self._ended(wake)
                        return
                if await wake.wait(delay):
                    wake.clear()
        except BaseException:
            with self._client.mutex:
                self._ended(wake)  # its event loop was closed: the next lease starts it anew
            raise

    def _act(self, due: list[LeaseCore], overdue: list[LeaseCore], gone: list[LeaseCore]) -> None:
        for lease in overdue:
            lease._run_out(self._to_tell)
        for lease in gone:
            lease._lose(Reason.GONE, self._to_tell)
        if due:
            try:
                self._client.world.spawn(self._renew(due), "fencelock-renewal")
            except RuntimeError as error:  # no more threads: the same as a renewal without an answer
                self._client.complain("a renewal could not be started; it is tried again", error)
                self._answered(due, [Renewal.UNKNOWN] * len(due), self._client.world.now())
        if self._untold:
            try:
                # A user's function may take its time: not here, where the other leases wait to be renewed.
                self._client.world.spawn(self._tell(), "fencelock-on-lost")
            except RuntimeError:
                self._tell_now()

    def _to_tell(self, lease: LeaseCore, reason: Reason) -> None:
        """Note a loss, to be told after all leases know where they are: at the latest when the client is closed."""
        if self._client.cares_about_loss:
            self._untold.append((lease, reason))

    async def _tell(self) -> None:
        self._tell_now()

    def _tell_now(self) -> None:
        while self._untold:
            try:
                loss = self._untold.popleft()
            except IndexError:
                return  # another thread was faster
            self._client.tell_lost(*loss)

    def _ended(self, wake: Event) -> None:
        if self._wake is wake:
            self._wake, self._planned = None, inf

    def _look(self) -> tuple[list[LeaseCore], list[LeaseCore], list[LeaseCore]]:
        """Decide which leases to renew now and which to give up: their time is over, or the engine has dropped them."""
        now = self._client.world.now()
        due: list[LeaseCore] = []
        overdue: list[LeaseCore] = []
        gone: list[LeaseCore] = []
        with self._client.mutex:
            dropped, self._gone = self._gone, set()
            for id, kept in list(self._leases.items()):
                lease = kept()
                if lease is None:
                    # If it is not there any more, it was released after we copied: nobody can do that from now on.
                    if self._leases.get(id) is kept:
                        self._orphan(kept.grant)
                elif lease._over:
                    self.drop(id, None)
                elif now >= lease.deadline:
                    overdue.append(lease)
                elif id in dropped:
                    gone.append(lease)
                elif id not in self._renewing and lease._wants_renewal(now + lease.ttl / 3 * SLACK):
                    due.append(lease)
            if not any(lease._wants_renewal(now) for lease in due):
                due = []
            self._renewing.update(lease.id for lease in due)
        return due, overdue, gone

    def _plan(self) -> float | None:
        """Return how long to sleep, or None if there is nothing left to look after. The mutex is held."""
        before, self._planned = self._planned, inf
        if not self._leases:
            now = self._client.world.now()
            if before == inf or before <= now:
                return None
            # A lease was given back before we came to look. Another often follows soon, and need not wake us.
            self._planned = min(before, now + REST)
            return self._planned - now
        for id, kept in list(self._leases.items()):
            if (lease := kept()) is not None:
                look = lease.deadline if id in self._renewing else min(lease._due, lease.deadline)
                self._planned = min(self._planned, look)
        return None if self._planned == inf else max(0.0, self._planned - self._client.world.now())

    async def _renew(self, due: list[LeaseCore]) -> None:
        sent = self._client.world.now()
        try:
            answers = await self._client.backend.renew([lease._grant for lease in due])
            self.trouble = None
        except FencelockError as error:
            self.trouble = str(error)
            answers = [Renewal.UNKNOWN] * len(due)
        except Exception as error:
            self._client.complain("a renewal failed in a way that it never should; it is tried again", error)
            answers = [Renewal.UNKNOWN] * len(due)
        except BaseException:
            self._answered(due, [Renewal.UNKNOWN] * len(due), sent)
            raise
        self._answered(due, answers, sent)
        self._tell_now()

    def _answered(self, due: list[LeaseCore], answers: list[Renewal], sent: float) -> None:
        """Take in the answers, and note the losses that are still to be told."""
        for lease, answer in zip(due, answers, strict=True):
            lease._renewed(answer, sent, self._to_tell)
        with self._client.mutex:
            self._renewing.difference_update(lease.id for lease in due)
        self._replan()

    def _replan(self) -> None:
        """Wake the loop if a renewal moved something to before its next look."""
        with self._client.mutex:
            looks = [min(lease._due, lease.deadline) for lease in self.leases()]
            wake = self._wake
            if not looks or min(looks) >= self._planned or wake is None:
                return
            self._planned = min(looks)
        wake.set()

    def stop(self, reason: Reason) -> None:
        """Give up every lease that is left, and end. What `grants` has told of is the caller's now.

        What was lost and is not told yet is told here: whoever was to do it may be ended with the client.
        """
        for lease in self.leases():
            lease._lose(reason)
        self._tell_now()
        self.early.clear()
        with self._client.mutex:
            wake, self._wake, self._planned = self._wake, None, inf
        if wake is not None:
            wake.set()


def _note(left: dict[str, tuple[Grant, float]], grant: Grant, now: float) -> None:
    """Note what the engine has of ours, for as long as it can have it, and forget what it cannot have any more."""
    for id, (_, until) in list(left.items()):
        if until <= now:
            left.pop(id, None)
    left[grant.claim.id] = grant, now + grant.claim.ttl
