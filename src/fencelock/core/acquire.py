"""The acquire loop: one function for every engine, every primitive and every runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fencelock.core.clock import Deadline
from fencelock.core.engine import FIRST_CONNECT_TIMEOUT, MAX_REPLY_TIMEOUT, MIN_REPLY_TIMEOUT, Engine
from fencelock.core.fork import FORKED, Forked
from fencelock.core.runtime import Runtime
from fencelock.errors import EngineUnavailable, FencelockError, OutcomeUnknown
from fencelock.model import Claim, Grant, Mode, Renewal, Waiting

if TYPE_CHECKING:
    from fencelock.core.client import Client

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
STOP_CHECK_SECONDS = 0.5
"""Seconds between two calls of `should_stop`."""

ShouldStop = Callable[[], bool]


async def acquire(
    client: Client[Any], claim: Claim, timeout: float | None, should_stop: ShouldStop | None = None
) -> Grant | None:
    """Return a grant that is good for at least two thirds of its ttl, or None when the time is over.

    The caller gets its answer within MIN_REPLY_TIMEOUT of the timeout, or within FIRST_CONNECT_TIMEOUT if the engine was
    never reached: a grant that comes later, because this process was stopped, is given back. Whatever else happens (an
    error, a cancellation), nothing of the claim is left on the engine, or it is in the leftovers.

    The caller has put the claim into `client.unfinished`, by its id. A stale grant is given back and claimed again under a
    new id, but the key in `unfinished` stays the first one (`first_id`), so close() always finds the current claim there. A
    forked child clears `unfinished`: if the key is missing, the claim is the parent's, and nothing may be sent for it.

    `should_stop` ends the wait as the timeout does; it is called at least every STOP_CHECK_SECONDS.
    """
    runtime, unfinished, leftovers = client.runtime, client.unfinished, client.renewer.leftovers
    first_id, started = claim.id, runtime.now()
    slack = MIN_REPLY_TIMEOUT if client.connected else FIRST_CONNECT_TIMEOUT
    deadline = Deadline(runtime.now, timeout, started)
    answer_by = Deadline(runtime.now, None if timeout is None else timeout + slack, started)
    while True:
        loop = _AttemptLoop(client, claim, first_id, deadline, answer_by, should_stop)
        try:
            grant = await loop.run()
            time_is_over = grant is None or answer_by.passed
            if grant is not None and runtime.now() - grant.since > grant.claim.ttl / 3:
                grant = await _freshen(runtime, client.engine, grant, answer_by)
            if grant is not None and not answer_by.passed:
                return grant
        except BaseException as error:
            if loop.on_engine and first_id in unfinished:
                if isinstance(error, FencelockError):
                    await leftovers.abandon_within(claim, seconds=answer_by.at_most(MIN_REPLY_TIMEOUT))
                else:
                    await leftovers.abandon_shielded(claim)
            if isinstance(error, FencelockError):
                error.name = error.name or claim.name
            raise
        # The time is over; or the grant is stale or late: this process was stopped, or the reply took too long.
        if first_id not in unfinished:
            raise Forked(FORKED, claim.name)
        if loop.on_engine:
            await leftovers.abandon_within(claim, seconds=answer_by.at_most(MIN_REPLY_TIMEOUT))
        if time_is_over or deadline.passed:
            return None
        claim = claim.with_new_id()
        unfinished[first_id] = claim


class _AttemptLoop:
    """Attempts a claim, waits and attempts again, under one id, until it is granted or the time is over."""

    def __init__(
        self,
        client: Client[Any],
        claim: Claim,
        first_id: str,
        deadline: Deadline,
        answer_by: Deadline,
        should_stop: ShouldStop | None,
    ) -> None:
        self._client = client
        self._runtime = client.runtime
        self._engine = client.engine
        self._claim = claim
        self._first_id = first_id
        self._deadline = deadline
        self._answer_by = answer_by
        self._should_stop = should_stop
        self._enqueue = deadline.seconds != 0
        self.on_engine = True
        """Whether the engine may have the claim, enqueued or granted."""
        self._answered = client.runtime.now()
        """When the engine answered last."""
        self._first_unanswered: float | None = None
        """When the first request since then was sent."""
        self._attempt_in_flight = False
        """Whether some attempt never got a reply; unlike `_first_unanswered`, no later reply resets it."""
        self._pause = FIRST_PAUSE

    @property
    def _is_over(self) -> bool:
        """Whether the caller does not want to wait any longer."""
        return self._deadline.passed or (self._should_stop is not None and self._should_stop())

    async def run(self) -> Grant | None:
        """Return the grant, or None when the time is over. The claim may be enqueued then."""
        waiting: Waiting | None = None
        while True:
            sent = self._runtime.now()
            try:
                outcome = await self._engine.attempt(self._claim, enqueue=self._enqueue, deadline=self._answer_by)
                if isinstance(outcome, Waiting):
                    waiting = outcome
                    self.on_engine = self._enqueue or self._first_unanswered is not None
                    self._answered, self._first_unanswered, self._pause = self._runtime.now(), None, FIRST_PAUSE
                    if self._is_over:
                        return None
                    if self._claim.mode is Mode.PERMIT:
                        self._client.limits.compare_in_background(self._claim)
                    grant = await self._engine.wait(waiting, self._seconds_to_wait(waiting))
                else:
                    grant = outcome
            except FencelockError as error:
                await self._pause_after(error, sent, is_first=waiting is None and self._first_unanswered is None)
                continue
            if grant is not None:
                return self._date_back(grant)
            if self._is_over:
                return None

    def _seconds_to_wait(self, waiting: Waiting) -> float:
        """Return how long to wait before the next attempt, which keeps the claim's place in the queue."""
        seconds = waiting.claim.ttl / 3
        if waiting.retry_in is not None:
            seconds = min(seconds, waiting.retry_in)
        if self._should_stop is not None:
            seconds = min(seconds, STOP_CHECK_SECONDS)
        return self._deadline.at_most(seconds)

    async def _pause_after(self, error: FencelockError, sent: float, *, is_first: bool) -> None:
        """Sleep before the claim is attempted again, or raise the error if that cannot help.

        While a claim is enqueued, the loop waits for an engine that restarts, for as long as its queue keeps the claim.
        """
        unknown = isinstance(error, OutcomeUnknown)
        if is_first and not unknown:
            self.on_engine = False  # the engine refused it, or could not be reached at all
        ours = self._first_id in self._client.unfinished  # else this is a forked child
        if not isinstance(error, EngineUnavailable) or not self.on_engine or not ours:
            raise error
        # An attempt without a reply is repeated once even after the deadline: the answer decides what the caller gets.
        is_over = self._deadline.passed and (not is_first or self._answer_by.passed)
        if is_over or self._runtime.now() - self._answered >= self._claim.ttl:
            raise error
        if self._first_unanswered is None:
            self._first_unanswered = sent
        self._attempt_in_flight = self._attempt_in_flight or unknown
        await self._runtime.sleep(self._deadline.at_most(self._pause * self._runtime.random()))
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _date_back(self, grant: Grant) -> Grant:
        """Return the grant, counted from the first attempt without a reply: the engine may have granted that one."""
        if self._first_unanswered is None and not self._attempt_in_flight:
            return grant
        since = grant.since if self._first_unanswered is None else min(grant.since, self._first_unanswered)
        return grant._replace(since=since, attempt_in_flight=self._attempt_in_flight or grant.attempt_in_flight)


async def _freshen(runtime: Runtime, engine: Engine, grant: Grant, answer_by: Deadline) -> Grant | None:
    """Renew a grant with less than two thirds of its ttl left; return None if only a new claim can help."""
    sent = runtime.now()
    if sent >= grant.deadline:
        return None
    try:
        (answer,) = await runtime.run_with_time_limit(engine.renew([grant]), answer_by.at_most(MAX_REPLY_TIMEOUT))
    except (EngineUnavailable, TimeoutError):
        return None
    if answer is not Renewal.RENEWED:
        return None
    grant = grant._replace(since=sent)
    return grant if runtime.now() < grant.deadline else None


@contextmanager
def attach_name(name: str) -> Iterator[None]:
    """Add the lock's name to an engine error of the body that does not have one."""
    try:
        yield
    except FencelockError as error:
        error.name = error.name or name
        raise
