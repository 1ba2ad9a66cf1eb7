"""Waiting for something to become true, and looking at processes, for tests of the engines."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.servers.lifeline import stat


def eventually(question: Callable[[], bool], limit: float = 30.0) -> bool:
    """Whether the answer becomes yes within the limit."""
    until = time.monotonic() + limit
    while not question():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def state(pid: int) -> str:
    """A process's state as one letter, `X` when there is no such process."""
    try:
        return stat(str(pid))[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_running(pid: int) -> bool:
    """Whether a process is there; one that only waits to be reaped is not."""
    return state(pid) not in "XZ"


def parent(pid: int) -> int:
    """The process id of a process's parent."""
    return int(stat(str(pid))[1])
