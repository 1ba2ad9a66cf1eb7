"""The keys under which primitives keep records: a prefix and the user's name, hashed if the result would be too long."""

from __future__ import annotations

from hashlib import sha256

from fencelock.core.validation import NAME_MAX_BYTES, check_name


def record_key(prefix: str, name: str) -> str:
    """Return the key of a name.

    >>> record_key("rate", "stripe")
    'rate:stripe'
    """
    return _shorten(prefix, check_name(name))


def slot_key(prefix: str, name: str, slot: str) -> str:
    """Return the key of a name and a slot; different pairs have different keys.

    >>> slot_key("once", "billing", "2026-07-01"), slot_key("once", "a/b", "c"), slot_key("once", "a", "b/c")
    ('once:billing/2026-07-01', 'once:a%2Fb/c', 'once:a/b/c')
    """
    escaped = check_name(name).replace("%", "%25").replace("/", "%2F")
    return _shorten(prefix, f"{escaped}/{check_name(slot, 'a slot')}")


def _shorten(prefix: str, text: str) -> str:
    key = f"{prefix}:{text}"
    if len(key.encode()) <= NAME_MAX_BYTES:
        return key
    return f"{prefix}:sha256:{sha256(text.encode()).hexdigest()}"
