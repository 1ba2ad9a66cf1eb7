"""The command's process: forked before this process has any thread or connection, started once the lock is held.

A fork copies held mutexes and shares open sockets, so the fork happens first. While fencelock waits for the lock, the
child prepares itself: it creates its own process group and asks the kernel to kill it when its parent dies.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from fencelock.cli.codes import BUG, NOT_EXECUTABLE, NOT_FOUND, SIGNALLED

PR_SET_PDEATHSIG = 1


class Child:
    """A process group with the command as its leader."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.started = False
        self.status: int | None = None
        """The exit code of the leader as a shell reports it; None while the leader runs."""
        self.stopped: int | None = None
        """The signal that stopped the leader; None while the leader runs."""
        ready, self._go = os.pipe()
        self._failed, failed = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            _stub(command, parent, ready, failed)
        os.close(ready)
        os.close(failed)
        with suppress(OSError):  # the child did it itself and has already ended
            os.setpgid(self.pid, self.pid)
        self._terminal = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
        self._foreground = False

    def start(self, environment: dict[str, str], *, foreground: bool) -> None:
        """Start the command, with these additions to its environment. `foreground`: at a terminal, the keyboard is its."""
        self.started = True
        self._foreground = foreground and os.isatty(0) and os.isatty(1)
        self.take_foreground()
        message = "\0".join(f"{key}={value}" for key, value in environment.items())
        with suppress(BrokenPipeError):  # another process killed it; poll() reads its status
            os.write(self._go, os.fsencode(message))
        os.close(self._go)

    def close_pipes(self) -> None:
        """Close this process's ends of the pipes. The watchdog calls it, so that the child sees its parent's end."""
        os.close(self._go)
        os.close(self._failed)

    def dismiss(self) -> None:
        """Kill the process if the command was never started."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def poll(self) -> None:
        """Update `status` and `stopped` from the kernel."""
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                return
            self.stopped = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else None
            if os.WIFSIGNALED(status):
                self.status = SIGNALLED + os.WTERMSIG(status)
            elif os.WIFEXITED(status):
                self.status = os.WEXITSTATUS(status)

    def send(self, *numbers: int) -> bool:
        """Send signals to the whole group; return whether the group still has a process."""
        try:
            for number in numbers:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it changed its user: it lives, and this process may not signal it
        return True

    @property
    def alive(self) -> bool:
        """Whether the group still has a living process: the leader, or one that it started."""
        return self.send(0) and _any_living(self.pid)

    def failure(self) -> tuple[int, str] | None:
        """Return the exit code and a message if the command could not be started. Call it after the child has ended."""
        code = os.read(self._failed, 16)
        if not code:
            return None
        number, command = int(code), self.command[0]
        if number in (errno.ENOENT, errno.ENOTDIR):
            advice = "is it installed, and on $PATH? (a script: is its #! line right?)"
            if "--" not in sys.argv:
                advice += "; after several names, put -- before the command"
            if " " in command.strip() and len(self.command) == 1:
                advice = f"did you mean `-- {command}`, without quotes? For a line of shell: -- sh -c {command!r}"
            return NOT_FOUND, f"{command!r} was not found; {advice}"
        if number == errno.ENOEXEC:
            return NOT_EXECUTABLE, f"{command!r} is not a program; a script needs a #! line, as no shell is involved"
        if number == errno.EACCES and "/" in command and os.path.isdir(command):
            return NOT_EXECUTABLE, f"{command!r} is a folder, not a program"
        if number == errno.EACCES:
            return NOT_EXECUTABLE, f"{command!r} is not executable; try chmod +x"
        return NOT_EXECUTABLE, f"{command!r} could not be started: {os.strerror(number)}"

    # ------------------------------------------------------------------ the terminal

    def take_foreground(self, *, asked: bool = False) -> None:
        """Make the command the foreground process group of the terminal, if this process is in the foreground.

        In a pipeline other processes may read the keyboard, so this happens only when the command asks for it (`asked`).
        """
        if asked or self._foreground:
            self._move_foreground(os.getpgrp(), self.pid)

    def give_back_foreground(self) -> None:
        """Make this process's group the foreground group again, if the command is it."""
        self._move_foreground(self.pid, os.getpgrp())

    def wants_terminal(self) -> bool:
        """Return whether the leader is stopped because it needs the terminal, and this process can give it."""
        return self.stopped in (signal.SIGTTIN, signal.SIGTTOU) and self._foreground_group() == os.getpgrp()

    def _foreground_group(self) -> int | None:
        try:
            return None if self._terminal is None else os.tcgetpgrp(self._terminal)
        except OSError:
            return None  # the terminal is gone

    def _move_foreground(self, before: int, after: int) -> None:
        if self._terminal is not None and self._foreground_group() == before:
            with suppress(OSError):
                os.tcsetpgrp(self._terminal, after)


def _any_living(group: int) -> bool:
    """Return whether a group has a process that is not a zombie. killpg also finds zombies that process 1 has not reaped."""
    try:
        pids = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return True  # without /proc only the result of killpg is known
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, _, pgrp = file.read().rpartition(b") ")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if int(pgrp) == group and state not in (b"Z", b"X"):
            return True
    return False


def _stub(command: list[str], parent: int, ready: int, failed: int) -> NoReturn:
    """Run in the child: wait for the environment, then exec the command. No Python exception may leave this function."""
    code = BUG
    try:
        os.setpgid(0, 0)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Python ignores these two signals, and exec keeps ignored signals ignored.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _die_with(parent)
        message = b""
        while part := os.read(ready, 65536):
            message += part
        if message:
            environment = dict(os.environb)
            for line in message.split(b"\0"):
                key, _, value = line.partition(b"=")
                environment[key] = value
            os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(failed, str(error.errno or 0).encode())
        code = NOT_FOUND
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, for whatever cause."""
    if sys.platform == "linux":
        try:
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        except (ImportError, OSError, AttributeError):
            pass  # a Python without ctypes
    if os.getppid() != parent:
        os._exit(BUG)
