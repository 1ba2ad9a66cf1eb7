"""One server process with everything below it: started with a lifeline, paused, resumed, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.servers.lifeline import descendants, stat
from tests.servers.listeners import listeners

LIFELINE = Path(__file__).with_name("lifeline.py")


@dataclass(frozen=True, slots=True)
class Account:
    """A user to run as, for an engine that refuses to run as root."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Order:
    """What the lifeline process starts."""

    command: tuple[str, ...]
    folder: Path
    log: Path
    environment: Mapping[str, str]
    account: Account | None
    stop_signal: signal.Signals
    keep: bool


class Running:
    """A server that was started. Every signal goes through a pidfd, so that it cannot reach another process."""

    def __init__(self, order: Order) -> None:
        self._stop_signal = order.stop_signal
        self._owner = os.getpid()
        report, report_in_lifeline = os.pipe()
        arguments = [
            *(str(os.getpid()), str(report_in_lifeline), "keep" if order.keep else "remove", str(order.folder)),
            f"{order.account.uid}:{order.account.gid}" if order.account is not None else "",
            *(f"{name}={value}" for name, value in order.environment.items()),
            *("--", *order.command),
        ]
        try:
            with order.log.open("ab") as log:
                self._lifeline = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(LIFELINE), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(report_in_lifeline,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(report_in_lifeline)
        with open(report) as answer:
            line = answer.readline()
        if not line:
            self._lifeline.wait()
            raise RuntimeError(f"the lifeline process ended before it could start {order.command[0]}")
        self.pid = int(line)
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._fd = -1

    @property
    def is_alive(self) -> bool:
        """Whether the server's process exists, running or paused."""
        return self._mine() and self._lifeline.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status of the server, or 128 plus the number of the signal that killed it."""
        return self._lifeline.poll()

    def listens_on(self, ports: Collection[int]) -> bool:
        """Return whether this server, and no other process, listens on all these ports."""
        known = {f"socket:[{inode}]": port for inode, port in listeners().items()}
        folder = f"/proc/{self.pid}/fd"
        mine = {known.get(_target(f"{folder}/{entry}")) for entry in os.listdir(folder)}
        return mine.issuperset(ports)

    def pause(self, limit: float = 5.0) -> None:
        """SIGSTOP the whole tree, and return when every thread of it is stopped."""
        until = time.monotonic() + limit
        while True:
            # Parents first: a stopped parent starts no more children, so the loop ends.
            tree = [self.pid, *descendants(self.pid)]
            moving = [pid for pid in tree if not _stands_still(pid)]
            if not moving:
                return
            if time.monotonic() > until:
                raise TimeoutError(f"processes {moving} did not stop")
            for pid in moving:
                self._signal(pid, signal.SIGSTOP)
            time.sleep(0.001)

    def resume(self) -> None:
        """SIGCONT the whole tree, children first, so that a parent finds them running."""
        for pid in reversed([self.pid, *descendants(self.pid)]):
            self._signal(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the server; its lifeline process kills the server's children."""
        self._signal(self.pid, signal.SIGKILL)
        self._wait(10.0)

    def stop(self, limit: float) -> None:
        """Send SIGTERM or the server's own stop signal; kill the server if it does not end in time."""
        self.resume()
        self._signal(self.pid, self._stop_signal)
        try:
            self._wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()

    def _mine(self) -> bool:
        # A child that a test forked has a copy of this object, and must not end its parent's servers.
        return self._owner == os.getpid()

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if not self._mine() or self._fd < 0:
            return
        try:
            if pid == self.pid:
                signal.pidfd_send_signal(self._fd, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            pass

    def _wait(self, limit: float) -> None:
        if self._mine():
            self._lifeline.wait(limit)
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def _stands_still(pid: int) -> bool:
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            if stat(f"{pid}/task/{task}")[0] not in "TtZX":
                return False
    except (FileNotFoundError, ProcessLookupError):
        return not os.path.exists(f"/proc/{pid}")
    return True
