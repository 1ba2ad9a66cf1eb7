"""What every fence does: read a lease's token and id, compare them with the mark of the resource, and refuse old ones.

A **high-water mark** is what a fence stores for a resource: the highest token that it has accepted, and the id of its claim.
A resource without a mark is compared with `min_token`, which `prune` sets; without that, it accepts any token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from fencelock.errors import InvalidArgument, InvalidType, StaleToken

_log = logging.getLogger("fencelock.fences")

TOKEN_MAX = 2**53 - 1
RESOURCE_MAX = 1024
ID_MAX = 255

SHARED_MODES = {
    "shared": "a read lease does not exclude other readers; write under rwlock(…).write() or lock(…)",
    "permit": "a permit of a semaphore does not exclude the other permits; write under lock(…)",
}
"""Modes of leases whose tokens do not order the writes, and what to do instead."""

HINT = (
    "If new leases are refused, too, the locks have moved to an engine whose clock is behind: see "
    "docs/moving-to-another-engine.md"
)


class TokenPair(NamedTuple):
    """What a fence needs of a lease: its token, its id, and the lock's name, which is the default for the resource.

    >>> TokenPair(34, "worker-7", "order:42").token
    34
    """

    token: int
    id: str
    name: str | None = None


class HighWaterMark(NamedTuple):
    """The highest accepted token and its id. An empty id accepts the first claim with this token, as after a rebase."""

    token: int
    id: str

    def admits(self, pair: TokenPair) -> bool:
        """Return whether a token is accepted: a higher one, the same claim again, or the first one after a rebase.

        >>> HighWaterMark(34, "b").admits(TokenPair(35, "c")), HighWaterMark(34, "b").admits(TokenPair(34, "b"))
        (True, True)
        >>> HighWaterMark(34, "b").admits(TokenPair(34, "c")), HighWaterMark(34, "b").admits(TokenPair(33, "a"))
        (False, False)
        >>> HighWaterMark(34, "").admits(TokenPair(34, "c"))
        True
        """
        return pair.token > self.token or (pair.token == self.token and self.id in (pair.id, ""))

    def is_of(self, pair: TokenPair) -> bool:
        """Return whether this claim has set the mark."""
        return (self.token, self.id) == (pair.token, pair.id)

    @classmethod
    def of(cls, pair: TokenPair) -> HighWaterMark:
        """Return the mark that a claim sets."""
        return cls(pair.token, pair.id)

    @property
    def text(self) -> str:
        """The mark as text."""
        return f"{self.token} {self.id}"

    @classmethod
    def parse(cls, text: str) -> HighWaterMark:
        """Return the mark that a text stands for.

        >>> HighWaterMark.parse(HighWaterMark(34, "worker 7").text)
        HighWaterMark(token=34, id='worker 7')
        """
        token, _, id_ = text.partition(" ")
        return cls(int(token), id_)


def token_of(mark: HighWaterMark | None) -> int | None:
    """Return the token of a mark, or None without a mark."""
    return None if mark is None else mark.token


def admit(resource: str, pair: TokenPair, mark: HighWaterMark | None) -> None:
    """Raise StaleToken if the mark does not admit the token.

    >>> admit("order:42", TokenPair(33, "a"), None)
    """
    if mark is not None and not mark.admits(pair):
        raise refusal(resource, pair, mark)


def credentials_of(lease: object) -> TokenPair:
    """Return the token, id and name of a lease, or of anything else that has a token and an id.

    Raise LeaseLost if it is a lease that has ended by its own clock, or was released. Raise InvalidArgument for a read lease
    and for a permit: several holders have them at the same time. A TokenPair has no clock: only the mark can refuse it.

    >>> from types import SimpleNamespace
    >>> credentials_of(SimpleNamespace(token=34, id="worker-7"))
    TokenPair(token=34, id='worker-7', name=None)
    """
    pair = token_pair_of(lease)
    check = getattr(lease, "check", None)
    if check is not None:
        check()
    return pair


def token_pair_of(lease: object) -> TokenPair:
    """Return the token, id and name of a lease without a look at its clock; otherwise like `credentials_of`."""
    token, id_ = getattr(lease, "token", None), getattr(lease, "id", None)
    if not isinstance(token, int) or isinstance(token, bool) or not isinstance(id_, str):
        raise _not_a_lease(lease, token, id_)
    why_not = SHARED_MODES.get(str(getattr(lease, "mode", "")))
    if why_not is not None:
        raise InvalidArgument(f"a fence needs an exclusive lease: {why_not}")
    _check_range(token)
    if not id_ or "\0" in id_ or len(id_.encode()) > ID_MAX:
        raise InvalidArgument(f"the id of a claim is 1 to {ID_MAX} bytes of UTF-8 without NUL, not {id_!r:.60}")
    name = getattr(lease, "name", None)
    return TokenPair(token, id_, name if isinstance(name, str) else None)


def _not_a_lease(lease: object, token: object, id_: object) -> InvalidType:
    kind = type(lease).__name__
    what, advice = f"not {kind}", "pass what acquire() or the `with` block returned, or fencelock.fences.from_environ()"
    if isinstance(lease, str):
        advice = "the lease comes before the resource"
    elif isinstance(getattr(lease, "leases", None), Mapping):
        advice = 'each name of a multi-lock has its own lease: pass group["name"]'
    elif token is not None and id_ is not None:
        what, advice = f"not {kind} with the token {token!r:.40} and the id {id_!r:.40}", "convert them first"
    return InvalidType(f"a fence takes a lease, or anything else with a token (int) and an id (str), {what}: {advice}")


def resource_of(pair: TokenPair, resource: object) -> str:
    """Return the resource that a caller named, or else the name of its lease; raise InvalidType if there is neither.

    >>> resource_of(TokenPair(34, "worker-7", "order:42"), None)
    'order:42'
    """
    if resource is None and pair.name is None:
        raise InvalidType("a fence's resource must be given, as in resource='order:42': this lease has no name")
    return check_resource(pair.name if resource is None else resource)


def named_credentials(lease: object, resource: object) -> tuple[TokenPair, str]:
    """Return the credentials of a lease and the resource: the one that the caller named, or the name of the lease."""
    pair = credentials_of(lease)
    return pair, resource_of(pair, resource)


def check_resource(resource: object) -> str:
    """Return the name of a resource; raise InvalidArgument unless it is valid.

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
    """Return a token that a caller named; raise InvalidArgument unless it is valid.

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
            f"a token is a number from 0 to 2^53 - 1, so that every system stores it exactly; not {token}. Clocks in "
            "microseconds fit; clocks in nanoseconds and ids of 64 bits do not"
        )
    return token


def check_reason(reason: object) -> str:
    """Return the reason for a rebase; raise InvalidArgument if it is empty."""
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidArgument("moving a fence needs a reason that others can read in the log later")
    return reason


def refusal(resource: str, pair: TokenPair, mark: HighWaterMark | None) -> StaleToken:
    """Return the error for a refused token; `mark` is what it was compared with, if that is known.

    >>> print(refusal("order:42", TokenPair(33, "a"), HighWaterMark(34, "b")))  # doctest: +ELLIPSIS
    'order:42' refused token 33: it has accepted token 34. Stop, and acquire the lock again. If new leases are refused, ...
    """
    if mark is None:
        cause = "it has accepted a newer one"
    elif not mark.id:
        cause = f"its fence was set to token {mark.token}"  # by prune or rebase
    elif mark.token == pair.token:
        cause = f"it has accepted token {mark.token} of another claim, which happens if an engine loses its data"
    else:
        cause = f"it has accepted token {mark.token}"
    message = f"{resource!r} refused token {pair.token}: {cause}. Stop, and acquire the lock again. {HINT}"
    return StaleToken(message, resource, token=pair.token, seen=token_of(mark))


def not_entered(resource: str, pair: TokenPair) -> StaleToken:
    """Return the error for a token that is high enough, but has not entered, or was removed by rebase or prune since.

    >>> print(not_entered("order:42", TokenPair(33, "a")))
    'order:42' has no entry of token 33: call enter() before the first read, and again after rebase or prune
    """
    what = f"{resource!r} has no entry of token {pair.token}"
    message = f"{what}: call enter() before the first read, and again after rebase or prune"
    return StaleToken(message, resource, token=pair.token)


def log_rebase(resource: str, before: int | None, to: int, reason: str) -> None:
    """Log that a fence was moved on purpose."""
    where = "no token" if before is None else f"token {before}"
    _log.warning("the fence of %r was moved from %s to token %d: %s", resource, where, to, reason)


def log_rebase_all(count: int, to: int, reason: str) -> None:
    """Log that all marks of a fence were moved on purpose."""
    _log.warning("the fences of %d resources were moved to token %d: %s", count, to, reason)


def log_prune(count: int, min_token: int) -> None:
    """Log that marks were removed; `min_token` is the one in force, which may be higher than the one asked for."""
    _log.info("the marks of %d resources were removed; tokens below %d are refused from now on", count, min_token)
