"""Wake-ups of the blocking runtime: datagrams from other processes, on a socket for each wait."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from fencelock.core import wakeup
from fencelock.core.fork import raise_if_forked

if TYPE_CHECKING:
    import socket


class SocketWakeup:
    """A wake-up with its own socket."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._socket = sock
        self.address = name

    async def wait(self, timeout: float) -> bool:
        """Wait for a datagram, at most `timeout` seconds; return whether one arrived."""
        with raise_if_forked():
            return self._poll(timeout, self._socket.fileno()) and self.drain()

    def _poll(self, timeout: float, *descriptors: int) -> bool:
        # A new poll object for each wait: while a client is being closed, two threads may wait for one wake-up.
        poll = select.poll()
        for descriptor in descriptors:
            if descriptor < 0:
                return True  # closed with the client
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    def drain(self) -> bool:
        """Read the datagrams so far; return whether there were any."""
        received = False
        try:
            for _ in range(wakeup.MAX_DATAGRAMS):
                self._socket.recv(16)
                received = True
        except BlockingIOError:
            pass
        except OSError:
            return True  # the client was closed: the waiter finds that out
        return received

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
