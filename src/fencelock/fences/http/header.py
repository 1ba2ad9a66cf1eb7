"""The Fencing-Token header, and the problem type of a refusal."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError
from fencelock.fences import Fenced, TokenPair
from fencelock.fences.core import credentials_of

HEADER = "Fencing-Token"
STALE = "urn:fencelock:stale-token"

# The id has no quote and no backslash, so that every parser finds the same end: `header` percent-encodes them.
_SHAPE = re.compile(r'[ \t]*([0-9]{1,16})[ \t]*;[ \t]*id="([!#-\[\]-~]{1,1000})"[ \t]*')


class BadHeader(FencelockError, ValueError):
    """The value of a Fencing-Token header is malformed."""


def header(lease: Fenced) -> str:
    """Return the value of the header for a lease.

    >>> from types import SimpleNamespace
    >>> header(SimpleNamespace(token=34, id="worker 7"))
    '34; id="worker%207"'
    """
    pair = credentials_of(lease)
    return f'{pair.token}; id="{quote(pair.id)}"'


def parse(value: str) -> TokenPair:
    """Return the token and id in the value of the header; raise BadHeader.

    >>> parse('34; id="worker%207"')
    TokenPair(token=34, id='worker 7', name=None)
    """
    found = _SHAPE.fullmatch(value)
    if found is None:
        raise BadHeader(f'{HEADER} must be a token and the id of a claim, as in 34; id="5f1d"; not {value!r:.80}')
    try:
        return credentials_of(TokenPair(int(found[1]), unquote(found[2], errors="strict")))
    except ValueError as error:
        raise BadHeader(f"{HEADER}: {error}") from error
