"""Events of the blocking runtime: flags that threads wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from fencelock.core.fork import raise_if_forked


class BlockingEvent:
    """An event whose wait is a coroutine that does not suspend.

    Not a `threading.Event`: if Ctrl-C arrives while that takes its internal lock, the lock stays taken, and a thread that
    sets the event hangs for ever. Here `set` never waits.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set it and wake all waiting threads."""
        self._set = True
        waiters = self._waiters
        try:
            while waiters:
                waiters.pop()()
        except IndexError:
            pass  # the waiting thread has just removed itself

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set, at most `timeout` seconds; return whether it is set."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        wake = waiter.release
        self._waiters.append(wake)
        try:
            if self._set:  # set() may have run before the append
                return True
            with raise_if_forked():
                return waiter.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
        finally:
            with suppress(ValueError):
                self._waiters.remove(wake)


class PollableEvent(BlockingEvent):
    """An event that also ends a poll of `wait_for_push`, through a pair of sockets."""

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        from socket import socketpair  # engines without a server do not need it

        super().__init__()
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def set(self) -> None:
        """Set it, and wake the thread in `wait_for_push`."""
        super().set()
        with suppress(OSError):  # full, and so readable in any case; or closed
            self._writer.send(b".")

    def clear(self) -> None:
        """Unset it. This comes before the reads: a set() during them must stay set."""
        super().clear()
        with suppress(OSError):
            while self._reader.recv(64):
                pass

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def close(self) -> None:
        """Set it, and close the sockets."""
        super().set()
        self._reader.close()
        self._writer.close()
