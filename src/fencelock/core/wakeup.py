"""Doorbells between processes of one machine: datagrams to abstract Unix sockets, which vanish with their process.

An address is `socket-name/slot`. The slot tells apart the waiters that share one socket, as all tasks of an asyncio
client do. Whoever rings does not wait and does not care: the bell is a hint, the truth is in the engine.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket  # 4 ms that only who has to wait, or hands over, should pay

AVAILABLE = sys.platform.startswith("linux")
MAX_DATAGRAMS = 64
"""How many rings to take in before going on: any user of the machine can ring without end."""


def open_socket() -> tuple[socket.socket, str]:
    """Return a bound, non-blocking socket and its name."""
    import socket

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    name = f"fencelock-{os.urandom(12).hex()}"
    sock.bind(f"\0{name}")
    return sock, name


class WakeupSender:
    """Rings the bells of others over one socket."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._closed = False
        self._mutex = RLock()

    def wake(self, address: str) -> None:
        """Ring; a bell that is gone, or full of rings already, needs none, and without a free descriptor there is none."""
        name, _, slot = address.partition("/")
        try:
            (self._socket or self._open()).sendto(slot.encode(), f"\0{name}")
        except (OSError, ImportError):
            pass
        if self._closed:
            self.close()  # by a thread that was still at it when the client was closed

    def _open(self) -> socket.socket:
        import socket

        with self._mutex:  # or of two sockets of two threads one would be forgotten
            if self._socket is None:
                kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
                self._socket = socket.socket(socket.AF_UNIX, kind)
            return self._socket

    def close(self) -> None:
        """Give back the socket."""
        self._closed = True
        with self._mutex:
            sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
