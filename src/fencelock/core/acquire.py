"""The acquire loop: one function for every engine, every primitive and every world."""

from __future__ import annotations

from dataclasses import replace

from fencelock.core.backend import Backend
from fencelock.core.clock import Deadline
from fencelock.core.world import World
from fencelock.errors import EngineUnavailable, FencelockError, Unanswered
from fencelock.model import Busy, Claim, Grant, Renewal

CLEANUP_SECONDS = 5.0
"""How long cleaning up after a cancelled or failed acquire may take."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0


class _NothingSent(Exception):
    """The engine cannot be used, and nothing of the claim is there: no reason to try for seconds to undo it."""

    def __init__(self, error: EngineUnavailable) -> None:
        self.error = error


async def acquire(world: World, backend: Backend, claim: Claim, timeout: float | None) -> Grant | None:
    """Return a grant that is good for at least two thirds of its ttl, or None when the time is over.

    Whatever else happens (an error, a cancellation, a time-out), nothing of the claim is left on the engine.
    """
    patience = Deadline(world.now, timeout)
    while True:
        try:
            grant = await _wait_in_line(world, backend, claim, patience)
            if grant is None or world.now() - grant.since <= claim.ttl / 3:
                return grant
            fresh = await _freshen(world, backend, grant)
            if fresh is not None:
                return fresh
        except _NothingSent as nothing:
            name_it(nothing.error, claim.name)
            raise nothing.error from nothing.error.__cause__
        except BaseException as error:
            await undo(world, backend, claim)
            name_it(error, claim.name)
            raise
        # The grant went stale before we saw it: the process was stopped, or the answer took too long. Line up anew.
        await undo(world, backend, claim)
        claim = claim.again()


def name_it(error: BaseException, name: str) -> None:
    """Say in an error of the engine as a whole which lock it kept from being had."""
    if isinstance(error, FencelockError) and error.name is None:
        error.name = name


async def undo(world: World, backend: Backend, claim: Claim) -> None:
    """Leave nothing of the claim on the engine, whatever happens to the caller.

    If the engine does not answer, what is left there runs out with its ttl.
    """
    try:
        await world.shield(_abandon(world, backend, claim), CLEANUP_SECONDS)
    except (FencelockError, TimeoutError):
        pass


async def _wait_in_line(world: World, backend: Backend, claim: Claim, patience: Deadline) -> Grant | None:
    queue = not patience.passed
    busy: Busy | None = None
    unanswered: float | None = None  # when the first attempt that got no answer was sent
    heard: float | None = None  # when the engine was last known to answer
    pause = FIRST_PAUSE
    while True:
        sent = world.now()
        if heard is None:
            heard = sent
        try:
            if busy is None:
                outcome = await backend.attempt(claim, queue=queue)
            else:
                outcome = await backend.wait(busy, patience.at_most(claim.ttl / 3))
        except EngineUnavailable as error:
            # Nothing was ever answered and nothing was sent: the URL is wrong or the engine is down. Say so at once.
            if busy is None and unanswered is None and not isinstance(error, Unanswered):
                raise _NothingSent(error) from None
            # An engine that restarts is waited for, under the same id, for as long as our place in line can last.
            if patience.passed or world.now() - heard >= claim.ttl:
                raise
            if unanswered is None:
                unanswered = sent
            await world.sleep(patience.at_most(pause * world.random()))
            pause = min(pause * 2, LONGEST_PAUSE)
            continue
        if isinstance(outcome, Grant):
            if unanswered is None:
                return outcome
            # The engine may have granted an earlier attempt whose answer was lost, and counts from there.
            return replace(outcome, since=min(outcome.since, unanswered))
        if not queue and unanswered is None:
            return None
        if not queue or patience.passed:
            await undo(world, backend, claim)
            return None
        busy, heard, unanswered, pause = outcome, world.now(), None, FIRST_PAUSE


async def _freshen(world: World, backend: Backend, grant: Grant) -> Grant | None:
    """Renew a grant of which less than two thirds of the ttl are left; None if only a new claim can help."""
    sent = world.now()
    if sent >= grant.deadline:
        return None
    try:
        (answer,) = await backend.renew([grant])
    except EngineUnavailable:
        return None
    if answer is not Renewal.RENEWED:
        return None
    grant = replace(grant, since=sent)
    return grant if world.now() < grant.deadline else None


async def _abandon(world: World, backend: Backend, claim: Claim) -> None:
    until = Deadline(world.now, CLEANUP_SECONDS)
    pause = FIRST_PAUSE
    while True:
        try:
            return await backend.abandon(claim)
        except EngineUnavailable:
            if until.at_most(pause) < pause:
                raise
        await world.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
