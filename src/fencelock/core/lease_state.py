"""The state of a lease: its grant, its deadline, and how its loss is reported."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fencelock.core.block import Blocks
from fencelock.core.log import WARNING, log
from fencelock.core.validation import check_seconds
from fencelock.errors import LeaseLost
from fencelock.model import Grant, LossReason, Mode, Renewal, clock_margin

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.group import BaseGroup
    from fencelock.core.runtime import Event

_HINTS = {
    LossReason.EXPIRED: "its deadline passed before it could be renewed",
    LossReason.GONE: "the engine no longer has it: it was released by force, its connection or session was ended, or the "
    "server was restarted or lost it",
    LossReason.MAX_HOLD: "it was held for as long as max_hold allows",
    LossReason.STALLED: "its holder did not call progress() for as long as stall_after allows",
    LossReason.FORKED: "this is the copy in a forked child; connect and acquire in the child itself",
    LossReason.CLOSED: "its client was closed",
}

ENDED_HERE = (LossReason.EXPIRED, LossReason.MAX_HOLD, LossReason.STALLED)
"""The reasons of losses that this client's own clock decides."""

ADVICE = "; others may hold it now: stop what it protected, then acquire it again"


class HoldOptions(NamedTuple):
    """How a lease is kept: `renew` in the background, for at most `max_hold` seconds, while its holder makes progress."""

    renew: bool = True
    max_hold: float | None = None
    stall_after: float | None = None


class LeaseState:
    """What users read of a lease, and what the renewer changes.

    Its state changes under the client's one mutex and never across an await, so that a loss is reported once and a renewal
    never outlives a release.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_client",
        "_depth",
        "_downgrading",
        "_due",
        "_engine_end",
        "_event",
        "_grant",
        "_group",
        "_hold_ends",
        "_pause",
        "_progressed",
        "_reentrant_in",
        "_released",
        "_renews",
        "_stall_after",
        "_trouble",
        "deadline",
        "reason",
    )

    def __init__(self, client: Client[Any], grant: Grant, options: HoldOptions) -> None:
        now = client.runtime.now
        self._client = client
        self._grant = grant
        self._event: Event | None = None
        self._released = False
        self._blocks = Blocks()
        self._depth = 1
        self._renews = options.renew
        self._hold_ends = None if options.max_hold is None else now() + options.max_hold
        """When `max_hold` is over."""
        self._stall_after = options.stall_after
        self._progressed = inf if options.stall_after is None else now()
        """When the holder made progress last."""
        self._downgrading = False
        """Whether the engine has not confirmed a downgrade: the renewer repeats it."""
        self._group: BaseGroup | None = None
        """The group of a multi-lock: it reports the loss of its leases, once."""
        self.reason: LossReason | None = None
        """How it was lost, or None."""
        self._pause = 0.0
        self._trouble: str | None = None
        """Why the last renewal failed, or None. A text: an exception would keep its frames alive, and the leases in them."""
        self._reentrant_in: Hashable = None
        """The thread or task whose reentrant locks share this lease, or None."""
        self._extend(grant.since, grant.claim.ttl)

    # ------------------------------------------------------------------ what users read

    @property
    def name(self) -> str:
        """The name that is held."""
        return self._grant.claim.name

    @property
    def token(self) -> int:
        """The fencing token: above every token that was granted for this name before."""
        return self._grant.token

    @property
    def id(self) -> str:
        """The claim's id: 128 random bits that engines and fences compare, so that equal tokens still differ."""
        return self._grant.claim.id

    @property
    def owner(self) -> str:
        """The label for people; see `connect(owner=…)`."""
        return self._grant.claim.owner

    @property
    def ttl(self) -> float:
        """Seconds after which the engine grants the lock to others if the lease is not renewed."""
        return self._grant.claim.ttl

    @property
    def mode(self) -> Mode:
        """How the name is held: exclusive, shared (a read lease), or as one of several permits."""
        return self._grant.claim.mode

    @property
    def remaining(self) -> float:
        """Seconds that the holder may still trust the lease; 0 once it is released or lost."""
        if self._released or self.is_lost():
            return 0.0
        return max(0.0, self.deadline - self._client.runtime.now())

    def is_lost(self) -> bool:
        """Return whether the lease ended before it was released. It looks at the clock itself."""
        if self.reason is None and not self._released and self._client.runtime.now() >= self.deadline:
            self._expire()
        return self.reason is not None

    def check(self) -> None:
        """Raise LeaseLost if the lease is over, released or lost."""
        if self.is_lost():
            raise self._loss()
        if self._released:
            raise LeaseLost(f"the lease on {self.name!r} was released; acquire again", self.name, None)

    def progress(self) -> None:
        """Report progress. A lease with `stall_after` is renewed only while its holder calls this often enough."""
        if self._stall_after is not None:
            self.check()
            self._progressed = self._client.runtime.now()
            self._client.renewer.look_at(self._next_look())  # it may have stopped the renewals

    def _loss(self) -> LeaseLost:
        """Return the error for the loss."""
        reason = self.reason or LossReason.EXPIRED
        advice = ADVICE if reason in (LossReason.EXPIRED, LossReason.GONE, LossReason.STALLED) else ""
        return LeaseLost(f"{self._how_lost()}{advice}", self.name, reason)

    def _how_lost(self) -> str:
        """Return what happened, without what to do next."""
        reason = self.reason or LossReason.EXPIRED
        hindered = self._trouble if reason is LossReason.EXPIRED else None
        why = f"{_HINTS[reason]} ({hindered})" if hindered is not None else _HINTS[reason]
        return f"the lease on {self.name!r} (token {self.token}) is lost: {why}"

    def __repr__(self) -> str:
        state = (
            "released" if self._released else f"lost: {self.reason}" if self.is_lost() else f"{self.remaining:.1f} s"
        )
        return f"<Lease {self.name!r} token={self.token} {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock lease cannot be sent to another process; call connect() and acquire there")

    # ------------------------------------------------------------------ what changes it

    @property
    def _over(self) -> bool:
        """Whether the renewer has nothing left to do for it."""
        return self._released or self.reason is not None

    def _wants_renewal(self, now: float) -> bool:
        """Return whether a renewal is due."""
        return now >= self._due and not self._stalled(now)

    def _unrenewed_for(self, now: float) -> float:
        """Return for how many seconds a renewal has been due without success; negative if none is due yet."""
        return now - (self._engine_end - (self.ttl * 2 / 3 if self._renews else 0.0))

    def _stalled(self, now: float) -> bool:
        """Return whether its holder has made no progress for too long."""
        return self._stall_after is not None and now - self._progressed >= self._stall_after

    def _next_look(self) -> float:
        """Return when the renewer has to look at it: when a renewal is due, or at the deadline."""
        if self._stalled(max(self._due, self._client.runtime.now())):
            return self.deadline
        return min(self._due, self.deadline)

    def _expire(self) -> None:
        """Lose it because its deadline has passed."""
        stalled = self._stalled(self.deadline)
        reason = LossReason.STALLED if stalled else LossReason.EXPIRED
        self._lose(LossReason.MAX_HOLD if self.deadline == self._hold_ends else reason)

    def _extend(self, since: float, ttl: float) -> None:
        """Start the ttl at `since`, which must not lie after the time at which the engine started it."""
        self._engine_end: float = since + ttl
        self.deadline: float = self._engine_end - clock_margin(ttl)
        self._due: float = since + ttl / 3 if self._renews else inf
        if self._hold_ends is not None and self.deadline >= self._hold_ends:
            self.deadline, self._due = self._hold_ends, inf

    def _apply_renewal(self, answer: Renewal, sent: float, why: str | None = None) -> None:
        """Apply the reply to a renewal that was sent at this time. `why` says why there is no reply."""
        with self._client.mutex:
            if self._over:
                return
            now = self._client.runtime.now()
            late = now >= self.deadline
            if answer is Renewal.RENEWED and not late:
                self._pause, self._trouble = 0.0, None
                self._extend(sent, self.ttl)
            elif answer is Renewal.UNKNOWN and not late:
                self._trouble = why
                self._retry_soon(now)
        if late:  # whatever the reply says: the session may have ended with the lease, by the same clock
            self._expire()
        elif answer is Renewal.LOST:
            self._lose(LossReason.GONE)

    def _retry_soon(self, now: float) -> None:
        """Plan the next renewal after one without a reply: soon at first, then with longer pauses."""
        self._pause = min(self._pause * 2 or self.ttl / 30, self.ttl / 6)
        if self._due != inf or self._downgrading:  # else only the holder renews it, or it is about to reach max_hold
            self._due = now + self._pause * (0.5 + self._client.runtime.random() / 2)

    def _lose(self, reason: LossReason) -> None:
        """End the lease, once: wake the waiters of `lost`, cancel the bodies of `with` blocks, call `on_lost`."""
        renewer = self._client.renewer
        with self._client.mutex:
            if self._over:
                return
            self.reason = reason
            if renewer.remove(self.id) is not None and reason in ENDED_HERE:
                # The engine ends it at this time, unless it has applied a renewal whose reply was lost.
                renewer.leftovers.add(self._grant.claim, self._engine_end)
        if reason is LossReason.FORKED:
            return  # a copy of the parent's lease: setting the parent's event would write into the parent's loop
        if self._event is not None:
            self._event.set()
        self._blocks.interrupt()
        self._report_loss()

    def _report_loss(self) -> None:
        """Report the loss once: a group reports it for all its leases."""
        if self._group is not None:
            self._group._member_lost()
        else:
            self._notify_lost(self)

    def _notify_lost(self, lost: LeaseState | BaseGroup, note: str = "") -> None:
        """Log the loss and call the user's `on_lost` with the lease or its group, unless close() was the cause."""
        reason = self.reason or LossReason.EXPIRED
        if reason is LossReason.CLOSED:
            return
        self._client.call_on_lost(lost, reason)
        log(
            "lease",
            WARNING,
            f"{self._how_lost()}{note}",
            lock=self.name,
            token=self.token,
            owner=self.owner,
            reason=reason.value,
            engine=self._client.engine.traits.engine,
        )

    async def _wait_lost(self, timeout: float | None) -> bool:
        """Wait until the lease is lost or released; return whether it is lost."""
        timeout = check_seconds(timeout, "timeout", self.name, zero=True)
        if not self._over:
            with self._client.mutex:
                if self._event is None:
                    self._event = self._client.runtime.event()
            if not self._over:
                await self._event.wait(timeout)
        return self.is_lost()
