"""Versions at the other end of HTTP: the ETag that a server gives, and the If-Match that it gets back."""

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
    """Raise VersionConflict unless an If-Match header names the version there is; None: there is nothing yet.

    A missing header is refused too: who does not say what it has read would overwrite what it has not. Answer 412, or 428
    where the header is missing.

    >>> check_if_match('"6", "7"', 7)
    >>> check_if_match('"6"', 7)
    Traceback (most recent call last):
    fencelock.errors.VersionConflict: If-Match is "6", and the version is "7": read again, and decide again
    """
    if header is None:
        raise VersionConflict("If-Match is missing: say which version you have read")
    given = [part.strip() for part in header.split(",")]
    if version is not None and (given == ["*"] or etag(version) in given):
        return
    there = "nothing is there" if version is None else f"the version is {etag(version)}"
    raise VersionConflict(f"If-Match is {header}, and {there}: read again, and decide again")
