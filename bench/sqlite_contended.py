"""Eight processes on one name, on SQLite, compared with a file lock."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from typing import Any

from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal

OURS = "fencelock (first come, first served)"
FILELOCK = "filelock (10 ms poll, barges)"


def fencelock_lock(folder: str) -> AbstractContextManager[Any]:
    import fencelock

    return fencelock.connect(f"sqlite:///{folder}/contended.db").lock("name")


def filelock_lock(folder: str) -> AbstractContextManager[Any]:
    import filelock

    return filelock.FileLock(f"{folder}/contended.lock", poll_interval=0.01)


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {OURS: fencelock_lock, FILELOCK: filelock_lock}
    title = f"SQLite, {PROCESSES} processes on one name, empty body"
    with tempfile.TemporaryDirectory(prefix="fencelock-bench-") as folder:
        outcomes = compare(title, contestants, folder, rounds=rounds)
    ours = outcomes[OURS]
    ratio = ours.over(outcomes[FILELOCK])
    return [
        Goal("SQLite contended: grants per second ÷ filelock's", ratio, 0.4, at_most=False),
        Goal("SQLite contended: the most uneven process, % of the mean", ours.uneven * 100, 10),
        Goal("SQLite contended: wait p99, ms", ours.p99, 10),
    ]
