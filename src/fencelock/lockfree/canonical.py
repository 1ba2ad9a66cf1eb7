"""One text for equal JSON values, for fingerprints and merges."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from fencelock.errors import InvalidType

Json: TypeAlias = Any
"""A value that `json` can write: None, bool, int, float, str, and lists and dicts of these."""


def canonical(value: Json) -> str:
    """Return the value as JSON: keys sorted, no spaces, no NaN or infinity.

    >>> canonical({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{value!r:.80} cannot be written as JSON: {error}") from error


def to_json(value: Json, what: str) -> str:
    """Return the value as JSON in ASCII, which every character set of a connection can store; `what` names it in an error.

    >>> to_json({"a": "é"}, "the result of 'k'")
    '{"a": "\\\\u00e9"}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidType(f"{what} cannot be written as JSON: {error}; it is {value!r:.80}") from error
