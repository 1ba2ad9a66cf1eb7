"""Error messages for names of redis-py's Lock, `threading.Lock` and similar libraries: what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NoReturn

from fencelock.errors import InvalidType

ATTRIBUTES = {
    "release": "acquire() returns a lease: call lease.release(), or use a `with` block",
    "locked": "locks.inspect(name).holders says who holds it",
    "is_locked": "locks.inspect(name).holders says who holds it",
    "is_acquired": "acquire() returns a lease: lease.lost.is_set() says whether it was lost",
    "owned": "acquire() returns a lease: lease.lost.is_set() says whether it was lost",
    "extend": "leases are renewed in the background; lease.renew() renews one now",
    "reacquire": "leases are renewed in the background; lease.renew() renews one now",
}

KEYWORDS = {
    "blocking_timeout": "timeout= is how long to wait for the lock, ttl= after how long the lock of a dead holder is free",
    "blocking": "use try_acquire() to not wait, or timeout= for the seconds to wait",
    "sleep": "there is nothing to set, as the engine wakes the next waiter where it can",
    "thread_local": "there is nothing to set, as acquire() returns a lease, which any thread may use",
    "expire": "ttl= is after how many seconds the lock of a dead holder is free",
    "on_lost": "give it to connect(…, on_lost=f)",
}

_JOB = ("ttl", "max_hold", "stall_after", "purpose")
_SHARED = (*_JOB, "timeout", "renew")
_LOCK = (*_SHARED, "reentrant")
_CACHE = ("ttl", "stale", "timeout", "error_for", "codec", "lease_ttl")
OPTIONS = {
    "acquire": ("timeout",),
    "cached": _CACHE,
    "connect": ("namespace", "ttl", "owner", "on_lost"),
    "election": (*_SHARED, "value"),
    "lock": _LOCK,
    "locked": _LOCK,
    "multi": (*_SHARED, "read", "write"),
    "once": (*_JOB, "keep", "attempts", "again"),
    "rate_limit": ("per", "burst", "on_error"),
    "rwlock": _LOCK,
    "schedule": (*_JOB, "cron", "every", "tz", "catch_up", "within", "overlap", "attempts"),
    "semaphore": _SHARED,
    "single_flight": _CACHE,
}
"""The keyword arguments of each function."""


def no_attribute(attribute: str) -> AttributeError:
    """Return the error for an attribute that a Lock does not have."""
    advice = ATTRIBUTES.get(attribute)
    return AttributeError(f"a fencelock Lock has no attribute {attribute!r}{'' if advice is None else f': {advice}'}")


def check_keywords(function: str, given: Collection[str]) -> None:
    """Raise InvalidType for a keyword argument that a function does not have."""
    if unknown := [keyword for keyword in given if keyword not in OPTIONS[function]]:
        raise no_keyword(function, unknown)


def no_keyword(function: str, given: Iterable[str]) -> InvalidType:
    """Return the error for a keyword argument that a function does not have: what to write instead, if that is clear."""
    from difflib import get_close_matches  # slow, and only a mistake needs it

    keyword = next(iter(given))
    advice = KEYWORDS.get(keyword)
    if function == "connect" and keyword in _LOCK:
        advice = f"give it to each lock, as in lock(name, {keyword}=…)"
    if advice is None and (close := get_close_matches(keyword, OPTIONS[function], 1)):
        advice = f"did you mean {close[0]!r}?"
    return InvalidType(f"{function}() has no argument {keyword!r}{'' if advice is None else f': {advice}'}")


class BlockingOnly:
    """An object of the blocking API: `async with` raises an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would take it for something that `async with` accepts

        async def __aenter__(self) -> NoReturn:
            raise InvalidType("this is the blocking API: use `with`, or fencelock.aio.connect(…) for `async with`")

        async def __aexit__(self, *error: object) -> None: ...


class AsyncioOnly:
    """An object of the asyncio API: `with` raises an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise InvalidType("this is the asyncio API: use `async with`, or fencelock.connect(…) for `with`")

        def __exit__(self, *error: object) -> None: ...
