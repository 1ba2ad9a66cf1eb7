"""Error messages for names of redis-py's Lock and `threading.Lock`: what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from fencelock.errors import InvalidType

ATTRIBUTES = {
    "release": "acquire() returns a lease: call lease.release(), or use a `with` block",
    "locked": "locks.inspect(name).holders says who holds it",
    "owned": "acquire() returns a lease: lease.lost.is_set() says whether it was lost",
    "extend": "leases are renewed in the background; lease.renew() renews one now",
    "reacquire": "leases are renewed in the background; lease.renew() renews one now",
}

KEYWORDS = {
    "blocking_timeout": "timeout= is how long to wait for the lock, ttl= after how long the lock of a dead holder is free",
    "blocking": "use try_acquire() to not wait, or timeout= for the seconds to wait",
}


def no_attribute(attribute: str) -> AttributeError:
    """Return the error for an attribute that a Lock does not have."""
    advice = ATTRIBUTES.get(attribute)
    return AttributeError(f"a fencelock Lock has no attribute {attribute!r}{'' if advice is None else f': {advice}'}")


def no_keyword(function: str, given: Iterable[str]) -> InvalidType:
    """Return the error for a keyword argument that a function does not have."""
    keyword = next(iter(given))
    advice = KEYWORDS.get(keyword)
    return InvalidType(f"{function}() has no argument {keyword!r}{'' if advice is None else f': {advice}'}")
