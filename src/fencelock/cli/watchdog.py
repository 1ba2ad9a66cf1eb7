"""The warden: a small process that kills the command when `fencelock run` itself cannot.

The kernel kills a child with its parent, but not the child's own children; and nobody acts for a fencelock that is stopped.
The warden hears the deadlines through a pipe. When that is closed without a word, or a deadline passes without a later
one, it kills the command's process group.
"""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fencelock.cli.child import Child

LONGEST_SLEEP = 1.0
"""The kernel's timers stand still while the machine is suspended."""
PIPE_SIZE = 65536
"""All that a pipe holds: the last deadline is what counts, however long nobody listened."""
KILL_ATTEMPTS = 50
"""How often to strike: a process may fork while the signal goes round. The last of them may be spent on corpses."""


class Watchdog:
    """The parent's side."""

    def __init__(self, child: Child) -> None:
        listen, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._tell)
            child.let_go()
            _watch(child.pid, listen)
        os.close(listen)
        self._told = 0.0

    def tell(self, kill_at: float) -> None:
        """Have the command killed at that time on the client's clock, unless another is told before."""
        if kill_at != self._told:
            self._told = kill_at
            try:
                os.write(self._tell, b"%.6f\n" % kill_at)
            except OSError:
                pass  # somebody killed the warden, or stopped it: we are still here

    def dismiss(self) -> None:
        """The command has ended, or was never started. Calling again is harmless."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # if it is dead, its corpse is still ours to bury
            os.waitpid(self._pid, 0)
            self._pid = 0


def _watch(group: int, listen: int) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)  # whoever reads what the command writes waits for its end, not for ours
        if (kill_at := _hear(listen)) is None:
            os._exit(0)  # the command was never started
        from fencelock.core.clock import boottime  # not before it is needed: most commands are done by then

        while True:
            if _readable(listen, kill_at - boottime()):
                later = _hear(listen)
                if later is None:
                    break
                kill_at = later
            elif boottime() >= kill_at:
                break  # nor has a later deadline come while it was us who were stopped
        _kill(group)
    finally:
        os._exit(0)


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, min(timeout, LONGEST_SLEEP)) * 1000))


def _hear(listen: int) -> float | None:
    """Return the last of the deadlines that were told, or None if there will be no more."""
    lines = os.read(listen, PIPE_SIZE).split()
    return float(lines[-1]) if lines else None


def _kill(group: int) -> None:
    import time

    try:
        for _ in range(KILL_ATTEMPTS):
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.002)
    except OSError:
        pass  # nobody is left, or it is out of our reach
