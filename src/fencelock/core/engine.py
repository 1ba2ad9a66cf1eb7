"""The engine protocol: the narrow waist. A new engine is one module that does this, and one line in `urls.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from fencelock.core.clock import PATIENT, Deadline
from fencelock.errors import OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, Traits, Waiting

MIN_REPLY_TIMEOUT = 0.5
"""Seconds after its timeout within which a caller gets its answer: an engine has that long, however little time is left."""
FIRST_CONNECT_TIMEOUT = 3.0
"""Seconds that it is given for the first connection: names have to be looked up, certificates read, tables made."""
MAX_REPLY_TIMEOUT = 5.0
"""Seconds that an answer is waited for at the most."""


def reply_timeout(ttl: float, shortest: float, within: float | None = None) -> float:
    """Return how long to wait for an answer: a third of the ttl, as a later one is of no use, but at least `shortest`.

    `within` is how many seconds the caller has left.
    """
    seconds = min(MAX_REPLY_TIMEOUT, max(shortest, ttl / 3))
    return seconds if within is None else min(seconds, max(within, MIN_REPLY_TIMEOUT))


def limit_of(now: Callable[[], float], within: float | None, *, met: bool = True) -> Deadline:
    """Return when whatever an engine does for a caller who has so many seconds left has to be over.

    `met` is whether it was ever connected.
    """
    return (
        PATIENT if within is None else Deadline(now, max(within, MIN_REPLY_TIMEOUT if met else FIRST_CONNECT_TIMEOUT))
    )


def time_to_answer(limit: Deadline, seconds: float) -> float:
    """Return what is left of these seconds to wait for an answer.

    A connection that took its time to make must not leave its server none.
    """
    return max(limit.at_most(seconds), min(seconds, MIN_REPLY_TIMEOUT))


@contextmanager
def never_repeated(step: str, look: str, name: str) -> Iterator[None]:
    """Say in the error of a step that must not run twice what its caller can do when the reply was lost."""
    try:
        yield
    except OutcomeUnknown as error:
        message = f"{step} of {name!r} may or may not have happened: {error}. {look} before you repeat it"
        raise OutcomeUnknown(message, name) from error


class Engine(Protocol):
    """An engine. It raises nothing but FencelockErrors; the driver's own error is their cause.

    A method that raises `OutcomeUnknown` may or may not have been carried out; any other FencelockError means that it was
    not. Every method but `force_release` may be repeated with the same claim or grant without doing more than it did the
    first time.
    """

    @property
    def traits(self) -> Traits: ...

    async def attempt(self, claim: Claim, *, queue: bool, patience: float | None = None) -> Grant | Waiting:
        """Take the lock or, if `queue`, a place in line, in one atomic step that also mints the token.

        `patience` is how many seconds the caller has left: an answer that comes later is of no use to it.

        Attempting again with the same claim finds what the earlier one left: one grant, one token, its ttl counted anew
        from this call. Without `queue`, a Busy leaves nothing behind.
        """
        ...

    async def wait(self, waiting: Waiting, timeout: float, patience: float | None = None) -> Grant | Waiting:
        """Wait the engine's own way, for so long at most, then attempt again: a sign of life in any case.

        A lock that was handed over meanwhile is granted `since` the last sign of life, never since the wake-up came.
        """
        ...

    async def abandon(self, claim: Claim) -> None:
        """Leave the queue and give back the lock, whichever it was, also if an attempt is still on its way."""
        ...

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Count the ttl of each anew, from this call; one answer for each."""
        ...

    async def release(self, grant: Grant) -> bool:
        """Give back the lock and let the next in; return whether it was still this grant's.

        False is certain: the holder learns that it had lost its lock. If the reply is lost, raise OutcomeUnknown and do not
        repeat it: what is not there then may have been released by the first request.
        """
        ...

    async def inspect(self, name: str) -> Snapshot: ...

    def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that have a holder or a waiter, in order."""
        ...

    async def force_release(self, name: str) -> int:
        """Drop whoever holds the name and let the next in; every later token is above every earlier one.

        Return how many holders were dropped. It runs once: if the reply is lost, raise OutcomeUnknown. Repeated, it
        could drop the next holder.
        """
        ...

    async def close(self) -> None: ...

    def before_fork(self) -> None:
        """Let go, in the parent, of whatever must not exist twice. It must not fail and hardly wait."""
        ...

    def after_fork(self, *, child: bool) -> None:
        """Go on in the parent; in the child, forget the parent's connections without a word on them.

        A driver that is used again in the child would speak in the parent's name.
        """
        ...


class LossNotifier(Engine, Protocol):
    """An engine that tells of a lock that it has dropped itself, at once (`traits.loss_pushed`)."""

    on_gone: Callable[[str], None]
    """Set by the client: to be called, from any thread, with the id of a held claim that is gone."""


class Configured(Engine, Protocol):
    """An engine whose `traits` depend on its server's settings, which are known after the first connection."""

    async def learn_traits(self, patience: float | None) -> None:
        """Connect, unless this client has connected before. `patience` is how many seconds the caller has left."""
        ...


class Schema(Protocol):
    """What an engine needs in a database before it can be used, for those whose applications may not make it."""

    def text(self) -> str:
        """Return the statements that make it."""
        ...

    def grants(self) -> str:
        """Return the statements that let another user, `app`, work with it."""
        ...

    async def apply(self) -> bool:
        """Make it, unless it is there: return False then; raise EngineUnavailable."""
        ...
