"""Ends one server with the tests: a process between the tests and the server, with the standard library only.

The server must not outlive the tests, even when they are killed -9 while the server is stopped by SIGSTOP. So this process
watches the tests' process by a pidfd; when it is gone, it kills the whole tree and removes the data folder. The
kernel kills the server should this process itself be killed. (PR_SET_PDEATHSIG alone would not do: it follows the *thread*
that forked, which may end long before the tests do, and it does not reach the server's children.)

All tests start a thousand of these, so nothing is imported that takes longer than a bare interpreter does: no json, no
pathlib, no signal.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import time

SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IPC_RMID = 0


def stat(task: str) -> list[str]:
    """Return the fields of /proc/…/stat of a process or a thread, from its state on; then comes its parent."""
    with open(f"/proc/{task}/stat", errors="replace") as file:
        # The name in parentheses before them may itself contain spaces and parentheses.
        return file.read().rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, parents before their children."""
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


def release_memory(data: str | os.PathLike[str]) -> None:
    """Free the System V segment of a killed PostgreSQL; another server would find it only in the same folder."""
    try:
        with open(os.path.join(data, "postmaster.pid")) as file:
            segment = int(file.read().splitlines()[6].split()[1])
    except (OSError, IndexError, ValueError):
        return
    ctypes.CDLL(None).shmctl(segment, IPC_RMID, None)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _become_server(folder: str, account: str, environment: list[str], command: list[str], lifeline: int) -> None:
    # Python ignores these two signals, and ignored signals stay ignored after exec.
    for number in (SIGPIPE, SIGXFSZ):
        ctypes.CDLL(None).signal(number, None)
    if account:
        uid, gid = account.split(":")
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    os.chdir(folder)
    # After the change of user, which clears this setting.
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != lifeline:
        os._exit(1)
    os.execve(command[0], command, dict(setting.split("=", 1) for setting in environment))


def _sweep() -> None:
    """Kill the processes that the server left; this process is their subreaper, so it has inherited them."""
    while True:
        # Check for children first: most servers leave none, and finding them reads the data of every process of the machine.
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.002)


def main(tests: int, report: int, remove: bool, folder: str, account: str, arguments: list[str]) -> int:
    split = arguments.index("--")
    environment, command = arguments[:split], arguments[split + 1 :]
    os.set_inheritable(report, False)
    try:
        tests_fd = os.pidfd_open(tests)
    except ProcessLookupError:
        return 1
    if os.getppid() != tests:
        return 1
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    lifeline = os.getpid()
    server = os.fork()
    if server == 0:
        try:
            _become_server(folder, account, environment, command, lifeline)
        except OSError as error:
            os.write(2, f"cannot run {command[0]}: {error}\n".encode())
        os._exit(127)
    server_fd = os.pidfd_open(server)
    os.write(report, f"{server}\n".encode())
    os.close(report)
    select.select([tests_fd, server_fd], [], [])
    ended = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        _sweep()
        if remove:
            import shutil

            release_memory(os.path.join(folder, "data"))
            shutil.rmtree(folder, ignore_errors=True)
        return 1
    status = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
    _sweep()
    return status


if __name__ == "__main__":
    _, tests, report, remove, folder, account, *arguments = sys.argv
    sys.exit(main(int(tests), int(report), remove == "remove", folder, account, arguments))
