"""Supervise a command and its lease: forward signals, and stop the command before the lease ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NamedTuple

from fencelock.model import LossReason

if TYPE_CHECKING:
    from fencelock.cli.child import Child
    from fencelock.cli.signals import Signals
    from fencelock.cli.watchdog import Watchdog
    from fencelock.core.group import BaseGroup
    from fencelock.core.lease import BaseLease

MAX_SLEEP = 1.0
"""Seconds between looks at the clock: the kernel's timers stop while the machine is suspended, a lease does not."""
GROUP_CHECK_INTERVAL = 0.01
"""Seconds between checks for processes of a group whose leader has ended: the kernel sends no signal for them."""
GONE_GRACE = 5.0
"""Seconds that a command gets at most after the engine has dropped the lock, as another client may hold it."""
REAP_TIMEOUT = 5.0
"""Seconds to wait until killed processes are gone. A process in an uninterruptible system call stays."""


class Plan(NamedTuple):
    """When to ask a command to stop and when to kill it, as seconds left until the deadline."""

    ask: float
    kill: float


def plan(ttl: float, max_hold: float | None) -> Plan:
    """Return when to stop the command: SIGTERM with a third of the time left, SIGKILL early enough before the deadline.

    >>> plan(30, None)
    Plan(ask=10.0, kill=3.0)
    """
    ask = min(ttl, max_hold or ttl) / 3
    return Plan(ask, min(max(ttl / 10, 0.05), 5.0, ask / 2))


class Supervisor:
    """Watches the command from the main thread, until its process group or its leader has ended."""

    def __init__(
        self,
        lease: BaseLease | BaseGroup,
        child: Child,
        watchdog: Watchdog,
        signals: Signals,
        max_hold: float | None,
    ) -> None:
        self._lease = lease
        self._child = child
        self._watchdog = watchdog
        self._signals = signals
        self._now = lease._client.runtime.now
        self._plan = plan(lease.ttl, max_hold)
        self._kill_at: float | None = None
        self._update_watchdog()
        self._killed_at: float | None = None
        self.ended_by_itself = False
        """Whether the command ended before this process asked it to."""
        self.asked_to_stop = False
        """Whether SIGTERM or SIGINT was forwarded to the command."""

    def watch(self) -> bool:
        """Wait until the command has ended; return False if one of its processes could not be killed."""
        self._signals.note(signal.SIGTSTP)
        while True:
            self._child.poll()
            if self._kill_at is None and self._child.status is not None:
                self.ended_by_itself = True
                if not self._lease.is_lost():
                    return True  # its background processes may go on
            self._look_at_lease()  # before a SIGCONT is forwarded: a command without a lease must not continue
            for number in self._signals.take():
                self._forward(number)
            if self._kill_at is None:
                self._stop_with_command()
            elif self._child.status is not None and not self._child.alive:
                return True
            elif self._killed_at is not None and self._now() > self._killed_at + REAP_TIMEOUT:
                return False
            self._signals.wait(self._time_to_next_check())

    def _look_at_lease(self) -> None:
        now, deadline = self._now(), self._lease.deadline
        if self._kill_at is None:
            if self._lease.is_lost():
                if self._lease.reason is LossReason.GONE:
                    self._ask(min(deadline - self._plan.kill, now + min(self._plan.ask - self._plan.kill, GONE_GRACE)))
                else:
                    self._kill_at = now
            elif now >= deadline - self._plan.ask:
                # This is final: a later renewal cannot take back the SIGTERM.
                self._ask(deadline - self._plan.kill)
            else:
                self._update_watchdog()
        if self._kill_at is not None and now >= self._kill_at:
            self._child.send(signal.SIGKILL)  # repeatedly, as a process may fork while the kernel signals the group
            self._killed_at = self._killed_at or now

    def _update_watchdog(self) -> None:
        # The watchdog acts only if this process did not: halfway between this process's own SIGKILL and the deadline.
        self._watchdog.set_deadline(self._lease.deadline - self._plan.kill / 2)

    def _ask(self, kill_at: float) -> None:
        self._kill_at = kill_at
        self._child.send(signal.SIGTERM, signal.SIGCONT)

    def _time_to_next_check(self) -> float:
        now = self._now()
        if self._kill_at is None:
            return min(self._lease.deadline - self._plan.ask - now, MAX_SLEEP)
        if self._killed_at is not None or self._child.status is not None:
            return GROUP_CHECK_INTERVAL
        return min(self._kill_at - now, MAX_SLEEP)

    def _forward(self, number: int) -> None:
        if number != signal.SIGCHLD and self._killed_at is None:
            self.asked_to_stop = self.asked_to_stop or number in (signal.SIGTERM, signal.SIGINT)
            self._child.send(number)

    def _stop_with_command(self) -> None:
        """Stop like the command, so that the shell shows its prompt; the lease expires if that lasts too long.

        After a SIGSTOP of the command this process keeps renewing: no terminal waits for it.
        """
        child = self._child
        if child.stopped is None:
            return
        if child.wants_terminal():
            child.take_foreground(asked=True)
        elif child.stopped in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            child.send(signal.SIGSTOP)  # the whole group: no process may run while this one cannot watch
            child.give_back_foreground()
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            os.killpg(0, signal.SIGTSTP)  # also the rest of this group, such as a shell script
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # to this thread, which sleeps here until SIGCONT
            self._signals.note(signal.SIGTSTP)
            self._look_at_lease()
            if self._killed_at is not None:
                return
            child.take_foreground()
        else:
            return
        child.stopped = None
        child.send(signal.SIGCONT)
