"""The watchdog: a small process that kills the command when `fencelock run` itself cannot.

The kernel kills the child with its parent, but not the child's own children, and a stopped `fencelock run` does nothing.
The watchdog reads deadlines from a pipe. It kills the command's process group when the pipe is closed, or when a deadline
passes without a later one.
"""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fencelock.cli.child import Child

MAX_SLEEP = 1.0
"""Seconds between looks at the clock: the kernel's timers stop while the machine is suspended."""
PIPE_SIZE = 65536
"""Bytes that a pipe holds: one read returns all deadlines, and the last one counts."""
KILL_ATTEMPTS = 50
"""Number of SIGKILLs: a process may fork while the kernel signals the group."""


class Watchdog:
    """The parent's side."""

    def __init__(self, child: Child) -> None:
        listen, self._deadlines = os.pipe()
        os.set_blocking(self._deadlines, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._deadlines)
            child.close_pipes()
            _watch(child.pid, listen)
        os.close(listen)
        self._kill_at = 0.0

    def set_deadline(self, kill_at: float) -> None:
        """Kill the command at this time of the client's clock, unless a later call sets another."""
        if kill_at != self._kill_at:
            self._kill_at = kill_at
            try:
                os.write(self._deadlines, b"%.6f\n" % kill_at)
            except OSError:
                pass  # the watchdog was killed or stopped; this process still supervises the command

    def dismiss(self) -> None:
        """End the watchdog: the command has ended, or was never started. Safe to repeat."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # also if it has ended: it is a zombie until waitpid
            os.waitpid(self._pid, 0)
            self._pid = 0


def _watch(group: int, listen: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)  # a reader of the command's output must not wait for the watchdog
        if (kill_at := _read_deadline(listen)) is None:
            os._exit(0)  # the command was never started
        from fencelock.core.clock import boottime  # imported late: most commands end before it is needed

        poll = select.poll()
        poll.register(listen, select.POLLIN)
        while True:
            if poll.poll(max(0.0, min(kill_at - boottime(), MAX_SLEEP)) * 1000):
                later = _read_deadline(listen)
                if later is None:
                    break
                kill_at = later
            elif boottime() >= kill_at:
                break  # no later deadline arrived, also not while the watchdog itself was stopped
        _kill(group)
    finally:
        os._exit(0)


def _read_deadline(listen: int) -> float | None:
    """Return the last deadline in the pipe, or None if the pipe is closed."""
    lines = os.read(listen, PIPE_SIZE).split()
    return float(lines[-1]) if lines else None


def _kill(group: int) -> None:
    import time

    try:
        for _ in range(KILL_ATTEMPTS):
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.002)
    except OSError:
        pass  # the group is empty, or this process may not signal it
