"""Real processes: every `fencelock` here is one, in a session of its own that is gone when the test ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fencelock
from tests.support.waiting import LONG, eventually_blocking

FENCELOCK = (sys.executable, "-m", "fencelock")
KEPT = "9"
"""A ttl that such a machine keeps: a command is asked to end when a lease was not renewed for two thirds of it."""
UNTIL_TOLD = "touch held; while [ -e held ]; do sleep 0.05; done"
"""A command that ends when the test removes that file."""


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def session_members(session: int) -> list[int]:
    """Return the processes of a session that are not dead."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                # Asked of the kernel: to read of each process of the machine what /proc says takes a hundred times as long.
                is_member = os.getsid(int(entry)) == session
            except OSError:
                continue
            if is_member and state(int(entry)) not in "ZX":
                members.append(int(entry))
    return members


def state(pid: int) -> str:
    """Return the state letter of a process, Z for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


class Cli:
    """Starts `fencelock` on a database of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "locks.db"
        self.env = {**os.environ, "FENCELOCK_URL": f"sqlite:///{self.database}", "COLUMNS": "80"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start it in a session of its own."""
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [*FENCELOCK, *arguments], env=self.env, cwd=self.folder, text=True, start_new_session=True, **options
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=LONG)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def json(self, *arguments: str) -> Any:
        result = self(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def waiters(self, name: str) -> Sequence[object]:
        """Return who waits, without a process of its own for each look."""
        with fencelock.connect(self.env["FENCELOCK_URL"]) as locks:
            return locks.inspect(name).waiters

    def deadline(self, name: str) -> float:
        """Return when the engine will give the lock to somebody else, as things stand."""
        with closing(sqlite3.connect(self.database)) as database:
            found = database.execute("SELECT expires FROM claim WHERE name = ?", (name,)).fetchone()
        return float(found[0]) / 1e6

    def renewed(self, name: str) -> None:
        """Wait until the holder has renewed its lease twice: once might have been under way."""
        for _ in range(2):
            before = self.deadline(name)
            eventually_blocking(lambda: self.deadline(name) > before)  # noqa: B023

    def file(self, name: str) -> Path:
        return self.folder / name

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def hold(self, name: str, *options: str, command: str = "touch held; exec sleep 300") -> subprocess.Popen[str]:
        """Start a command that holds a lock, and wait until it does."""
        self.file("held").unlink(missing_ok=True)
        process = self.start("run", name, *options, "--", "sh", "-c", command)
        eventually_blocking(lambda: self.file("held").exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        return process

    def close(self) -> None:
        for process in self.started:
            for pid in session_members(process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.communicate()


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    cli = Cli(tmp_path)
    yield cli
    cli.close()
