"""Forks: what clients do before and after one, and what a child does with its parent's connections and waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol
from weakref import WeakSet

from fencelock.errors import OutcomeUnknown

FORKED = "this process was forked while it waited: the claim is its parent's; connect and acquire in the child itself"


class Forked(OutcomeUnknown):
    """A signal handler forked the thread that waited, and this is the copy in the child. The parent still waits."""


_forks = 0
"""The number of forks between the first process and this one."""


@contextmanager
def raise_if_forked() -> Iterator[None]:
    """Raise Forked at the end of the block if this process was forked inside it."""
    before = _forks
    yield
    if _forks != before:
        raise Forked(FORKED)


class ForkAware(Protocol):
    """An object that takes part in every fork of the process, for as long as it exists."""

    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


_registered: WeakSet[ForkAware] = WeakSet()
_mutex = RLock()
"""Held while an object is added, and during a fork: a set cannot be read while it grows."""
_forking: list[list[ForkAware]] = []
"""The objects that take part in the current fork. A list of lists: a signal handler may fork during a fork."""


def register(it: ForkAware) -> None:
    """Call the object's methods at every fork."""
    with _mutex:
        _registered.add(it)


def registered() -> list[ForkAware]:
    """Return the registered objects that still exist."""
    with _mutex:
        return list(_registered)


def _before_fork() -> None:
    _mutex.acquire()
    _forking.append(list(_registered))
    for it in _forking[-1]:
        it.before_fork()


def _after_fork_in_parent() -> None:
    for it in _forking.pop():
        it.after_fork_in_parent()
    _mutex.release()


def _after_fork_in_child() -> None:
    global _forks
    _forks += 1
    for it in _forking.pop():
        it.after_fork_in_child()
    _mutex.release()  # the thread that forked holds it, and it is the child's only thread


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class Descriptor(Protocol):
    """A socket, or another object with a descriptor."""

    def fileno(self) -> int: ...


def detach_after_fork(sock: Descriptor) -> None:
    """Replace an inherited socket by /dev/null: closing it could still send bytes to the parent's server."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(null, sock.fileno(), inheritable=False)
    except OSError:
        pass
    finally:
        os.close(null)
