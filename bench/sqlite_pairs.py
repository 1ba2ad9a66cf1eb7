"""An uncontended acquire and release on SQLite, compared with fencelock's bare statements and with file locks."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time

import fasteners
import filelock
import portalocker

import fencelock
from bench.harness import Goal, Run, Timing, interleaved, show, with_async_lock, with_lock, with_new_lock
from fencelock import aio
from fencelock.core.clock import boottime
from fencelock.engines.sqlite import queue as sql
from fencelock.engines.sqlite.database import COMMITS_PER_CHECKPOINT, Database


def bare(folder: str) -> Run:
    """Return a run of the statements of an uncontended pair, on a database with the same settings and checkpoints."""
    database = Database(os.path.join(folder, "bare.db"), boottime)
    database.write(1, database.mint)  # opens the connection and reserves tokens
    connection = database._connection
    assert connection is not None
    commits = 0

    def run(repetitions: int) -> None:
        nonlocal commits
        execute, namespace_and_name, id = connection.cursor().execute, ("fencelock", "name"), "0" * 32
        for _ in range(repetitions):
            now = int(boottime() * 1e6)
            execute("BEGIN IMMEDIATE")
            execute(sql.ANY_CLAIM, namespace_and_name).fetchone()
            last, _, _ = execute("SELECT token, reserved, boot FROM counter").fetchone()
            token = max(last + 1, time.time_ns() // 1000)
            execute("UPDATE counter SET token = ?", (token,))
            args = (*namespace_and_name, 1, id, False, None, 30_000_000, "host:1", "", None, token, now + 30_000_000)
            execute(sql.INSERT, args)
            execute("COMMIT")
            execute("BEGIN IMMEDIATE")
            execute(sql.RELEASE, (*namespace_and_name, 1, id, now))
            execute(sql.QUEUE, namespace_and_name).fetchone()
            execute("COMMIT")
            commits += 2
            if commits >= COMMITS_PER_CHECKPOINT:
                commits = 0
                execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    return run


def main(rounds: int) -> list[Goal]:
    with tempfile.TemporaryDirectory(prefix="fencelock-bench-") as folder:
        timings = measure(folder, rounds)
    show("SQLite, uncontended acquire + release", timings, base="our statements, bare")
    ours = timings["fencelock, blocking"]
    return [
        Goal("SQLite: blocking pair ÷ our statements bare", ours.over(timings["our statements, bare"]), 1.6),
        Goal("SQLite: blocking pair ÷ filelock's", ours.over(timings["filelock (no token, no ttl)"]), 1.0),
        Goal("SQLite: asyncio pair ÷ blocking pair", timings["fencelock, asyncio"].over(ours), 2.0),
    ]


def measure(folder: str, rounds: int) -> dict[str, Timing]:
    loop = asyncio.new_event_loop()
    locks = fencelock.connect(f"sqlite:///{folder}/blocking.db")
    alocks = aio.connect(f"sqlite:///{folder}/asyncio.db")
    lock = locks.lock("name")
    file_lock = filelock.FileLock(f"{folder}/filelock")
    timings = interleaved(
        {
            "our statements, bare": bare(folder),
            "fencelock, blocking": with_lock(lock),
            "fencelock, asyncio": with_async_lock(alocks.lock("name"), loop),
            "filelock (no token, no ttl)": with_lock(file_lock),
            "portalocker (no token, no ttl)": with_new_lock(lambda: portalocker.Lock(f"{folder}/portalocker")),
            "fasteners (no token, no ttl)": with_new_lock(lambda: fasteners.InterProcessLock(f"{folder}/fasteners")),
        },
        rounds,
        repetitions=400,
    )
    locks.close()
    loop.run_until_complete(alocks.close())
    loop.close()
    return timings
