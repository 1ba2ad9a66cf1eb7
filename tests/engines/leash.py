"""Holds one server: run as a process of its own between the tests and the server, with the standard library alone.

The server must not outlive the tests, even when they are killed -9 while the server is stopped by SIGSTOP. So the leash
watches the tests' process by a pidfd; when it is gone, the leash kills the whole tree and removes the data folder. The
kernel kills the server should the leash itself be killed. (PR_SET_PDEATHSIG alone would not do: it follows the *thread*
that forked, which may end long before the tests do, and it does not reach the server's children.)
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IPC_RMID = 0


def stat(task: str) -> list[str]:
    """What /proc says of a process or of a thread: its state first, then its parent."""
    # The name in parentheses, which comes before, may itself hold spaces and parentheses.
    return Path("/proc", task, "stat").read_text(errors="replace").rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(stat(entry)[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(0), [])
        found += below
        ahead += below
    return found


def release_memory(data: Path) -> None:
    """Give back the System V segment of a killed PostgreSQL, which it would find again only in the same folder."""
    try:
        segment = int((data / "postmaster.pid").read_text().splitlines()[6].split()[1])
    except (OSError, IndexError, ValueError):
        return
    ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _become_server(order: dict[str, Any], leash: int) -> None:
    # Python ignores these two, and what is ignored stays ignored after exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if order["account"] is not None:
        uid, gid = order["account"]
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    os.chdir(order["folder"])
    # After the change of user, which would clear it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leash:
        os._exit(1)
    os.execve(order["command"][0], order["command"], order["environment"])


def _sweep() -> None:
    """Kill what the server left behind; as the subreaper we have inherited it."""
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def main() -> int:
    order = json.loads(sys.argv[1])
    report = int(order["report"])
    os.set_inheritable(report, False)
    try:
        tests_fd = os.pidfd_open(order["tests"])
    except ProcessLookupError:
        return 1
    if os.getppid() != order["tests"]:
        return 1
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    leash = os.getpid()
    server = os.fork()
    if server == 0:
        try:
            _become_server(order, leash)
        except OSError as error:
            os.write(2, f"cannot run {order['command'][0]}: {error}\n".encode())
        os._exit(127)
    server_fd = os.pidfd_open(server)
    os.write(report, f"{server}\n".encode())
    os.close(report)
    select.select([tests_fd, server_fd], [], [])
    ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        _sweep()
        if order["remove"]:
            release_memory(Path(order["folder"], "data"))
            shutil.rmtree(order["folder"], ignore_errors=True)
        return 1
    status = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
    _sweep()
    return status


if __name__ == "__main__":
    sys.exit(main())
