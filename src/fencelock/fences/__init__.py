"""Fences let a resource refuse the holder of an old lease. They compare tokens and ids, and know nothing of locks.

Everything in this package blocks; `fencelock.aio.fences` has the same classes, awaited.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from fencelock.errors import FencelockError
from fencelock.fences.core import TokenPair

__all__ = ["Fenced", "TokenPair", "from_environ"]


class Fenced(Protocol):
    """The part of a lease that a fence reads: anything with a token and an id will do.

    If it also has a `name` (str), that is the resource unless the caller names another one. If it has a method `check`, as
    leases have, the fence calls it before its first statement, and passes its error on: LeaseLost.

    >>> from types import SimpleNamespace
    >>> other_service: Fenced = SimpleNamespace(token=34, id="worker-7")
    """

    @property
    def token(self) -> int: ...
    @property
    def id(self) -> str: ...


def from_environ(environ: Mapping[str, str] | None = None, *, name: str | None = None) -> TokenPair:
    """Return the token and id that `fencelock run` gave to this command, to be passed to a fence in place of a lease.

    `name` selects one of several locks. A command under a read lock or a permit has no token.

    >>> from_environ({"FENCELOCK_TOKEN": "34", "FENCELOCK_ID": "5f1d", "FENCELOCK_NAME": "report"})
    TokenPair(token=34, id='5f1d', name='report')
    """
    given = os.environ if environ is None else environ
    keys = ("FENCELOCK_NAME", "FENCELOCK_TOKEN", "FENCELOCK_ID")
    if given.get("FENCELOCK_TOKEN") and (name is not None or "\n" in given.get("FENCELOCK_NAME", "")):
        locks = list(zip(*(given.get(key, "").split("\n") for key in keys), strict=False))
        lock = next((lock for lock in locks if lock[0] == name), None)
        if lock is None:
            those = ", ".join(repr(lock[0]) for lock in locks)
            raise FencelockError(
                f"this command runs under the locks {those}: give the name of one of them, not {name!r:.40}"
            )
        given = dict(zip(keys, lock, strict=True))
    token, id_ = given.get("FENCELOCK_TOKEN", ""), given.get("FENCELOCK_ID", "")
    if not token or not id_:
        missing = [name for name, value in (("FENCELOCK_TOKEN", token), ("FENCELOCK_ID", id_)) if not value]
        those = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise FencelockError(
            f"{those} not set: start this command with `fencelock run NAME -- COMMAND`, without --shared and --limit"
        )
    if not (token.isascii() and token.isdigit()):
        raise FencelockError(f"FENCELOCK_TOKEN is {token!r:.40} and not a number; leave it as `fencelock run` sets it")
    return TokenPair(int(token), id_, given.get("FENCELOCK_NAME") or None)
