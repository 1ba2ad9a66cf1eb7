"""Broken variants of the Redis engine, Python and Lua: each has one mistake that the checker must find.

To see one fail: `python -m fencelock.sim --engine redis --seeds 500 --variant tests.sim.redis_variants:no_tombstone`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from fencelock.engines.redis import engine
from fencelock.engines.redis.engine import RedisEngine
from fencelock.engines.redis.scripts import Script
from fencelock.model import Grant, Waiting
from tests.sim.variants import Variant


def script(name: str, old: str, new: str) -> AbstractContextManager[object]:
    """Replace a piece of a script by another."""
    text = getattr(engine, name).text
    assert old in text, f"{name} has changed: {old!r} is not in it"
    return patch.object(engine, name, Script(name.lower(), text.replace(old, new)))


@contextmanager
def no_tombstone() -> Iterator[None]:
    """An abandon does not stop an attempt that arrives after it, on an older connection."""
    with script("ABANDON", "redis.pcall('SET', BASE .. ':abandoned:' .. id, '', 'PX', ttl)", ""):
        yield


@contextmanager
def release_without_owner() -> Iterator[None]:
    """A release frees the name, whatever claim holds it."""
    with script("RELEASE", "local ours = token_of(id) ~= nil", "local ours = exclusive and true or false"):
        yield


@contextmanager
def tokens_from_the_clock() -> Iterator[None]:
    """Tokens are the server's clock, which can be set back."""
    without = "if last and (#last > #token or (#last == #token and last >= token)) then"
    never = "if false then"
    with script("ATTEMPT", without, never), script("RELEASE", without, never), script("ABANDON", without, never):
        yield


@contextmanager
def waiters_are_not_notified() -> Iterator[None]:
    """A waiter that is granted the lock is not notified."""
    call, instead = "redis.pcall('PUBLISH', channel, ", "#tostring("
    with script("RELEASE", call, instead), script("ABANDON", call, instead), script("ATTEMPT", call, instead):
        yield


@contextmanager
def deadline_from_wake_up() -> Iterator[None]:
    """A grant to a waiter counts from when the waiter noticed it; the waiter may have been paused until then."""
    wait = RedisEngine.wait

    async def late(self: RedisEngine, waiting: Waiting, timeout: float) -> Grant | None:
        outcome = await wait(self, waiting, timeout)
        return outcome._replace(since=self._runtime.now()) if isinstance(outcome, Grant) else outcome

    with patch.object(RedisEngine, "wait", late):
        yield


@contextmanager
def blocked_waiters_are_overtaken() -> Iterator[None]:
    """A claim that fits is admitted, also behind one that does not."""
    skip = ("elseif not fits(mode) then\n      return token, id", "elseif not fits(mode) then\n      place = place + 1")
    with script("ATTEMPT", *skip), script("RELEASE", *skip), script("ABANDON", *skip), script("DOWNGRADE", *skip):
        yield


@contextmanager
def downgrade_is_a_release() -> Iterator[None]:
    """A downgrade admits the waiters behind it before it holds the lock as a reader."""
    hold, admit = "hold(id, token, ttl, 's', label)\n", "advance_queue()\n"
    with script("DOWNGRADE", hold, admit + hold):
        yield


VARIANTS = (
    Variant(no_tombstone, "late", "orphans", 1500),
    Variant(release_without_owner, "lossy", "exclusion", 300),
    Variant(tokens_from_the_clock, "set", "tokens", 100),
    Variant(waiters_are_not_notified, "calm", "wake-ups", 20),
    Variant(deadline_from_wake_up, "stops", "exclusion", 300),
    Variant(blocked_waiters_are_overtaken, "calm", "order", 50, "rwlock"),
    Variant(downgrade_is_a_release, "calm", "exclusion", 50, "rwlock"),
)
