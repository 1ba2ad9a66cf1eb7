"""The renewer: renews all leases of a client, in batches, and reports a loss on time even if the engine hangs."""

from __future__ import annotations

import warnings
import weakref
from math import inf
from typing import TYPE_CHECKING, Any

from fencelock.core.lease import BaseLease
from fencelock.core.leftovers import Leftovers
from fencelock.core.log import ERROR, INFO, WARNING, log
from fencelock.errors import EngineUnavailable, FencelockError
from fencelock.model import Grant, LossReason, Renewal

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.runtime import Event

EARLY_SHARE = 0.1
"""A lease joins a batch if it is due within this share of a third of its ttl."""


IDLE_SECONDS = 1.0
"""Seconds for which the loop waits for the next lease before it ends: a start for each lease costs more."""


class LeaseRef(weakref.ref[BaseLease]):
    """A weak reference to a lease, with its grant: the lease may become garbage while it is held."""

    __slots__ = ("grant",)

    grant: Grant


class LeaseRenewer:
    """One per client. It runs while there are leases or leftovers and ends, in one place, when there are none.

    Renewals run beside the loop that watches the deadlines: one that hangs delays neither the report of a loss nor the
    renewal of another lease.
    """

    def __init__(self, client: Client[Any]) -> None:
        self._client = client
        self._leases: dict[str, LeaseRef] = {}  # other threads change it: copy it before an iteration
        self.leftovers = Leftovers(client)
        self._renewing: set[str] = set()
        self._gone: set[str] = set()
        self._wake: Event | None = None
        self._planned = inf
        self._in_trouble: set[str] = set()
        """The leases whose last renewal failed, by id."""

    def add(self, lease: BaseLease) -> None:
        """Start to renew a lease and to watch its deadline. A caller that is interrupted here has to `remove` it."""
        kept = LeaseRef(lease, self._on_garbage)
        grant = kept.grant = lease._grant
        self._leases[grant.claim.id] = kept
        self.look_at(lease._next_look())

    def remove(self, id: str) -> LeaseRef | None:
        """Remove a lease and return its entry. Only one caller gets the entry, and may release the lease."""
        return self._leases.pop(id, None)

    def look_at(self, at: float) -> None:
        """Make the loop check all leases at this time or before; start the loop if it is not running."""
        ours = wake = None
        try:
            with self._client.mutex:
                if at >= self._planned or self._client.closed:
                    return
                self._planned = at
                if self._wake is None:
                    ours = self._client.runtime.event()
                    self._wake = ours
                wake = self._wake
            if ours is None:
                wake.set()
            else:
                self._client.runtime.spawn(self._run(ours), "fencelock-renewer")
        except BaseException:  # Ctrl-C, or no more threads: the next caller must find a running loop, or none
            with self._client.mutex:
                if ours is not None:
                    self._ended(ours)
            if wake is not None:
                wake.set()
            raise

    def __contains__(self, id: str) -> bool:
        """Whether it renews the lease with this id."""
        return id in self._leases

    def gone(self, id: str) -> None:
        """Record, from any thread, that the engine has dropped a claim; the loop ends its lease immediately."""
        with self._client.mutex:
            wake = self._wake
            if id not in self._leases or wake is None:
                return  # another client's, or released, or not a lease yet: then the next renewal finds out
            self._gone.add(id)
        wake.set()

    def leases(self) -> list[BaseLease]:
        """Return the leases that are still held."""
        return [lease for kept in list(self._leases.values()) if (lease := kept()) is not None]

    def grants(self) -> list[Grant]:
        """Return the grants of the leases that are still held."""
        return [lease._grant for lease in self.leases()]

    def _on_garbage(self, kept: weakref.ref[BaseLease]) -> None:
        """Warn about a lease that became garbage while it was held. No mutex: this may run anywhere, even under it.

        It is not released now, but expires or is released by close(): the code that dropped the object may still be running.
        """
        grant: Grant = kept.grant  # type: ignore[attr-defined]
        if self._leases.get(grant.claim.id) is kept:
            self._orphan(grant)
        elif grant.claim.id not in self.leftovers:  # the loop may have moved it there
            return
        message = (
            f"the lease on {grant.claim.name!r} (token {grant.token}) was dropped without release(): it is no "
            f"longer renewed and runs out within {grant.claim.ttl:g} s. Keep a reference to it, or use a with block."
        )
        # Log it too: Python hides ResourceWarnings by default.
        log("lease", WARNING, message, lock=grant.claim.name, token=grant.token, owner=grant.claim.owner)
        warnings.warn(message, ResourceWarning, stacklevel=2)

    def _orphan(self, grant: Grant) -> None:
        """Remember the claim of a lease that became garbage, so that close() can abandon it."""
        self.leftovers.add(grant.claim, self._client.runtime.now() + grant.claim.ttl)
        self.remove(grant.claim.id)

    async def _run(self, wake: Event) -> None:
        try:
            while True:
                # No reference to a lease may stay here during the sleep: it would hide that the user dropped the lease.
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
                self._ended(wake)  # its event loop was closed: the next lease starts it again
            raise

    def _act(self, due: list[BaseLease], overdue: list[BaseLease], gone: list[BaseLease]) -> None:
        for lease in overdue:
            lease._expire()
        for lease in gone:
            lease._lose(LossReason.GONE)
        if due:
            try:
                self._client.runtime.spawn(self._renew(due), "fencelock-renewal")
            except RuntimeError as error:  # no more threads: the same as a renewal without a reply
                self._answered(due, [Renewal.UNKNOWN] * len(due), self._client.runtime.now(), error)
        if self.leftovers.start_pass(self._client.runtime.now()):
            try:
                self._client.runtime.spawn(self.leftovers.process(), "fencelock-clean-up")
            except RuntimeError:
                self.leftovers.skip_pass()

    def _ended(self, wake: Event) -> None:
        if self._wake is wake:
            self._wake, self._planned = None, inf

    def _look(self) -> tuple[list[BaseLease], list[BaseLease], list[BaseLease]]:
        """Decide which leases to renew now and which have ended: their time is over, or the engine has dropped them."""
        now = self._client.runtime.now()
        due: list[BaseLease] = []
        overdue: list[BaseLease] = []
        gone: list[BaseLease] = []
        with self._client.mutex:
            gone_ids, self._gone = self._gone, set()
            for id, kept in list(self._leases.items()):
                lease = kept()
                if lease is None:
                    # If the entry is gone, the lease was released after the copy. No code can release it now.
                    if self._leases.get(id) is kept:
                        self._orphan(kept.grant)
                elif lease._over:
                    self.remove(id)
                elif now >= lease.deadline:
                    overdue.append(lease)
                elif id in gone_ids:
                    gone.append(lease)
                elif id not in self._renewing and lease._wants_renewal(now + lease.ttl / 3 * EARLY_SHARE):
                    due.append(lease)
            if not any(lease._wants_renewal(now) for lease in due):
                due = []
            self._renewing.update(lease.id for lease in due)
        return due, overdue, gone

    def _plan(self) -> float | None:
        """Return how long to sleep, or None if there are no leases and no leftovers. The caller holds the mutex."""
        now, before = self._client.runtime.now(), self._planned
        self._planned = self.leftovers.next_due()
        for id, kept in list(self._leases.items()):
            if (lease := kept()) is not None:
                self._planned = min(self._planned, lease.deadline if id in self._renewing else lease._next_look())
        if self._planned == inf and not self._leases and now < before < inf:
            # A lease was released before this check. The next one often follows soon, and then need not wake the loop.
            self._planned = min(before, now + IDLE_SECONDS)
        return None if self._planned == inf else max(0.0, self._planned - now)

    async def _renew(self, due: list[BaseLease]) -> None:
        sent = self._client.runtime.now()
        failure: BaseException | None = None
        answers = [Renewal.UNKNOWN] * len(due)
        try:
            if any(lease._downgrading for lease in due):
                answers = [await self._renew_one(lease) for lease in due]
            else:
                answers = await self._client.engine.renew([lease._grant for lease in due])
        except Exception as error:
            failure = error
        finally:
            self._answered(due, answers, sent, failure)

    async def _renew_one(self, lease: BaseLease) -> Renewal:
        """Renew a lease of a batch in which a downgrade has to be repeated first."""
        if lease._downgrading:
            answer, _ = await lease._send_downgrade()
            if answer is not Renewal.RENEWED:
                return answer
        try:
            (answer,) = await self._client.engine.renew([lease._grant])
        except EngineUnavailable:
            return Renewal.UNKNOWN
        return answer

    def _answered(
        self, due: list[BaseLease], answers: list[Renewal], sent: float, failure: BaseException | None
    ) -> None:
        """Apply the replies to a batch of renewals."""
        with self._client.mutex:
            self._renewing.difference_update(lease.id for lease in due)
        why = str(failure or "the engine sent no reply")
        unknown = []
        recovered = False
        for lease, answer in zip(due, answers, strict=True):
            if answer is Renewal.UNKNOWN and not lease._over:
                unknown.append(lease)
            recovered = recovered or (answer is Renewal.RENEWED and lease.id in self._in_trouble)
            lease._apply_renewal(answer, sent, why)
        self._log_outage([lease for lease in unknown if not lease._over], recovered, failure)
        looks = [lease._next_look() for lease in self.leases()]
        if looks and self._wake is not None:
            self.look_at(min(looks))

    def _log_outage(self, unknown: list[BaseLease], recovered: bool, failure: BaseException | None) -> None:
        """Log the first failed renewal of an outage, and the renewal that ends it."""
        engine = self._client.engine.traits.engine
        with self._client.mutex:
            before = {id for id in self._in_trouble if id in self._leases}
            self._in_trouble = {lease.id for lease in self.leases() if lease._trouble is not None}
            after = self._in_trouble
        if failure is not None and not isinstance(failure, FencelockError):
            log("renewer", ERROR, "a renewal failed unexpectedly; it is tried again", error=failure, engine=engine)
        elif unknown and not before:
            lease = min(unknown, key=lambda lease: lease.deadline)
            others = f" and {len(unknown) - 1} other leases" if len(unknown) > 1 else ""
            log(
                "renewer",
                WARNING,
                f"the renewal of {lease.name!r}{others} failed; it is tried again for the {lease.remaining:.1f} s that are "
                f"left: {lease._trouble}",
                lock=lease.name,
                token=lease.token,
                owner=lease.owner,
                remaining=lease.remaining,
                leases=len(unknown),
                engine=engine,
            )
        elif recovered and not after:
            log("renewer", INFO, "renewals work again", engine=engine)

    def stop(self, reason: LossReason) -> None:
        """End all leases and the loop. The caller releases the grants that it got from `grants` before."""
        for lease in self.leases():
            lease._lose(reason)
        with self._client.mutex:
            wake, self._wake, self._planned = self._wake, None, inf
        if wake is not None:
            wake.set()
