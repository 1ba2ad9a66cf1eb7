"""The keys under which primitives keep records: a prefix and the user's name, hashed if the result would be too long."""

from __future__ import annotations

from hashlib import sha256

from fencelock.core.validation import NAME_MAX_BYTES, check_name


def record_key(prefix: str, name: str) -> str:
    """Return the key of a name.

    >>> record_key("rate", "stripe")
    'rate:stripe'
    """
    key = f"{prefix}:{check_name(name)}"
    if len(key.encode()) <= NAME_MAX_BYTES:
        return key
    return f"{prefix}:sha256:{sha256(name.encode()).hexdigest()}"
