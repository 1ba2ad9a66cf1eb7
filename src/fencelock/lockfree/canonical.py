"""One text for one JSON value, whoever writes it: what fingerprints and merges compare."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from fencelock.errors import InvalidType

Json: TypeAlias = Any
"""What `json` can write: None, bool, int, float, str, and lists and dicts of these."""


def canonical(value: Json) -> str:
    """Return the value as JSON: keys in order, no spaces, nothing that JSON does not have.

    >>> canonical({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{value!r:.80} cannot be written as JSON: {error}") from error


def written(value: Json, what: str) -> str:
    """Return the value as JSON in ASCII, so that no connection's character set has a say in it; an error says what it was.

    >>> written({"a": "é"}, "the result of 'k'")
    '{"a": "\\\\u00e9"}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{what} cannot be written as JSON: {error}; it is {value!r:.80}") from error
