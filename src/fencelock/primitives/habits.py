"""Error messages for names of redis-py's Lock and `threading.Lock`: what to write instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

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


def check_keywords(function: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise InvalidType for a keyword argument that a function does not have."""
    if unknown := [keyword for keyword in given if keyword not in known]:
        raise no_keyword(function, unknown, known)


def no_keyword(function: str, given: Iterable[str], known: Iterable[str] = ()) -> InvalidType:
    """Return the error for a keyword argument that a function does not have: what to write instead, if that is clear."""
    from difflib import get_close_matches  # slow, and only a mistake needs it

    keyword = next(iter(given))
    advice = KEYWORDS.get(keyword)
    if advice is None and (close := get_close_matches(keyword, known, 1)):
        advice = f"did you mean {close[0]!r}?"
    return InvalidType(f"{function}() has no argument {keyword!r}{'' if advice is None else f': {advice}'}")
