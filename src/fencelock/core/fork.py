"""What a forked child does with its parent's connections, and with a wait that the fork copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fencelock.errors import OutcomeUnknown

FORKED = "this process was forked while it waited: the claim is its parent's; connect and acquire in the child itself"


class Forked(OutcomeUnknown):
    """A signal handler forked the thread that waited, and this is the copy in the child. The parent still waits."""


_forks = 0


def _count() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


@contextmanager
def raise_if_forked() -> Iterator[None]:
    """Raise Forked at the end of the block if this process was forked inside it."""
    before = _forks
    yield
    if _forks != before:
        raise Forked(FORKED)


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
