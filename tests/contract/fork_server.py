"""A fork server: one process has imported all that workers need, and forks a worker for each request.

A worker has one thread and no open clients, and ends as every interpreter does. A new interpreter would spend most of a
test's time with imports.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from fencelock import engines, runtime

MESSAGE = 2**17
DRIVERS = (
    "redis.asyncio",
    "kazoo.client",
    "psycopg",
    "h2.connection",
    "cryptography.hazmat.primitives.asymmetric.padding",
)
"""Modules that engines import only when they connect."""


class Process:
    """A forked process; the test communicates with it over `reader` and `writer`, its stdout and stdin."""

    def __init__(self, pid: int, pipe: tuple[Any, Any], status_pipe: tuple[Any, Any]) -> None:
        self.pid = pid
        self.reader: asyncio.StreamReader = pipe[0]
        self.writer: asyncio.StreamWriter = pipe[1]
        self._status_reader: asyncio.StreamReader = status_pipe[0]
        self._end: asyncio.StreamWriter = status_pipe[1]
        self._status: int | None = None
        self._turn = asyncio.Lock()
        try:
            self._fd = os.pidfd_open(pid)  # a signal never reaches another process that reuses the pid
        except ProcessLookupError:
            self._fd = -1

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        """Fork a process with these arguments in `sys.argv`, and with our environment, working directory and stderr."""
        pipe, its_pipe = socket.socketpair()
        status_pipe, its_status_pipe = socket.socketpair()
        with its_pipe, its_status_pipe:
            request = {"argv": arguments, "environ": dict(os.environ), "folder": os.getcwd()}
            socket.send_fds(
                _fork_server(), [json.dumps(request).encode()], [its_pipe.fileno(), its_status_pipe.fileno(), 2]
            )
        ends = await asyncio.open_connection(sock=status_pipe)
        pid = int(await ends[0].readline())
        return cls(pid, await asyncio.open_connection(sock=pipe, limit=2**24), ends)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._fd >= 0:
            try:
                signal.pidfd_send_signal(self._fd, number)
            except ProcessLookupError:
                pass

    async def wait(self) -> int:
        """Wait for its end; return the exit status, negative for the signal that killed it."""
        async with self._turn:
            if self._status is None:
                self._status = int(await self._status_reader.readline())
            return self._status

    async def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.send_signal(signal.SIGKILL)
        await self.wait()
        for writer in (self.writer, self._end):
            writer.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@cache
def _fork_server() -> socket.socket:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-m", "tests.contract.worker", str(its.fileno())], pass_fds=(its.fileno(),)
        )

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


# ---------------------------------------------------------------------------- in the fork server


def serve(fd: int) -> list[str]:
    """Fork for each request; return in the children only, with their arguments. Exit when the tests have ended."""
    parts = (walk_packages(package.__path__, f"{package.__name__}.") for package in (engines, runtime))
    for name in (*DRIVERS, *(module.name for modules in parts for module in modules)):
        import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=fd)
    children: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([fd, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(children)
        if fd in ready:
            message, fds, _, _ = socket.recv_fds(control, MESSAGE, 3)
            if not message:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                sys.exit()
            pipe, status_pipe, err = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                control.close()
                for target, source in ((0, pipe), (1, pipe), (2, err)):
                    os.dup2(source, target)
                for spare in (woken, wake, *fds, *children.values()):
                    os.close(spare)
                return _become(json.loads(message))
            children[pid] = status_pipe
            os.write(status_pipe, f"{pid}\n".encode())
            os.close(pipe)
            os.close(err)


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        status_pipe = children.pop(pid)
        try:
            os.write(status_pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        except OSError:
            pass  # the test has ended
        os.close(status_pipe)


def _become(request: dict[str, Any]) -> list[str]:
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    return list(request["argv"])
