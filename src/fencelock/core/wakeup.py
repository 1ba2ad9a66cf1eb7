"""Wake-ups between processes of one machine: datagrams to abstract Unix sockets, which vanish with their process.

An address is `socket-name/slot`. The slot selects one of the waiters that share a socket, as all tasks of an asyncio
client do. The sender never waits and ignores failures: a wake-up is a hint, and the waiter reads the engine.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket  # takes 4 ms, and only waiting and waking need it

AVAILABLE = sys.platform.startswith("linux")
MAX_DATAGRAMS = 64
"""Datagrams to read at a time: any user of the machine can send them without end."""


def open_socket() -> tuple[socket.socket, str]:
    """Return a bound, non-blocking socket and its name."""
    import socket

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    name = f"fencelock-{os.urandom(12).hex()}"
    sock.bind(f"\0{name}")
    return sock, name


class WakeupSender:
    """Wakes waiters of other processes, over one socket."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._closed = False
        self._mutex = RLock()

    def wake(self, address: str) -> None:
        """Send a wake-up. Failures are ignored: the waiter is gone, its socket is full, or no descriptor is free."""
        name, _, slot = address.partition("/")
        try:
            (self._socket or self._open()).sendto(slot.encode(), f"\0{name}")
        except (OSError, ImportError):
            pass
        if self._closed:
            self.close()  # the client was closed while this thread opened the socket

    def _open(self) -> socket.socket:
        import socket

        with self._mutex:  # otherwise two threads could open two sockets and leak one
            if self._socket is None:
                kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
                self._socket = socket.socket(socket.AF_UNIX, kind)
            return self._socket

    def close(self) -> None:
        """Close the socket."""
        self._closed = True
        with self._mutex:
            sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
