"""Who reads a connection: whoever waits for something, as nobody need be woken for it then; else the driver's own thread."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import RLock, get_ident

from fencelock.engines.zookeeper.line import Line

LULL, SHORTEST, LONGEST = 1 / 100, 0.05, 0.25
"""The share of a session's timeout, within these bounds in seconds, without anybody who reads and waits, after which the
driver's thread reads. To look more often costs those who do a tenth of their time."""


class Turns:
    """`fencelock.core.runtime.Source`: everybody who waits comes by here, with a key of their own."""

    def __init__(self, now: Callable[[], float], read: Callable[[Line], None], nudge: Callable[[], None]) -> None:
        self.line: Line | None = None
        self.ear: socket.socket | None = None
        self.mouth: socket.socket | None = None
        """What wakes whoever reads."""
        self._now = now
        self._read = read
        self._nudge = nudge
        self._mutex = RLock()
        self._waiting: set[object] = set()
        self._reader: object = None
        self._thread = 0
        self._asleep = False
        self._left = 0.0
        self._lull = SHORTEST

    def begin(self, line: Line, ear: socket.socket, mouth: socket.socket, seconds: float) -> None:
        """Have a new line be read, of a session with this timeout."""
        self._lull = max(SHORTEST, min(seconds * LULL, LONGEST))
        self.ear, self.mouth, self.line = ear, mouth, line

    def rest(self) -> float:
        """Return for how many seconds the driver's thread may leave the reading to others."""
        if self._reader is not None:
            return self._lull
        return 0.0 if self._waiting else self._left + self._lull - self._now()

    def take_over(self) -> None:
        """Have the driver's thread read: there is something, and whoever was to read it has not.

        It may be about to, which does no harm. Or it was interrupted before it could leave, and never comes; or its line is
        dead, and there is a new one. No mutex: a signal handler that waits for the driver's thread may have interrupted
        whoever holds it.
        """
        reader, self._reader = self._reader, None
        self._waiting.discard(reader)

    # ------------------------------------------------------------------ whoever waits

    def enter(self, key: object) -> bool:
        """Come to wait; return whether it is ours to read."""
        self._waiting.add(key)
        line = self.line
        if line is None or not line.shared:
            return False
        with self._mutex:
            # If it is this very thread that reads, it has been interrupted, and will not go on before we are done.
            if len(self._waiting) == 1 if self._reader is None else self._thread == get_ident():
                self._reader, self._thread = key, get_ident()
                return True
        return False

    def leave(self, key: object) -> None:
        """Wait no more."""
        self._waiting.discard(key)
        with self._mutex:
            if self._reader is key:
                self._left, self._reader = self._now(), None
        if self._waiting:
            self._nudge()

    def read_until(self, key: object, enough: Callable[[], bool], until: float) -> None:
        """Read, in this thread, until that is so, or nothing more can be read, or the time is over."""
        line, ear = self.line, self.ear
        if line is None or ear is None:
            return
        # Taken while it is used: a signal handler that comes to read has to have its own.
        poll, line.poll = line.poll, None
        if poll is None:
            poll = select.poll()
            try:
                poll.register(line, select.POLLIN)
                poll.register(ear, select.POLLIN)
            except (OSError, ValueError):
                return  # closed meanwhile
        while self._reader is key and not line.dead and (left := until - self._now()) > 0:
            self._asleep = True
            # Whoever did it in this very moment has not seen that we sleep.
            ready = () if enough() else poll.poll(left * 1000)
            self._asleep = False
            for descriptor, _ in ready:
                if descriptor == line.number:
                    self._read(line)
                else:
                    with suppress(OSError):
                        ear.recv(64, socket.MSG_DONTWAIT)
            if enough():
                break
        line.poll = poll

    def wake(self) -> None:
        """Have whoever reads look whether it is enough."""
        if self._asleep and (mouth := self.mouth) is not None:
            with suppress(OSError):
                mouth.send(b".", socket.MSG_DONTWAIT)
