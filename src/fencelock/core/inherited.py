"""What a forked child does with its parent's connections."""

from __future__ import annotations

import os
from typing import Protocol


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
