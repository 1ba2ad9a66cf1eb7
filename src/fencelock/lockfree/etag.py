"""Versions in HTTP, for servers: the ETag of a response, and the If-Match of a request."""

from __future__ import annotations

from fencelock.errors import InvalidArgument, VersionConflict


def etag(version: int | str) -> str:
    """Return a version as a strong ETag.

    >>> etag(7)
    '"7"'
    """
    text = str(version)
    if not text.isascii() or not text.isprintable() or not {'"', " ", ","}.isdisjoint(text):
        raise InvalidArgument(f"{text!r:.40} cannot be an ETag: use printable ASCII without blanks, quotes and commas")
    return f'"{text}"'


def check_if_match(header: str | None, version: int | str | None) -> None:
    """Raise VersionConflict unless an If-Match header names the current version; None: the resource does not exist yet.

    A missing header is refused, too: a client that does not name the version it has read could overwrite another one. Respond
    with 412, or with 428 if the header is missing.

    >>> check_if_match('"6", "7"', 7)
    >>> check_if_match('"6"', 7)
    Traceback (most recent call last):
    fencelock.errors.VersionConflict: If-Match is "6", and the version is "7": read it again
    """
    if header is None:
        raise VersionConflict("If-Match is missing: send the version that you have read")
    given = [part.strip() for part in header.split(",")]
    if version is not None and (given == ["*"] or etag(version) in given):
        return
    there = "the resource does not exist" if version is None else f"the version is {etag(version)}"
    raise VersionConflict(f"If-Match is {header}, and {there}: read it again")
