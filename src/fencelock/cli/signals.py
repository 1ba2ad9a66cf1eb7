"""Signals as events: they are noted, never raised, and whoever waits is woken.

An exception out of a signal handler may strike between any two instructions, also between taking a mutex and noting
that it was taken. Here a signal is a byte in a pipe, and is looked at where it can do no harm.
"""

from __future__ import annotations

import os
import select
import signal
import time

GIVING_UP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""They end `fencelock run` while it waits, and are passed on to the command once that runs."""
PASSED_ON = (*GIVING_UP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)
"""The rest of them mean nothing before the command runs."""
ONE_SIGNAL = 0.25
"""Signals so close together count as one, as `timeout` sends its own to the process and to the group that it is in."""
POKE = b"\0"


class Signals:
    """Notes the signals that come, in order."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._taken: list[int] = []
        for number in PASSED_ON:
            self.note(number)
        signal.signal(signal.SIGCHLD, _noted)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # taking the terminal back must not stop us
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def note(self, number: int) -> None:
        """Note this signal from now on, unless it was ignored when we were started (nohup, a background job)."""
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _noted)

    def let_go(self) -> None:
        """Let a second signal end the process as if nobody had noted anything."""
        first = time.monotonic()

        def again(number: int, _: object) -> None:
            if time.monotonic() - first > ONE_SIGNAL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in GIVING_UP:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, again)

    def poke(self) -> None:
        """Wake whoever waits, from any thread."""
        try:
            os.write(self._write, POKE)
        except BlockingIOError:
            pass  # full: it is awake

    def wait(self, timeout: float) -> None:
        """Wait for a signal or a poke, for so long at most."""
        self._poll.poll(max(0.0, timeout) * 1000)

    def take(self) -> list[int]:
        """Return the signals that came since the last call, in order."""
        self._note()
        taken, self._taken = self._taken, []
        return taken

    def giving_up(self) -> int | None:
        """Return the first signal that asks us to end, if one came; it stays noted."""
        self._note()
        return next((number for number in self._taken if number in GIVING_UP), None)

    def _note(self) -> None:
        try:
            while came := os.read(self.fd, 512):
                self._taken += filter(None, came)
        except BlockingIOError:
            pass


def _noted(number: int, frame: object) -> None:
    """Do nothing: the byte in the pipe is what counts."""
