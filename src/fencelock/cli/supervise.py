"""Watch over a command and its lease: pass signals on, and have the command dead before the lease ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NamedTuple

from fencelock.model import LossReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencelock.cli.child import Child
    from fencelock.cli.signals import Signals
    from fencelock.cli.watchdog import Watchdog
    from fencelock.core.lease import BaseLease

LONGEST_SLEEP = 1.0
"""The kernel's timers stand still while the machine is suspended, a lease does not: look at the clock now and then."""
LOOK_AGAIN = 0.01
"""How often to look for the rest of a group whose leader is gone: nobody tells us of their end."""
GONE_GRACE = 5.0
"""What a command gets at most when the engine has already dropped the lock and somebody else may hold it."""
REAP_TIMEOUT = 5.0
"""How long to wait for killed processes to be gone. The kernel may keep one that hangs in a system call."""


class Plan(NamedTuple):
    """When to ask a command to stop and when to kill it, as seconds left until the deadline."""

    ask: float
    kill: float


def plan(ttl: float, max_hold: float | None) -> Plan:
    """Return when to stop the command: asked with a third of the time left, killed early enough to be gone in time.

    >>> plan(30, None)
    Plan(ask=10.0, kill=3.0)
    """
    ask = min(ttl, max_hold or ttl) / 3
    return Plan(ask, min(max(ttl / 10, 0.05), 5.0, ask / 2))


class Supervisor:
    """Runs in the main thread, from the start of the command to the end of its process group or of its leader."""

    def __init__(
        self,
        lease: BaseLease,
        child: Child,
        watchdog: Watchdog,
        signals: Signals,
        now: Callable[[], float],
        max_hold: float | None,
    ) -> None:
        self._lease = lease
        self._child = child
        self._warden = watchdog
        self._signals = signals
        self._now = now
        self._plan = plan(lease.ttl, max_hold)
        self._kill_at: float | None = None
        self._tell_warden()
        self._killed_at: float | None = None
        self.ended_by_itself = False
        """Whether the command ended before anybody asked it to."""

    def watch(self) -> bool:
        """Return when the command has ended: True, or False if something of it could not be killed."""
        self._signals.note(signal.SIGTSTP)
        while True:
            self._child.look()
            if self._kill_at is None and self._child.status is not None:
                self.ended_by_itself = True
                if not self._lease.is_lost():
                    return True  # what it left in the background is its own business
            self._look_at_lease()  # before a SIGCONT is passed on: what outlived its lease must not wake up
            for number in self._signals.take():
                self._pass_on(number)
            if self._kill_at is None:
                self._stop_too()
            elif self._child.status is not None and not self._child.alive:
                return True
            elif self._killed_at is not None and self._now() > self._killed_at + REAP_TIMEOUT:
                return False
            self._signals.wait(self._nap())

    def _look_at_lease(self) -> None:
        now, deadline = self._now(), self._lease.deadline
        if self._kill_at is None:
            if self._lease.is_lost():
                if self._lease.reason is LossReason.GONE:
                    self._ask(min(deadline - self._plan.kill, now + min(self._plan.ask - self._plan.kill, GONE_GRACE)))
                else:
                    self._kill_at = now
            elif now >= deadline - self._plan.ask:
                # From here on there is no way back: a renewal that succeeds after all does not untell the command.
                self._ask(deadline - self._plan.kill)
            else:
                self._tell_warden()
        if self._kill_at is not None and now >= self._kill_at:
            self._child.send(signal.SIGKILL)  # again and again, as a process may fork while the signal goes round
            self._killed_at = self._killed_at or now

    def _tell_warden(self) -> None:
        # It strikes only where we should have: halfway between our own last blow and the deadline.
        self._warden.tell(self._lease.deadline - self._plan.kill / 2)

    def _ask(self, kill_at: float) -> None:
        self._kill_at = kill_at
        self._child.send(signal.SIGTERM, signal.SIGCONT)

    def _nap(self) -> float:
        now = self._now()
        if self._kill_at is None:
            return min(self._lease.deadline - self._plan.ask - now, LONGEST_SLEEP)
        if self._killed_at is not None or self._child.status is not None:
            return LOOK_AGAIN
        return min(self._kill_at - now, LONGEST_SLEEP)

    def _pass_on(self, number: int) -> None:
        if number != signal.SIGCHLD and self._killed_at is None:
            self._child.send(number)

    def _stop_too(self) -> None:
        """Stop as the command did, so that the shell gets its prompt back; the lease runs out if that lasts too long.

        A command that somebody stopped with SIGSTOP stays under its lock: nobody waits at a terminal for that.
        """
        child = self._child
        if child.stopped is None:
            return
        if child.wants_terminal():
            child.take_foreground(asked=True)
        elif child.stopped in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            child.send(signal.SIGSTOP)  # all of it: nothing may go on while we cannot watch
            child.give_back_foreground()
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            os.killpg(0, signal.SIGTSTP)  # whoever shares our group, as the shell script that started us does
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # to this very thread, which therefore sleeps here until SIGCONT comes
            self._signals.note(signal.SIGTSTP)
            self._look_at_lease()
            if self._killed_at is not None:
                return
            child.take_foreground()
        else:
            return
        child.stopped = None
        child.send(signal.SIGCONT)
