"""Signals as events: a signal is recorded in a pipe and wakes the main thread; it never raises an exception.

An exception from a signal handler may occur between any two instructions, also between taking a mutex and recording
that it was taken. Here the main thread reads the signals from the pipe, at points where that is safe.
"""

from __future__ import annotations

import os
import select
import signal
import time

TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""These end `fencelock run` while it waits for the lock, and are forwarded to the command once it runs."""
FORWARDED = (*TERMINATING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT)
"""The other signals have no effect before the command runs."""
ONE_SIGNAL = 0.25
"""Signals within this many seconds count as one: `timeout` signals the process and also its group."""
WAKE = b"\0"
_JOB_CONTROL = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTOU)


class Signals:
    """Records the signals that arrive, in order."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._taken: list[int] = []
        self._before = {number: signal.getsignal(number) for number in (*FORWARDED, *_JOB_CONTROL)}
        for number in FORWARDED:
            self.note(number)
        signal.signal(signal.SIGCHLD, _noted)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # tcsetpgrp from the background must not stop this process
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def note(self, number: int) -> None:
        """Record this signal from now on, unless it was ignored at the start (nohup, a background job)."""
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _noted)

    def end_on_next_signal(self) -> None:
        """Let the next signal end the process with the default action."""
        first = time.monotonic()

        def again(number: int, _: object) -> None:
            if time.monotonic() - first > ONE_SIGNAL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        for number in TERMINATING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, again)

    def restore(self) -> bool:
        """Restore what signals did when this process was started; return whether a terminating one arrived before that."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return self.terminating_signal() is not None

    def wake(self) -> None:
        """Wake the thread that waits; callable from any thread."""
        try:
            os.write(self._write, WAKE)
        except BlockingIOError:
            pass  # the pipe is full, so the waiting thread is awake

    def wait(self, timeout: float) -> None:
        """Wait for a signal or a wake(), at most `timeout` seconds."""
        self._poll.poll(max(0.0, timeout) * 1000)

    def take(self) -> list[int]:
        """Return the signals that arrived since the last call, in order."""
        self._note()
        taken, self._taken = self._taken, []
        return taken

    def terminating_signal(self) -> int | None:
        """Return the first terminating signal, or None; it stays recorded."""
        self._note()
        return next((number for number in self._taken if number in TERMINATING), None)

    def _note(self) -> None:
        try:
            while came := os.read(self.fd, 512):
                self._taken += filter(None, came)
        except BlockingIOError:
            pass


def _noted(number: int, frame: object) -> None:
    """Do nothing: the signal is the byte that set_wakeup_fd writes."""
