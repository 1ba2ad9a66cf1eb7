"""The engine protocol. A new engine is one module that implements it, and one line in `urls.py` or an entry point."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from fencelock.core.clock import Deadline
from fencelock.errors import NotHeld, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Snapshot, Traits, Waiting

MIN_REPLY_TIMEOUT = 0.5
"""Seconds that an engine always has for a reply: a caller may return this much after its own timeout."""
FIRST_CONNECT_TIMEOUT = 3.0
"""Seconds for the first connection: it resolves names, reads certificates and creates tables."""
MAX_REPLY_TIMEOUT = 5.0
"""Seconds to wait for a reply at most."""


def reply_timeout(ttl: float, shortest: float) -> float:
    """Return how long to wait for a reply: a third of the ttl, as a later reply has no use, but at least `shortest`."""
    return min(MAX_REPLY_TIMEOUT, max(shortest, ttl / 3))


def not_held(grant: Grant) -> NotHeld:
    """Return the error of a downgrade whose grant the engine no longer has."""
    return NotHeld(f"the engine no longer has the lock on {grant.claim.name!r}", grant.claim.name)


@contextmanager
def never_repeated(step: str, look: str, name: str) -> Iterator[None]:
    """Add to OutcomeUnknown what the caller can do, for a step that must not run twice."""
    try:
        yield
    except OutcomeUnknown as error:
        message = f"{step} of {name!r} may or may not have happened: {error}. {look} before you repeat it"
        raise OutcomeUnknown(message, name) from error


class Engine(Protocol):
    """An engine. It raises only FencelockErrors; the driver's own error is their cause.

    After `OutcomeUnknown` the engine may or may not have done the step; after any other FencelockError it has not. Every
    method but `force_release` is idempotent: repeating it with the same claim or grant has no further effect.
    """

    @property
    def traits(self) -> Traits: ...

    async def attempt(self, claim: Claim, *, enqueue: bool, deadline: Deadline) -> Grant | Waiting:
        """Acquire the lock or, with `enqueue`, put the claim into the queue, in one atomic step that also mints the token.

        A second attempt with the same claim finds the result of the first: one grant, one token, the same place in the
        queue. Its ttl counts from the second attempt. Without `enqueue`, a claim that is not granted leaves nothing in the
        engine. The caller needs the answer before `deadline`; a later one has no use.
        """
        ...

    async def wait(self, waiting: Waiting, timeout: float) -> Grant | None:
        """Wait until the engine wakes the claim, at most `timeout` seconds. This changes nothing on the engine.

        Return the grant if the wake-up or a read has shown it; it counts from the last attempt (`since`), never from the
        wake-up. Return None if the caller should attempt again: after a wake-up without a grant, a broken connection, or
        the timeout.
        """
        ...

    async def abandon(self, claim: Claim) -> None:
        """Remove the claim from the queue, or release it if it was granted, even if an attempt is still in flight."""
        ...

    async def renew(self, grants: Sequence[Grant]) -> list[Renewal]:
        """Restart the ttl of each grant from this call; return one result for each."""
        ...

    async def release(self, grant: Grant) -> bool:
        """Release the lock and grant it to the next waiter; return False if this grant no longer held it.

        False is certain: the holder lost its lock before. If the reply is lost, raise OutcomeUnknown; the engine must not
        repeat the request itself. The core does, and then takes False for unknown.
        """
        ...

    async def downgrade(self, grant: Grant) -> Grant:
        """Turn an exclusive grant into a shared one, in place, and grant the lock to the readers directly behind it.

        The token stays; the ttl restarts. Repeating it is harmless. Raise NotHeld if the engine no longer has the grant.
        """
        ...

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        ...

    def names(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names that have a holder or a waiter, in order."""
        ...

    async def force_release(self, name: str) -> int:
        """Remove all holders of the name and grant it to the next waiter; later tokens are above all earlier ones.

        Return how many holders were removed. It runs once: if the reply is lost, raise OutcomeUnknown. A repetition could
        remove the next holder.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

    def after_fork(self) -> None:
        """In a forked child, drop the parent's connections without sending anything on them.

        Bytes that the child sends would reach the server as the parent's.
        """
        ...


class ForkPrepared(Engine, Protocol):
    """An engine with something that must not exist twice (a SQLite connection): it releases that before a fork."""

    def before_fork(self) -> None:
        """Release it, in the parent. It must not fail, and must not block for long."""
        ...

    def after_fork_in_parent(self) -> None:
        """Continue in the parent."""
        ...


class LossNotifier(Engine, Protocol):
    """An engine that reports a dropped lock immediately (`traits.loss_pushed`)."""

    on_gone: Callable[[str], None]
    """The client sets it; the engine calls it, from any thread, with the id of a held claim that is gone."""


class Configured(Engine, Protocol):
    """An engine whose `traits` depend on its server's settings, which it reads on the first connection."""

    async def learn_traits(self, deadline: Deadline) -> None:
        """Connect, unless this client has connected before. The caller needs the answer before `deadline`."""
        ...


class Schema(Protocol):
    """The tables of an engine, for `fencelock schema`: some applications may not create tables themselves."""

    def text(self) -> str:
        """Return the statements that create the tables."""
        ...

    def grants(self) -> str:
        """Return the statements that grant another user, `app`, the use of the tables."""
        ...

    async def apply(self) -> bool:
        """Create the tables; return False if they exist already. Raises EngineUnavailable."""
        ...
