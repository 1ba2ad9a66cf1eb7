"""The acquire loop: one function for every engine, every primitive and every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from fencelock.core.clock import Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, Engine
from fencelock.core.fork import FORKED, Forked
from fencelock.core.leftovers import Leftovers
from fencelock.core.runtime import Runtime
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Waiting

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0


async def acquire(
    runtime: Runtime,
    engine: Engine,
    claim: Claim,
    timeout: float | None,
    in_flight: dict[str, Claim],
    leftovers: Leftovers,
    connected: bool,
) -> Grant | None:
    """Return a grant that is good for at least two thirds of its ttl, or None when the time is over.

    The caller gets its answer within MIN_REPLY_TIMEOUT of the timeout, or within FIRST_CONNECT_TIMEOUT if the engine was
    never `connected`: a grant that comes later, because this process was stopped, is given back. Whatever else happens (an
    error, a cancellation), nothing of the claim is left on the engine, or it is in `leftovers`. close() finds the claim in
    `in_flight`, under the id of the first one; a forked child has nothing there, as the claim is its parent's.
    """
    first, started = claim.id, runtime.now()
    deadline = Deadline(runtime.now, timeout, started)
    answer_by = Deadline(
        runtime.now,
        None if timeout is None else timeout + (MIN_REPLY_TIMEOUT if connected else FIRST_CONNECT_TIMEOUT),
        started,
    )
    while True:
        refused = False  # the engine refused, or could not be reached at all: there is nothing to abandon
        enqueued = timeout != 0  # or it may be, by an attempt without a reply
        try:
            sent = runtime.now()
            outcome: Grant | Waiting | None
            try:
                left = None if timeout is None else deadline.at_most(inf)
                outcome = await engine.attempt(claim, queue=timeout != 0, patience=left)
            except OutcomeUnknown:
                late = timeout is not None and runtime.now() - sent >= max(timeout, MIN_REPLY_TIMEOUT)
                if late or first not in in_flight:
                    raise  # the engine hangs, and there is no time left to ask again; or the claim is not ours
                outcome, enqueued = None, True
            except FencelockError:
                refused = True
                raise
            if not isinstance(outcome, Grant):
                outcome = await _wait_in_queue(
                    runtime, engine, claim, deadline, outcome, sent, lambda: first in in_flight
                )
            if outcome is None:
                if enqueued:
                    await leftovers.discard(claim, answer_by.at_most(MIN_REPLY_TIMEOUT))
                return None
            if runtime.now() - outcome.since > outcome.claim.ttl / 3:
                outcome = await _freshen(runtime, engine, outcome, answer_by)
            if outcome is not None and not answer_by.passed:
                return outcome
        except BaseException as error:
            if not refused and first in in_flight:
                if isinstance(error, FencelockError):
                    await leftovers.discard(claim, answer_by.at_most(MIN_REPLY_TIMEOUT))
                else:
                    await leftovers.clean_up(claim)
            attach_name(error, claim.name)
            raise
        # The grant is stale, or comes too late: this process was stopped, or the reply took too long.
        if first not in in_flight:
            raise Forked(FORKED, claim.name)
        await leftovers.discard(claim, answer_by.at_most(MIN_REPLY_TIMEOUT))
        if deadline.passed:
            return None
        claim = claim.again()
        in_flight[first] = claim


def attach_name(error: BaseException, name: str) -> None:
    """Add the lock's name to an engine error that does not have one."""
    if isinstance(error, FencelockError) and error.name is None:
        error.name = name


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the lock's name to an error of the body that does not have one."""
    try:
        yield
    except FencelockError as error:
        attach_name(error, name)
        raise


async def _wait_in_queue(
    runtime: Runtime,
    engine: Engine,
    claim: Claim,
    deadline: Deadline,
    waiting: Waiting | None,
    sent: float,
    ours: Callable[[], bool],
) -> Grant | None:
    """Wait for what the first attempt did not get; None when the time is over. `busy` is None if it was not answered."""
    queue = deadline.seconds != 0
    heard = sent  # when the engine was last known to answer
    unanswered = sent if waiting is None else None  # when the first attempt that got no answer was sent
    attempt_in_flight = waiting is None  # whether an attempt may still be on its way
    pause = FIRST_PAUSE
    answered = waiting is not None
    while True:
        if answered:
            if (not queue and unanswered is None) or deadline.passed:
                return None
            heard, unanswered, pause = runtime.now(), None, FIRST_PAUSE
        sent, answered = runtime.now(), False
        outcome: Grant | Waiting
        try:
            if waiting is None:
                left = None if deadline.at is None else deadline.at_most(claim.ttl)
                outcome = await engine.attempt(claim, queue=queue, patience=left)
            else:
                left = None if deadline.at is None else deadline.at_most(inf)
                outcome = await engine.wait(waiting, deadline.at_most(waiting.claim.ttl / 3), left)
        except EngineUnavailable as error:
            # Wait for an engine that restarts, under the same id, for as long as the queue can keep our claim.
            if deadline.passed or runtime.now() - heard >= claim.ttl or not ours():
                raise
            if unanswered is None:
                unanswered = sent
            attempt_in_flight = attempt_in_flight or isinstance(error, OutcomeUnknown)
            await runtime.sleep(deadline.at_most(pause * runtime.random()))
            pause = min(pause * 2, LONGEST_PAUSE)
            continue
        if isinstance(outcome, Waiting):
            waiting, answered = outcome, True
        elif not attempt_in_flight and unanswered is None:
            return outcome
        else:
            # The engine may have granted an earlier attempt whose answer was lost, and counts from there.
            since = outcome.since if unanswered is None else min(outcome.since, unanswered)
            return outcome._replace(since=since, attempt_in_flight=attempt_in_flight)


async def _freshen(runtime: Runtime, engine: Engine, grant: Grant, answer_by: Deadline) -> Grant | None:
    """Renew a grant with less than two thirds of its ttl left; return None if only a new claim can help."""
    sent = runtime.now()
    if sent >= grant.deadline:
        return None
    try:
        (answer,) = await runtime.in_background(engine.renew([grant]), answer_by.at_most(MAX_REPLY_TIMEOUT))
    except (EngineUnavailable, TimeoutError):
        return None
    if answer is not Renewal.RENEWED:
        return None
    grant = grant._replace(since=sent)
    return grant if runtime.now() < grant.deadline else None
