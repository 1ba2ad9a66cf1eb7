"""What every fence does: take a bearer's credentials, compare them with the mark, refuse, and tell of a move by hand.

A **mark** is what a fence remembers of a resource: the highest token that was let through, and whose it was. A resource
without a mark is compared with the **floor**, where there is one; else it starts at the first token that it sees.
"""

from __future__ import annotations

from typing import NamedTuple

from fencelock.errors import InvalidArgument, InvalidType, StaleToken

TOKEN_MAX = 2**53 - 1
RESOURCE_MAX = 1024
ID_MAX = 255


class Credentials(NamedTuple):
    """What a fence needs of a lease: its token, its id, and the lock's name, which is the default for the resource.

    >>> Credentials(34, "worker-7", "order:42").token
    34
    """

    token: int
    id: str
    name: str | None = None


class Mark(NamedTuple):
    """The highest token that was let through. An empty id is anybody's: the fence was moved there by hand."""

    token: int
    id: str

    def admits(self, bearer: Credentials) -> bool:
        """Return whether a bearer may pass: a newer one, the same one, or the first one where the fence was moved to.

        >>> Mark(34, "b").admits(Credentials(35, "c")), Mark(34, "b").admits(Credentials(34, "b"))
        (True, True)
        >>> Mark(34, "b").admits(Credentials(34, "c")), Mark(34, "b").admits(Credentials(33, "a"))
        (False, False)
        >>> Mark(34, "").admits(Credentials(34, "c"))
        True
        """
        return bearer.token > self.token or (bearer.token == self.token and self.id in (bearer.id, ""))

    def is_of(self, bearer: Credentials) -> bool:
        """Return whether this bearer was the last to pass."""
        return (self.token, self.id) == (bearer.token, bearer.id)

    @classmethod
    def of(cls, bearer: Credentials) -> Mark:
        """Return the mark that a bearer leaves when it passes."""
        return cls(bearer.token, bearer.id)

    @property
    def text(self) -> str:
        """How it is kept where there is nothing but text."""
        return f"{self.token} {self.id}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Return the mark that a text stands for.

        >>> Mark.parse(Mark(34, "worker 7").text)
        Mark(token=34, id='worker 7')
        """
        token, _, id_ = text.partition(" ")
        return cls(int(token), id_)


def token_of(mark: Mark | None) -> int | None:
    """Return the token of a mark, or None if there is no mark."""
    return None if mark is None else mark.token


def admit(resource: str, mine: Credentials, seen: Mark | None) -> None:
    """Raise StaleToken unless a bearer may pass what it is compared with.

    >>> admit("order:42", Credentials(33, "a"), None)
    """
    if seen is not None and not seen.admits(mine):
        raise refusal(resource, mine, seen)


def bearer(lease: object) -> Credentials:
    """Return a lease's credentials, or those of anything else that has a token and an id.

    >>> from types import SimpleNamespace
    >>> bearer(SimpleNamespace(token=34, id="worker-7"))
    Credentials(token=34, id='worker-7', name=None)
    """
    token, id_ = getattr(lease, "token", None), getattr(lease, "id", None)
    if not isinstance(token, int) or isinstance(token, bool) or not isinstance(id_, str):
        kind = type(lease).__name__
        what, do = (
            f"not {kind}",
            "give it what acquire() or the `with` block returned, or fencelock.fences.from_environ()",
        )
        if isinstance(lease, str):
            do = "the lease comes before the resource"
        elif token is not None and id_ is not None:
            what, do = f"not {kind} with the token {token!r:.40} and the id {id_!r:.40}", "convert them first"
        raise InvalidType(f"a fence takes a lease, or anything else with a token (int) and an id (str), {what}: {do}")
    _check_range(token)
    if not id_ or "\0" in id_ or len(id_.encode()) > ID_MAX:
        raise InvalidArgument(f"an owner's id is 1 to {ID_MAX} bytes of UTF-8 without NUL, not {id_!r:.60}")
    name = getattr(lease, "name", None)
    return Credentials(token, id_, name if isinstance(name, str) else None)


def resource_of(mine: Credentials, resource: object) -> str:
    """Return the resource that a caller named, or else the name of its lease; raise InvalidType if there is neither.

    >>> resource_of(Credentials(34, "worker-7", "order:42"), None)
    'order:42'
    """
    if resource is None and mine.name is None:
        raise InvalidType(
            "a fence's resource must be given, as in resource='order:42': this lease has no name to take in its place"
        )
    return check_resource(mine.name if resource is None else resource)


def check_resource(resource: object) -> str:
    """Return the name of a resource; raise InvalidArgument unless it can be one.

    >>> check_resource("order:42")
    'order:42'
    """
    if not isinstance(resource, str):
        raise InvalidType(f"a fence's resource must be a str such as 'order:42', not {type(resource).__name__}")
    if not resource:
        raise InvalidArgument("a fence's resource must not be empty; name what is written, as in 'order:42'")
    if "\0" in resource or len(resource.encode()) > RESOURCE_MAX:
        raise InvalidArgument(
            f"a fence's resource must be at most {RESOURCE_MAX} bytes of UTF-8 without NUL: {resource!r:.60}"
        )
    return resource


def check_token(token: object) -> int:
    """Return where a fence may be moved to, or a floor be put; raise InvalidArgument unless it is a token.

    >>> check_token("3")
    Traceback (most recent call last):
    fencelock.errors.InvalidType: a token is an int such as 34, not '3' (str)
    """
    if not isinstance(token, int) or isinstance(token, bool):
        raise InvalidType(f"a token is an int such as 34, not {token!r:.40} ({type(token).__name__})")
    return _check_range(token)


def _check_range(token: int) -> int:
    if not 0 <= token <= TOKEN_MAX:
        raise InvalidArgument(
            f"a token is a number from 0 to 2^53 - 1, so that it stays exact everywhere; not {token}. Clocks in microseconds "
            "fit; those in nanoseconds, and ids of 64 bits, do not"
        )
    return token


def check_reason(resource: str, reason: object) -> str:
    """Return why a fence is moved; raise InvalidArgument unless others can read it later."""
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidArgument(f"moving the fence of {resource!r} needs a reason that others can read later")
    return reason


def refusal(resource: str, mine: Credentials, seen: Mark | None) -> StaleToken:
    """Return the error for a bearer that a fence does not let in; `seen` is what it was compared with, as far as known.

    >>> print(refusal("order:42", Credentials(33, "a"), Mark(34, "b")))
    'order:42' refused token 33: a holder with token 34 has been here. Stop, and acquire anew
    """
    if seen is None:
        said = "a newer holder has been here"
    elif not seen.id:
        said = f"the fence was put at token {seen.token}"  # a floor, or moved by hand
    elif seen.token == mine.token:
        said = f"token {seen.token} of another owner has been here, as after the engine lost its data and its clock went back"
    else:
        said = f"a holder with token {seen.token} has been here"
    message = f"{resource!r} refused token {mine.token}: {said}. Stop, and acquire anew"
    return StaleToken(message, resource, token=mine.token, seen=token_of(seen))


def not_entered(resource: str, mine: Credentials) -> StaleToken:
    """Return the error for a bearer that would be let in, but has not entered, or whose entry was undone since.

    >>> print(not_entered("order:42", Credentials(33, "a")))
    'order:42' has not let token 33 in: call enter() before the first read, again after a rebase or collect
    """
    what = f"{resource!r} has not let token {mine.token} in"
    message = f"{what}: call enter() before the first read, again after a rebase or collect"
    return StaleToken(message, resource, token=mine.token)


def tell_moved(resource: str, before: int | None, to: int, reason: str) -> None:
    """Log that a fence was moved on purpose."""
    import logging  # not for those who only take credentials from the environment

    where = "nowhere" if before is None else f"token {before}"
    log = logging.getLogger("fencelock.fences")
    log.warning("the fence of %r was moved from %s to token %d: %s", resource, where, to, reason)


def tell_collected(count: int, floor: int) -> None:
    """Log that marks were forgotten behind a floor: the one in force, which may be higher than the one that was asked for."""
    import logging

    log = logging.getLogger("fencelock.fences")
    log.info("the marks of %d resources were collected; tokens below %d are refused from now on", count, floor)
