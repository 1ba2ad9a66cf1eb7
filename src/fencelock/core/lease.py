"""What a holder holds: a lease, with the requests that its holder makes: renew, downgrade, release."""

from __future__ import annotations

from fencelock.core.acquire import FIRST_PAUSE, attach_name
from fencelock.core.engine import MIN_REPLY_TIMEOUT
from fencelock.core.lease_state import LeaseState
from fencelock.core.validation import check_mode
from fencelock.errors import EngineUnavailable, FencelockError, NotHeld, OutcomeUnknown, ReleaseFailed
from fencelock.model import Claim, Grant, LossReason, Mode, Renewal

RELEASE_SECONDS = 1.0
"""Seconds for which a release without a reply is sent again; after them the renewer repeats it."""


class BaseLease(LeaseState):
    """What the blocking and the asyncio lease share: those add `release`, `renew`, `lost` and the context manager."""

    __slots__ = ()

    async def _renew_now(self) -> None:
        """Renew at once, for callers that want to be sure of a whole ttl ahead."""
        self._client.runtime.check_usable()
        self.check()
        sent = self._client.runtime.now()
        with attach_name(self.name):
            (answer,) = await self._client.engine.renew([self._grant])
        self._apply_renewal(answer, sent)
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
        writing = self._grant
        with self._client.mutex:
            self._grant = writing.downgraded(writing.since)
            self._downgrading = True
        answer, since = Renewal.UNKNOWN, 0.0
        try:
            answer, since = await self._send_downgrade()
        finally:
            self._apply_renewal(answer, max(since, self._engine_end - self.ttl), self._trouble)
            if self._downgrading and not self._over:
                self._client.renewer.look_at(self._next_look())
        self.check()

    async def _send_downgrade(self) -> tuple[Renewal, float]:
        """Send the downgrade. The result is a Renewal, as it restarts the ttl; with it, from when the engine counts.

        On a shared session that may be before the request: then the session was not renewed with it.
        """
        try:
            grant = await self._client.engine.downgrade(self._grant)
        except NotHeld:
            return Renewal.LOST, 0.0
        except EngineUnavailable as error:
            self._trouble = str(error)
            return Renewal.UNKNOWN, 0.0
        self._downgrading = False
        return Renewal.RENEWED, grant.since

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
                client.unfinished[claim.id] = claim  # before it leaves the renewer: close() finds it in one of the two
                held = client.renewer.remove(claim.id) is not None
                self._released = True
            if self._reentrant_in is not None:
                key = (claim.name, self._reentrant_in)
                if client.reentrant.get(key) is self:
                    client.reentrant.pop(key, None)
            if self._event is not None:
                self._event.set()
            if held:
                return await self._send_release(self._grant)
            if self.reason in (LossReason.MAX_HOLD, LossReason.STALLED) and claim.id in leftovers:
                await leftovers.abandon_within(claim, seconds=MIN_REPLY_TIMEOUT)
            return False  # it was lost, or close() was faster
        except FencelockError:
            raise
        except BaseException:
            if releasing:
                self._released = True  # the interrupt may have come before it was set
                client.renewer.remove(claim.id)
                if self.reason is None:
                    await leftovers.abandon_shielded(claim)
            raise
        finally:
            if releasing:
                client.unfinished.pop(claim.id, None)

    def _withdraw(self) -> Claim | None:
        """End the lease without a request; return its claim, which the caller abandons, or None if it is over."""
        renewer = self._client.renewer
        with self._client.mutex:
            self._released = True
            if self.id not in renewer:
                return None
            renewer.leftovers.add(self._grant.claim, self._client.runtime.now())
            renewer.remove(self.id)
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
            await leftovers.abandon_within(grant.claim, seconds=MIN_REPLY_TIMEOUT)
        # After a repetition it is unknown whether the lock was lost, or only the reply to its release.
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
