"""Error messages for names of redis-py, kazoo, `threading` and similar libraries: what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NoReturn

from fencelock.errors import InvalidType

_RENEWED = "leases are renewed in the background; lease.renew() renews one now"
_LOST = "lease.lost.is_set() says whether it was lost"
ATTRIBUTES = {
    "Lock": {
        "release": "acquire() returns a lease: call lease.release(), or use a `with` block",
        **dict.fromkeys(("locked", "is_locked"), "locks.inspect(name).holders says who holds it"),
        **dict.fromkeys(("is_acquired", "owned"), f"acquire() returns a lease: {_LOST}"),
        **dict.fromkeys(("extend", "reacquire"), _RENEWED),
        "contenders": "locks.inspect(name) has the holders and the waiters",
    },
    "Lease": {**dict.fromkeys(("owned", "locked"), _LOST), **dict.fromkeys(("extend", "reacquire"), _RENEWED)},
    "RWLock": dict.fromkeys(("with", "acquire"), "it has two locks, rwlock.read() and rwlock.write()"),
    "Election": dict.fromkeys(
        ("with", "acquire"), "use election.campaign(), whose lease is the term, or election.run(work)"
    ),
    "Schedule": {"with": "call schedule.run_due(work) for what is due now, or schedule.run(work) to go on"},
    "RateLimit": {"with": "call limit.acquire() before each call that it limits, or decorate a function with @limit"},
}
"""What to write instead of an attribute of another library, or instead of a `with` block, by class."""

KEYWORDS = {
    "blocking_timeout": "timeout= is how long to wait for the lock, ttl= after how long the lock of a dead holder is free",
    "blocking": "use try_acquire() to not wait, or timeout= for the seconds to wait",
    "sleep": "there is nothing to set, as the engine wakes the next waiter where it can",
    "thread_local": "there is nothing to set, as acquire() returns a lease, which any thread may use",
    "expire": "ttl= is after how many seconds the lock of a dead holder is free",
    "on_lost": "give it to connect(…, on_lost=f)",
}

_FRESH = {"expire": "ttl= is for how many seconds a value is fresh"}
_ATTEMPTS = {"retries": "attempts= is how often a slot may run if runs fail"}
KEYWORDS_OF = {
    "cached": _FRESH,
    "connect": dict.fromkeys(
        ("host", "port", "db", "user", "password", "path"),
        "it is a part of the URL, as in connect('redis://localhost:6379/0')",
    ),
    "lock": {"retries": "timeout= is how long to wait for the lock"},
    "once": _ATTEMPTS,
    "rate_limit": dict.fromkeys(("interval", "seconds", "period"), "per= is the number of seconds for n calls"),
    "schedule": {
        **_ATTEMPTS,
        **dict.fromkeys(
            ("interval", "seconds", "minutes", "hours"), "every= is the number of seconds between two slots"
        ),
    },
    "single_flight": _FRESH,
    "try_acquire": {"timeout": "it does not wait; acquire(timeout=…) does"},
}
"""As KEYWORDS, for one function."""

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
    "try_acquire": (),
}
"""The keyword arguments of each function."""


def no_attribute(of: object, attribute: str) -> AttributeError:
    """Return the error for an attribute that an object does not have."""
    kind = type(of).__name__
    advice = ATTRIBUTES.get(kind, {}).get(attribute)
    message = f"a fencelock {kind} has no attribute {attribute!r}{'' if advice is None else f': {advice}'}"
    return AttributeError(message, name=attribute, obj=of)


def no_module_attribute(module: str, attribute: str) -> AttributeError:
    """Return the error for a name that a module does not have; for a method of a client it says how to make one."""
    advice = f": connect() returns a client, as in locks = {module}.connect(), which has {attribute.lower()}()"
    known = attribute.lower() in OPTIONS.keys() - {"acquire", "connect", "try_acquire"}
    return AttributeError(f"module {module!r} has no attribute {attribute!r}{advice * known}", name=attribute)


def no_lock_without_client(name: str) -> InvalidType:
    """Return the error for `Lock(name)`."""
    return InvalidType(f"a client makes the locks of an engine: locks = connect(), then locks.lock({name!r})")


def check_keywords(function: str, given: Collection[str]) -> None:
    """Raise InvalidType for a keyword argument that a function does not have."""
    if unknown := [keyword for keyword in given if keyword not in OPTIONS[function]]:
        raise no_keyword(function, unknown)


def no_keyword(function: str, given: Iterable[str]) -> InvalidType:
    """Return the error for a keyword argument that a function does not have: what to write instead, if that is clear."""
    from difflib import get_close_matches  # slow, and only a mistake needs it

    keyword = next(iter(given))
    advice = KEYWORDS_OF.get(function, {}).get(keyword) or KEYWORDS.get(keyword)
    if function == "connect" and keyword in _LOCK:
        advice = f"give it to each lock, as in lock(name, {keyword}=…)"
    if advice is None and (close := get_close_matches(keyword, OPTIONS[function], 1)):
        advice = f"did you mean {close[0]!r}?"
    return InvalidType(f"{function}() has no argument {keyword!r}{'' if advice is None else f': {advice}'}")


class Hints:
    """An object whose missing attributes raise an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, attribute: str) -> NoReturn:
            raise no_attribute(self, attribute)


class NoBlock(Hints):
    """An object without a `with` block: `with` and `async with` raise an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a type checker would take it for something that `with` accepts

        def __enter__(self) -> NoReturn:
            kind = type(self).__name__
            raise InvalidType(f"a fencelock {kind} has no `with` block: {ATTRIBUTES[kind]['with']}")

        def __exit__(self, *error: object) -> None: ...

        async def __aenter__(self) -> NoReturn:
            self.__enter__()

        async def __aexit__(self, *error: object) -> None: ...


class BlockingOnly(Hints):
    """An object of the blocking API: `async with` raises an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:

        async def __aenter__(self) -> NoReturn:
            raise InvalidType("this is the blocking API: use `with`, or fencelock.aio.connect(…) for `async with`")

        async def __aexit__(self, *error: object) -> None: ...


class AsyncioOnly(Hints):
    """An object of the asyncio API: `with` raises an error that says what to write."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            raise InvalidType("this is the asyncio API: use `async with`, or fencelock.connect(…) for `with`")

        def __exit__(self, *error: object) -> None: ...
