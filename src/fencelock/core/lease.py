"""What a holder holds: a grant, its deadline, and the news of its loss."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from fencelock.core.acquire import FIRST_PAUSE, naming
from fencelock.core.block import Blocks
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.log import WARNING, log
from fencelock.core.validation import check_mode, check_seconds
from fencelock.errors import EngineUnavailable, FencelockError, LeaseLost, NotHeld, OutcomeUnknown, ReleaseFailed
from fencelock.model import Claim, Grant, LossReason, Mode, Renewal, clock_margin

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.group import BaseGroup
    from fencelock.core.runtime import Event

RELEASE_SECONDS = 1.0
"""A release without a reply is sent again for so long; then the renewer goes on with it."""

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


class BaseLease:
    """What the blocking and the asyncio lease share: those add `release`, `renew`, `lost` and the context manager.

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
        "_final",
        "_grant",
        "_group",
        "_pause",
        "_progressed",
        "_reentry",
        "_released",
        "_renews",
        "_stall_after",
        "_trouble",
        "deadline",
        "reason",
    )

    def __init__(self, client: Client[Any], options: HoldOptions) -> None:
        self._client = client
        self._event: Event | None = None
        self._released = False
        self._blocks = Blocks()
        self._depth = 1
        self._renews = options.renew
        self._final = options.max_hold
        self._stall_after = options.stall_after
        self._progressed = inf
        """When the holder made progress last."""
        self._downgrading = False
        """Whether the engine has not confirmed a downgrade: the renewer repeats it."""
        self._group: BaseGroup | None = None
        """The group of a multi-lock: it reports the loss of its leases, once."""
        self.reason: LossReason | None = None
        """How it was lost, or None."""
        self._pause = 0.0
        self._trouble: str | None = None
        """Why the last renewal failed, if it did. In words: the error would keep its frames, and the leases in them."""
        self._reentry: tuple[str, Mode, Hashable] | None = None

    def _begin(self, grant: Grant) -> None:
        """Take the grant."""
        self._grant = grant
        if self._final is not None:
            self._final += self._client.runtime.now()
        if self._stall_after is not None:
            self._progressed = self._client.runtime.now()
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
        """Seconds after which the engine lets others in if the lease is not renewed."""
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
        """Say that the work goes on. A lease with `stall_after` is renewed only while its holder calls this often enough."""
        if self._stall_after is not None:
            self.check()
            self._progressed = self._client.runtime.now()
            self._client.renewer.look_at(self._next_look())  # it may have stopped the renewals

    def _loss(self) -> LeaseLost:
        """Return the error that tells of the loss."""
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

    # ------------------------------------------------------------------ what changes it

    @property
    def _is_released(self) -> bool:
        """Whether it was released."""
        return self._released

    @property
    def _over(self) -> bool:
        """Whether the renewer has nothing left to do for it."""
        return self._released or self.reason is not None

    def _wants_renewal(self, now: float) -> bool:
        """Return whether it is due."""
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
        self._lose(LossReason.MAX_HOLD if self.deadline == self._final else reason)

    def _extend(self, since: float, ttl: float) -> None:
        """Count from then on, which must not lie after the engine did: earlier by a moment is safe."""
        self._engine_end: float = since + ttl
        self.deadline: float = self._engine_end - clock_margin(ttl)
        self._due: float = since + ttl / 3 if self._renews else inf
        if self._final is not None and self.deadline >= self._final:
            self.deadline, self._due = self._final, inf

    def _renewed(self, answer: Renewal, sent: float, why: str | None = None) -> None:
        """Apply the reply to a renewal that was sent at that time. `why` says why there was none."""
        with self._client.mutex:
            if self._over:
                return
            now = self._client.runtime.now()
            if now < self.deadline:
                if answer is Renewal.RENEWED:
                    self._pause, self._trouble = 0.0, None
                    self._extend(sent, self.ttl)
                    return
                if answer is not Renewal.LOST:
                    self._trouble = why
                    # Sooner after an UNKNOWN, then ever more slowly, but several times before the deadline.
                    self._pause = min(self._pause * 2 or self.ttl / 30, self.ttl / 6)
                    if self._due != inf or self._downgrading:  # else renewed by hand only, or about to reach max_hold
                        self._due = now + self._pause * (0.5 + self._client.runtime.random() / 2)
                    return
        if now < self.deadline:
            self._lose(LossReason.GONE)
        else:
            # Also if the reply is LOST: our own clock may have been the first to end it, and its session with it.
            self._expire()

    def _lose(self, reason: LossReason) -> None:
        """End the lease, once: wake who waits for the loss, cancel the bodies of `with` blocks, call `on_lost`."""
        renewer = self._client.renewer
        with self._client.mutex:
            if self._over:
                return
            self.reason = reason
            if renewer.drop(self.id) is not None and reason in ENDED_HERE:
                # The engine ends it then, unless it has applied a renewal whose reply was lost.
                renewer.leftovers.add(self._grant.claim, self._engine_end)
        if reason is LossReason.FORKED:
            return  # this is only a copy, and the event is the parent's: to set it would write into the parent's loop
        if self._event is not None:
            self._event.set()
        self._blocks.interrupt()
        self._report_loss()

    def _report_loss(self) -> None:
        """Log the loss and call the user's `on_lost`, unless close() was the cause; a group does it for all its leases."""
        if self._group is not None:
            self._group._member_lost()
            return
        reason = self.reason or LossReason.EXPIRED
        if reason is LossReason.CLOSED:
            return
        self._client.call_on_lost(self, reason)
        log(
            "lease",
            WARNING,
            self._how_lost(),
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

    async def _renew_now(self) -> None:
        """Renew at once, for callers that want to be sure of a whole ttl ahead."""
        self._client.runtime.check_usable()
        self.check()
        sent = self._client.runtime.now()
        with naming(self.name):
            (answer,) = await self._client.engine.renew([self._grant])
        self._renewed(answer, sent)
        if answer is Renewal.UNKNOWN:
            raise EngineUnavailable(
                f"the renewal of {self.name!r} was not answered; {self.remaining:.1f} s are left of it", self.name
            )
        self.check()

    async def _downgrade(self) -> None:
        """Turn a write lease into a read lease, and admit the readers behind it.

        Without a reply the lease counts as a read lease at once, and the renewer repeats the request.
        """
        self._client.runtime.check_usable()
        self.check()
        if self.mode is not Mode.EXCLUSIVE or self._depth > 1:
            held = f"as a {self.mode.value} lease" if self.mode is not Mode.EXCLUSIVE else "by an outer block, too"
            raise NotHeld(f"the lease on {self.name!r} cannot be downgraded: it is held {held}", self.name)
        check_mode(Mode.SHARED, self._client.engine.traits, self.name)
        writing, sent = self._grant, self._client.runtime.now()
        with self._client.mutex:
            self._grant = writing.downgraded(writing.since)
            self._downgrading = True
            if self._reentry is not None:  # a nested write() must not get this lease, and a nested read() may
                self._client.reentrant.pop(self._reentry, None)
                self._reentry = (self.name, Mode.SHARED, self._reentry[2])
                self._client.reentrant[self._reentry] = self
        answer = Renewal.UNKNOWN
        try:
            answer = await self._repeat_downgrade()
        finally:
            self._renewed(answer, sent, self._trouble)
            if self._downgrading and not self._over:
                self._client.renewer.look_at(self._next_look())
        self.check()

    async def _repeat_downgrade(self) -> Renewal:
        """Send the downgrade; it counts as a renewal."""
        try:
            await self._client.engine.downgrade(self._grant)
        except NotHeld:
            return Renewal.LOST
        except EngineUnavailable as error:
            self._trouble = str(error)
            return Renewal.UNKNOWN
        self._downgrading = False
        return Renewal.RENEWED

    def _reenter(self) -> bool:
        """Count one more holder of the same lease (reentrancy); False if another thread has just released it."""
        with self._client.mutex:
            self._depth += 1
            if not self._released and self.id in self._client.renewer:
                return True
            self._depth -= 1
            return False

    async def _release(self) -> bool:
        """Release; return whether it was still ours. Calling again is harmless. Raise ReleaseFailed."""
        client, claim = self._client, self._grant.claim
        leftovers = client.renewer.leftovers
        client.runtime.check_usable()
        self.is_lost()
        releasing = False
        try:
            with client.mutex:
                if self._released:
                    return False
                if self._depth > 1:
                    self._depth -= 1
                    return self.reason is None
                releasing = True
                client.in_flight[claim.id] = claim  # before it leaves the renewer: close() finds it in one of the two
                held = client.renewer.drop(claim.id) is not None
                self._released = True
            if self._reentry is not None and client.reentrant.get(self._reentry) is self:
                client.reentrant.pop(self._reentry, None)
            if self._event is not None:
                self._event.set()
            if held:
                return await self._send_release(self._grant)
            if self.reason in (LossReason.MAX_HOLD, LossReason.STALLED) and claim.id in leftovers:
                await leftovers.discard(claim, seconds=MIN_REPLY_TIMEOUT)
            return False  # it was lost, or close() was faster
        except FencelockError:
            raise
        except BaseException:
            if releasing and self.reason is None:
                await leftovers.clean_up(claim)
            raise
        finally:
            if releasing:
                client.in_flight.pop(claim.id, None)

    def _withdraw(self) -> Claim | None:
        """End a lease that its user never got; return its claim, which the caller abandons, or None if it is over."""
        renewer = self._client.renewer
        with self._client.mutex:
            self._released = True
            if self.id not in renewer:
                return None
            renewer.leftovers.add(self._grant.claim, self._client.runtime.now())
            renewer.drop(self.id)
            return self._grant.claim

    async def _send_release(self, grant: Grant) -> bool:
        """Send the release, again if its reply is lost; return whether the lock was still ours."""
        client, leftovers = self._client, self._client.renewer.leftovers
        until, pause, repeated = client.runtime.now() + RELEASE_SECONDS, FIRST_PAUSE, False
        ours: bool | None = None
        try:
            while ours is None:
                try:
                    ours = await client.engine.release(grant)
                except OutcomeUnknown:
                    if client.runtime.now() + pause >= until:
                        raise
                    repeated = True
                    await client.runtime.sleep(pause)
                    pause *= 2
        except EngineUnavailable as error:
            leftovers.add(grant.claim, client.runtime.now())
            client.renewer.look_at(client.runtime.now())
            raise ReleaseFailed(
                f"{self.name!r} could not be released ({error}); this client tries again until the lease runs out, within "
                f"{self.ttl:g} s",
                self.name,
            ) from error
        if grant.attempt_in_flight:
            await leftovers.discard(grant.claim, seconds=MIN_REPLY_TIMEOUT)
        # After a repetition nobody can say whether the lock was lost, or only the reply to its release.
        if not ours and not repeated and not client.closed:  # close() in another thread may have released it before us
            self.reason = LossReason.GONE
            self._report_loss()
        return ours

    # ------------------------------------------------------------------ the with block

    def _leases(self) -> tuple[BaseLease]:
        return (self,)

    def _enter_block(self) -> None:
        """Begin a `with` block of the lease itself, perhaps inside another: only the outermost releases."""
        self.check()
        if self._blocks.open and not self._reenter():
            self.check()
        self._blocks.enter(self, self._client.runtime.current_task())

    async def _exit_block(self, error: BaseException | None) -> None:
        """End a `with` block."""
        await self._blocks.exit(self, error)
