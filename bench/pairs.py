"""An uncontended acquire and release on SQLite, beside its own statements run bare and beside the file locks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import fasteners
import filelock
import portalocker

import fencelock
from bench.harness import Goal, Run, interleaved, show
from fencelock import aio
from fencelock.backends.sqlite import queue as sql
from fencelock.backends.sqlite.database import COMMITS_PER_CHECKPOINT, Database
from fencelock.core.clock import boottime


def bare(folder: str) -> Run:
    """Return the very statements of an uncontended pair, on a database with the same settings and checkpoints."""
    database = Database(os.path.join(folder, "bare.db"), boottime)
    connection = database._enter(1)
    database._reserve(connection, 1)
    database._leave()
    commits = 0

    def run(repetitions: int) -> None:
        nonlocal commits
        execute, place, id = connection.execute, ("fencelock", "name"), "0" * 32
        for _ in range(repetitions):
            expires = int(boottime() * 1e6) + 30_000_000
            execute("BEGIN IMMEDIATE")
            execute(sql.ANYBODY, place).fetchone()
            wall = time.time_ns() // 1000
            (token,) = execute(sql.MINT, (wall, database.boot, wall)).fetchone()
            args = (*place, *place, id, False, None, 30_000_000, "host:1", None, token, expires)
            (ticket,) = execute(sql.JOIN, args).fetchone()
            execute("COMMIT")
            execute("BEGIN IMMEDIATE")
            execute(sql.LEAVE, (*place, ticket, id)).fetchone()
            execute(sql.ANYBODY, place).fetchone()
            execute("COMMIT")
            commits += 2
            if commits >= COMMITS_PER_CHECKPOINT:
                commits = 0
                execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    return run


def with_lock(make: Callable[[], object]) -> Run:
    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            with make():  # type: ignore[attr-defined]
                pass

    return run


def asyncio_pair(locks: aio.Locks, loop: asyncio.AbstractEventLoop) -> Run:
    async def pairs(repetitions: int) -> None:
        lock = locks.lock("name")
        for _ in range(repetitions):
            async with lock:
                pass

    return lambda repetitions: loop.run_until_complete(pairs(repetitions))


def main(folder: str, rounds: int) -> list[Goal]:
    loop = asyncio.new_event_loop()
    locks = fencelock.connect(f"sqlite://{folder}/blocking.db")
    alocks = aio.connect(f"sqlite://{folder}/asyncio.db")
    lock = locks.lock("name")
    file_lock = filelock.FileLock(f"{folder}/filelock")
    timings = interleaved(
        {
            "our statements, bare": bare(folder),
            "fencelock, blocking": with_lock(lambda: lock),
            "fencelock, asyncio": asyncio_pair(alocks, loop),
            "filelock (no token, no ttl)": with_lock(lambda: file_lock),
            "portalocker (no token, no ttl)": with_lock(lambda: portalocker.Lock(f"{folder}/portalocker")),
            "fasteners (no token, no ttl)": with_lock(lambda: fasteners.InterProcessLock(f"{folder}/fasteners")),
        },
        rounds,
        repetitions=400,
    )
    locks.close()
    loop.run_until_complete(alocks.close())
    loop.close()
    show("SQLite, uncontended acquire + release", timings, base="our statements, bare")
    ours = timings["fencelock, blocking"].median
    return [
        Goal("blocking pair ÷ our statements bare", ours / timings["our statements, bare"].median, 1.6),
        Goal("blocking pair ÷ filelock's", ours / timings["filelock (no token, no ttl)"].median, 1.0),
        Goal("asyncio pair ÷ blocking pair", timings["fencelock, asyncio"].median / ours, 2.0),
    ]
