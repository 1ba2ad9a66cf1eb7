"""What both sides agree on: the header, and how a refusal calls itself."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from fencelock.errors import FencelockError
from fencelock.fences import Credentials, Fenced
from fencelock.fences.core import bearer

HEADER = "Fencing-Token"
STALE = "urn:fencelock:stale-token"

# No quote and no backslash inside the id, so that it ends at one place for every reader: `header` percent-encodes them.
_SHAPE = re.compile(r'[ \t]*([0-9]{1,16})[ \t]*;[ \t]*id="([!#-\[\]-~]{1,1000})"[ \t]*')


class BadHeader(FencelockError, ValueError):
    """A Fencing-Token header that is none."""


def header(lease: Fenced) -> str:
    """Return a lease's token and id, as the value of the header.

    >>> from types import SimpleNamespace
    >>> header(SimpleNamespace(token=34, id="worker 7"))
    '34; id="worker%207"'
    """
    mine = bearer(lease)
    return f'{mine.token}; id="{quote(mine.id)}"'


def parse(value: str) -> Credentials:
    """Return the credentials in the value of the header; raise BadHeader.

    >>> parse('34; id="worker%207"')
    Credentials(token=34, id='worker 7', name=None)
    """
    found = _SHAPE.fullmatch(value)
    if found is None:
        raise BadHeader(f'{HEADER} must be a token and an owner\'s id, as in 34; id="5f1d"; not {value!r:.80}')
    try:
        return bearer(Credentials(int(found[1]), unquote(found[2], errors="strict")))
    except ValueError as error:
        raise BadHeader(f"{HEADER}: {error}") from error
