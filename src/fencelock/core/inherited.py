"""What a forked child does with its parent's connections."""

from __future__ import annotations

import os
import socket


def silence(sock: socket.socket) -> None:
    """Put nothing in the place of a socket that was inherited: closing it could still say good-bye for the parent."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(nothing, sock.fileno(), inheritable=False)
    except OSError:
        pass
    finally:
        os.close(nothing)
