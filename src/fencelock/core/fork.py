"""What a forked child does with its parent's connections, and with a wait that was forked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fencelock.errors import OutcomeUnknown

FORKED = "this process was forked while it waited: the claim is its parent's; connect and acquire in the child itself"


class Forked(OutcomeUnknown):
    """A signal handler forked the very thread that waited, and this is the copy in the child: its parent goes on waiting."""


_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


@contextmanager
def raise_if_forked() -> Iterator[None]:
    """Raise Forked at the end of a wait that was forked."""
    before = _forks
    yield
    if _forks != before:
        raise Forked(FORKED)


class Descriptor(Protocol):
    """A socket, or something else that has one."""

    def fileno(self) -> int: ...


def silence(sock: Descriptor) -> None:
    """Put nothing in the place of a socket that was inherited: closing it could still say good-bye for the parent."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nothing, sock.fileno(), inheritable=False)
    except OSError:
        pass
    finally:
        os.close(nothing)
