"""What a holder holds: a grant, its deadline, and the news of its loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from typing import TYPE_CHECKING, Any

from fencelock.core.acquire import naming, undo
from fencelock.core.world import fail, had
from fencelock.errors import EngineUnavailable, FencelockError, LeaseLost, Unanswered
from fencelock.model import Grant, Reason, Renewal, drift

Tell = Callable[["LeaseCore", Reason], None]

if TYPE_CHECKING:
    from fencelock.core.client import Client
    from fencelock.core.keeper import Kept
    from fencelock.core.world import Event, Guard, Soon

RELEASE_PAUSES = (0.0, 0.02, 0.1)

_HINTS = {
    Reason.EXPIRED: "its deadline passed before it could be renewed",
    Reason.GONE: "the engine no longer has it: it was released by force, its connection or session was ended, or the server "
    "was restarted or lost it",
    Reason.MAX_HOLD: "it was held for as long as max_hold allows",
    Reason.FORKED: "this is the copy in a forked child; connect and acquire in the child itself",
    Reason.CLOSED: "its client was closed",
}

ADVICE = "; others may hold it now: stop what it protected, then acquire it anew"


class LeaseCore:
    """A lease without a colour: the façades add `release`, `renew`, `lost` and the context manager.

    Its state changes under the client's one mutex and never across an await, so that a loss is told once and a renewal never
    outlives a release. Only an ordinary release does without, as others wait for it: whoever takes the lease from the keeper
    is the one who releases it.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_client",
        "_depth",
        "_due",
        "_event",
        "_final",
        "_grant",
        "_guards",
        "_pause",
        "_reentry",
        "_released",
        "_renews",
        "_trouble",
        "deadline",
        "reason",
    )

    def __init__(self, client: Client[Any], renew: bool, max_hold: float | None) -> None:
        self._client = client
        self._event: Event | None = None
        self._guards: list[tuple[Hashable, Guard]] = []
        self._released = False
        self._blocks = 0
        self._depth = 1
        self._renews = renew
        self._final = max_hold
        self.reason: Reason | None = None
        """How it was lost, or None."""
        self._pause = 0.0
        self._reentry: tuple[str, Hashable] | None = None

    def _begin(self, grant: Grant) -> None:
        """Have the grant."""
        self._grant = grant
        if self._final is not None:
            self._final += self._client.world.now()
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
    def remaining(self) -> float:
        """Seconds that the holder may still trust the lease; 0 once it is released or lost."""
        if self._released or self.is_lost():
            return 0.0
        return max(0.0, self.deadline - self._client.world.now())

    def is_lost(self) -> bool:
        """Return whether the lease ended before it was released. It looks at the clock itself."""
        if self.reason is None and not self._released and self._client.world.now() >= self.deadline:
            self._run_out()
        return self.reason is not None

    def check(self) -> None:
        """Raise LeaseLost if the lease is over, released or lost."""
        if self.is_lost():
            raise self._loss()
        if self._released:
            raise LeaseLost(f"the lease on {self.name!r} was released; acquire again", self.name, None)

    def _loss(self) -> LeaseLost:
        """Return the error that tells of the loss."""
        reason = self.reason or Reason.EXPIRED
        advice = ADVICE if reason in (Reason.EXPIRED, Reason.GONE) else ""
        return LeaseLost(f"{self._how_lost()}{advice}", self.name, reason)

    def _how_lost(self) -> str:
        """Return what happened, without what to do next."""
        reason = self.reason or Reason.EXPIRED
        hindered = getattr(self, "_trouble", None) if reason is Reason.EXPIRED else None
        why = f"{_HINTS[reason]} ({hindered})" if hindered is not None else _HINTS[reason]
        return f"the lease on {self.name!r} (token {self.token}) is lost: {why}"

    def __repr__(self) -> str:
        state = (
            "released" if self._released else f"lost: {self.reason}" if self.is_lost() else f"{self.remaining:.1f} s"
        )
        return f"<Lease {self.name!r} token={self.token} {state}>"

    # ------------------------------------------------------------------ what changes it

    @property
    def _given_back(self) -> bool:
        """Whether it was released."""
        return self._released

    @property
    def _over(self) -> bool:
        """Whether the keeper has nothing left to do for it."""
        return self._released or self.reason is not None

    def _wants_renewal(self, now: float) -> bool:
        """Return whether it is due."""
        return now >= self._due

    def _run_out(self, tell: Tell | None = None) -> None:
        """Lose it because its deadline has passed."""
        self._lose(Reason.MAX_HOLD if self.deadline == self._final else Reason.EXPIRED, tell)

    def _extend(self, since: float, ttl: float) -> None:
        """Count from then on, which must not lie after the engine did: earlier by a moment is safe."""
        self.deadline: float = since + ttl - drift(ttl)
        self._due: float = since + ttl / 3 if self._renews else inf
        if self._final is not None and self.deadline >= self._final:
            self.deadline, self._due = self._final, inf

    def _renewed(self, answer: Renewal, sent: float, tell: Tell | None = None) -> None:
        """Take in what the engine said to a renewal that was sent at that time."""
        with self._client.mutex:
            if self._over:
                return
            now = self._client.world.now()
            if now < self.deadline:
                if answer is Renewal.RENEWED:
                    self._pause = 0.0
                    self._extend(sent, self.ttl)
                    return
                if answer is not Renewal.LOST:
                    # Sooner after an UNKNOWN, and ever more slowly, but several times before the deadline.
                    self._pause = min(self._pause * 2 or self.ttl / 30, self.ttl / 6)
                    if self._due != inf:  # renewed by hand only, or about to reach max_hold
                        self._due = now + self._pause * (0.5 + self._client.world.random() / 2)
                    return
        if now < self.deadline:
            self._lose(Reason.GONE, tell)
        else:
            # Also if it is LOST: our own clock may have been the first to end it, and its session with it.
            self._run_out(tell)

    def _lose(self, reason: Reason, tell: Tell | None = None) -> None:
        """End the lease, once, and tell everybody who wants to know; `tell` instead of the user's `on_lost`, if given."""
        with self._client.mutex:
            if self._over:
                return
            self.reason, self._trouble = reason, self._client.keeper.trouble
            if reason is Reason.MAX_HOLD:
                self._client.keeper.drop_early(self.id)
            else:
                self._client.keeper.drop(self.id, None)
        if self._event is not None:
            self._event.set()
        if reason is Reason.FORKED:
            return  # only a copy was lost: the parent goes on, and its event loop must not hear from here
        for _, guard in self._guards.copy():  # a thread may have seen the loss, and the loop goes on meanwhile
            guard.interrupt()
        if reason is not Reason.CLOSED:
            (tell or self._client.tell_lost)(self, reason)

    async def _wait_lost(self, timeout: float | None) -> bool:
        """Wait until the lease is lost or released; return whether it is lost."""
        with self._client.mutex:
            if self._event is None:
                self._event = self._client.world.event()
        if not self._over:
            await self._event.wait(timeout)
        return self.is_lost()

    async def _renew_now(self) -> None:
        """Renew at once, for callers that want to be sure of a whole ttl ahead."""
        self.check()
        sent = self._client.world.now()
        with naming(self.name):
            (answer,) = await self._client.backend.renew([self._grant])
        self._renewed(answer, sent)
        if answer is Renewal.UNKNOWN:
            raise EngineUnavailable(
                f"the renewal of {self.name!r} was not answered; {self.remaining:.1f} s are left of it", self.name
            )
        self.check()

    def _again(self) -> bool:
        """Count one more holder of the same lease (reentrancy); False if another thread has just released it."""
        with self._client.mutex:
            self._depth += 1
            if not self._released and self.id in self._client.keeper:
                return True
            self._depth -= 1
            return False

    def _step_out(self, kept: Kept | None = None) -> bool:
        """Count one holder less; False if there was but one. `kept` was taken from the keeper before that was seen."""
        with self._client.mutex:
            if self._depth == 1:
                return False
            self._depth -= 1
        if kept is not None:
            self._client.keeper.add(self, kept)
        return True

    def _give_back(self) -> Soon[bool]:
        """Release; return whether it was still ours. Calling again is harmless."""
        client, grant = self._client, self._grant
        id = grant.claim.id
        if client.world.now() >= self.deadline:
            self.is_lost()
        if self._released:
            return False
        if self._depth > 1 and self._step_out():
            return self.reason is None
        client.under_way[id] = grant.claim  # a close() that would overtake us finds it here or at the keeper's
        kept = client.keeper.drop(id, None)
        if self._depth > 1 and self._step_out(kept):
            client.under_way.pop(id, None)
            return self.reason is None
        self._released = True
        if self._reentry is not None:
            client.reentrant.pop(self._reentry, None)
        if self._event is not None:
            self._event.set()
        if kept is None:  # it is lost, or another thread was faster
            client.under_way.pop(id, None)
            return self._give_back_lost()
        released: Soon[bool]
        try:
            released = client.backend.release(grant)
            if released is True and not grant.straggler:
                client.under_way.pop(id, None)
                return True
        except BaseException as error:
            released = fail(error)
        return self._give_back_by(released)

    async def _give_back_by(self, released: Soon[bool]) -> bool:
        """See to it that it is released, or that all is done for that; `released` is what the engine says."""
        client, grant = self._client, self._grant
        try:
            ours = await had(released)
        except Unanswered:
            ours = await self._release_again()
        except EngineUnavailable as error:
            raise self._not_released(error) from error
        except BaseException:
            await undo(client.world, client.backend, grant.claim)
            raise
        else:
            if not ours and not client.closed:  # a close() in another thread may have given it back before us
                self._lost_unnoticed()
        finally:
            client.under_way.pop(grant.claim.id, None)
        if grant.straggler:
            await undo(client.world, client.backend, grant.claim)
        return ours

    def _lost_unnoticed(self) -> None:
        """Learn by the release itself that somebody else was let in: the engine has pushed nothing, no renewal was due."""
        with self._client.mutex:
            self.reason = Reason.EXPIRED if self._client.world.now() >= self.deadline else Reason.GONE
        self._client.tell_lost(self, self.reason)

    async def _release_again(self) -> bool:
        """Try some more. If it is no longer there, nobody can say whether it was lost or the answer to its release."""
        world, backend = self._client.world, self._client.backend
        try:
            for pause in RELEASE_PAUSES:
                await world.sleep(pause)
                try:
                    return await had(backend.release(self._grant))
                except Unanswered:
                    pass
            return await had(backend.release(self._grant))
        except EngineUnavailable as error:
            raise self._not_released(error) from error
        except BaseException:
            await undo(world, backend, self._grant.claim)
            raise

    def _not_released(self, error: EngineUnavailable) -> EngineUnavailable:
        message = f"{self.name!r} could not be released ({error}); it runs out by itself within {self.ttl:g} s"
        return EngineUnavailable(message, self.name)

    async def _give_back_lost(self) -> bool:
        """Spare the others the rest of the ttl when we know that we stopped early; it is over for us in any case."""
        early = self._client.keeper.early
        if self.id in early:  # else close() has done it, or the ttl is over, or it is for the parent process to do
            await undo(self._client.world, self._client.backend, self._grant.claim)
            early.pop(self.id, None)  # not before: a close() that overtakes us does it itself
        return False

    # ------------------------------------------------------------------ the with block

    def _watch(self, place: Hashable, guard: Guard) -> None:
        """Have the guard interrupt the body of a `with` block on loss. `place` is `World.here` of whoever enters it."""
        self._guards.append((place, guard))
        if self.is_lost():
            guard.interrupt()

    def _unwatch(self) -> bool:
        """Withdraw the guard of the block that this task entered last; return what it says to that.

        Other tasks may be in blocks of the same lease, and stay there.
        """
        guards = self._guards
        try:
            here = self._client.world.here()
        except RuntimeError:
            here = None  # no task at all: the loop was closed, and what was left pending there is being ended
        # Not found if it was entered elsewhere, as fixtures and exit stacks may do: then the last one has to do.
        at = next((at for at in reversed(range(len(guards))) if guards[at][0] == here), -1)
        return guards.pop(at)[1].leave()

    def _enter_block(self) -> None:
        """Begin a `with` block of the lease itself, perhaps inside another: only the outermost releases."""
        self.check()
        if self._blocks and not self._again():
            self.check()
        self._blocks += 1
        world = self._client.world
        if (guard := world.guard) is not None:
            self._watch(world.here(), guard())

    def _leave(self, error: BaseException | None) -> Soon[None]:
        """End a `with` block: release, and raise LeaseLost after a loss unless the body has an error of its own."""
        self._blocks -= 1
        ours = self._unwatch() if self._guards else False
        given_back = self._give_back()
        if given_back is True and self.reason is None:
            return None
        return self._leave_by(given_back, error, ours)

    async def _leave_by(self, given_back: Soon[bool], error: BaseException | None, ours: bool) -> None:
        try:
            await had(given_back)
        except FencelockError as failure:
            if error is None:
                raise
            error.add_note(f"Besides, {failure}.")
        if self.reason is None:
            return
        own = isinstance(error, Exception | KeyboardInterrupt | SystemExit)  # not just our interruption of the body
        if error is None or (ours and not own):
            raise self._loss() from error
        if not (isinstance(error, LeaseLost) and error.name == self.name):
            error.add_note(f"Besides, {self._loss()}.")
