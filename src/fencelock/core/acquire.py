"""The acquire loop: one function for every engine, every primitive and every world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fencelock.core.backend import GRACE, Backend
from fencelock.core.clock import Deadline
from fencelock.core.inherited import FORKED, Forked
from fencelock.core.world import Soon, World, had
from fencelock.errors import EngineUnavailable, FencelockError, Unanswered
from fencelock.model import Busy, Claim, Grant, Renewal

CLEANUP_SECONDS = 5.0
"""How long cleaning up after a cancelled or failed acquire may take."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0


async def acquire(
    world: World,
    backend: Backend,
    claim: Claim,
    timeout: float | None,
    under_way: dict[str, Claim],
    sent: float,
    attempt: Soon[Grant | Busy] | None,
) -> Grant | None:
    """Return a grant that is good for at least two thirds of its ttl, or None when the time is over.

    `attempt` is the first one, made at the time `sent`. Whatever else happens (an error, a cancellation, a time-out), nothing
    of the claim is left on the engine. `under_way` is where close() looks, under the id of the first claim, for what is being
    asked for; a forked child has nothing there, as the claim is its parent's.
    """
    first = claim.id
    patience: Deadline | None = None
    while True:
        refused = False  # the engine said no, or could not be reached at all: there is nothing to undo
        try:
            outcome: Grant | Busy | None
            try:
                if attempt is None:
                    sent = world.now()
                    attempt = backend.attempt(claim, queue=timeout != 0, patience=timeout)
                outcome = await had(attempt)
            except Unanswered:
                late = timeout is not None and world.now() - sent >= max(timeout, GRACE)
                if late or first not in under_way:
                    raise  # it hangs, and there is no time left to ask again; or it is not ours to ask
                outcome = None
            except FencelockError:
                refused = True
                raise
            if not isinstance(outcome, Grant):
                if patience is None:
                    patience = Deadline(world.now, timeout, sent)
                outcome = await _wait_in_line(
                    world, backend, claim, patience, outcome, sent, lambda: first in under_way
                )
            if outcome is None or world.now() - outcome.since <= outcome.claim.ttl / 3:
                return outcome
            fresh = await _freshen(world, backend, outcome)
            if fresh is not None:
                return fresh
        except BaseException as error:
            if not refused and first in under_way:
                hurry = timeout is not None and isinstance(error, EngineUnavailable)
                await undo(world, backend, claim, GRACE if hurry else CLEANUP_SECONDS)
            name_it(error, claim.name)
            raise
        # The grant went stale before we saw it: the process was stopped, or the answer took too long. Line up anew.
        if first not in under_way:
            raise Forked(FORKED, claim.name)
        await undo(world, backend, claim)
        claim, attempt = claim.again(), None
        under_way[first] = claim


def name_it(error: BaseException, name: str) -> None:
    """Say in an error of the engine as a whole which lock it kept from being had."""
    if isinstance(error, FencelockError) and error.name is None:
        error.name = name


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say in an error of the body which lock it is about, if it does not."""
    try:
        yield
    except FencelockError as error:
        name_it(error, name)
        raise


async def undo(world: World, backend: Backend, claim: Claim, seconds: float = CLEANUP_SECONDS) -> None:
    """Leave nothing of the claim on the engine, whatever happens to the caller.

    If the engine does not answer for so long, what is left there runs out with its ttl.
    """
    try:
        await world.shield(_abandon(world, backend, claim, seconds), CLEANUP_SECONDS)
    except (FencelockError, TimeoutError):
        pass


async def _wait_in_line(
    world: World,
    backend: Backend,
    claim: Claim,
    patience: Deadline,
    busy: Busy | None,
    sent: float,
    ours: Callable[[], bool],
) -> Grant | None:
    """Wait for what the first attempt did not get. `busy` is None if it was not answered."""
    queue = patience.seconds != 0
    heard = sent  # when the engine was last known to answer
    unanswered = sent if busy is None else None  # when the first attempt that got no answer was sent
    straggler = busy is None  # whether an attempt may still be on its way
    pause = FIRST_PAUSE
    answered = busy is not None
    while True:
        if answered:
            if not queue and unanswered is None:
                return None
            if patience.passed:
                await undo(world, backend, claim)
                return None
            heard, unanswered, pause = world.now(), None, FIRST_PAUSE
        sent, answered = world.now(), False
        outcome: Grant | Busy
        try:
            if busy is None:
                left = None if patience.at is None else patience.at_most(claim.ttl)
                outcome = await had(backend.attempt(claim, queue=queue, patience=left))
            else:
                outcome = await backend.wait(busy, patience.at_most(busy.claim.ttl / 3))
        except EngineUnavailable as error:
            # An engine that restarts is waited for, under the same id, for as long as our place in line can last.
            if patience.passed or world.now() - heard >= claim.ttl or not ours():
                raise
            if unanswered is None:
                unanswered = sent
            straggler = straggler or isinstance(error, Unanswered)
            await world.sleep(patience.at_most(pause * world.random()))
            pause = min(pause * 2, LONGEST_PAUSE)
            continue
        if isinstance(outcome, Busy):
            busy, answered = outcome, True
        elif not straggler and unanswered is None:
            return outcome
        else:
            # The engine may have granted an earlier attempt whose answer was lost, and counts from there.
            since = outcome.since if unanswered is None else min(outcome.since, unanswered)
            return outcome._replace(since=since, straggler=straggler)


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
    grant = grant._replace(since=sent)
    return grant if world.now() < grant.deadline else None


async def _abandon(world: World, backend: Backend, claim: Claim, seconds: float) -> None:
    until = Deadline(world.now, seconds)
    pause = FIRST_PAUSE
    while True:
        try:
            return await backend.abandon(claim)
        except EngineUnavailable:
            if until.at_most(pause) < pause:
                raise
        await world.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
