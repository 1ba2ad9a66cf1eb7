"""The story of fencelock in half a minute, with real processes: a lock fails, and the fence keeps the data right.

Three workers add one to a shared record, each under the lock, again and again. One of them is stopped (SIGSTOP) between
its read and its write for longer than its lease lasts, and then goes on. Once without the fence, once with it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import fencelock
from fencelock.fences.sql import SqlFence

WORKERS = ("alice", "bob", "carol")
VICTIM = "bob"
TTL = 1.0
ROUNDS = 4
STOPPED_FOR = 2.5 * TTL

COLOURS = {"alice": 36, "bob": 35, "carol": 34, "director": 33}
WIDTH = 25


# ---------------------------------------------------------------------- a worker, in a process of its own


def work(name: str, folder: str, fenced: bool) -> None:
    """Add one to the record ROUNDS times; tell the director about every step."""
    database = sqlite3.connect(f"{folder}/application.db", timeout=10, isolation_level=None)
    with fencelock.connect(f"sqlite://{folder}/locks.db", ttl=TTL, owner=name) as locks:
        done = 0
        while done < ROUNDS:
            try:
                with locks.lock("record") as lease:
                    done += add_one(database, lease, fenced)
            except fencelock.LeaseLost:
                tell("lost", "learns: lease lost")
            time.sleep(0.05)


def add_one(database: sqlite3.Connection, lease: fencelock.Lease, fenced: bool) -> bool:
    """Read, think, write, as applications do. With the fence, the check comes before the first read."""
    tell("holds", f"holds, token {short(lease.token)}")
    try:
        with transaction(database):
            if fenced:
                SqlFence().check(database, "record", lease)
            value = database.execute("SELECT value FROM record").fetchone()[0]
        tell("read", f"reads {value}", value=value)
        time.sleep(0.25)  # the thinking, in which anything may happen
        with transaction(database):
            if fenced:
                SqlFence().check(database, "record", lease)
            database.execute("UPDATE record SET value = ?", (value + 1,))
    except fencelock.StaleToken:
        tell("refused", f"REFUSED, {short(lease.token)} is stale")
        return False
    tell("wrote", f"writes {value + 1}", value=value + 1)
    return True


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def tell(event: str, text: str, **more: object) -> None:
    print(json.dumps({"event": event, "text": text, **more}), flush=True)


def short(token: int) -> str:
    return f"…{token % 10**6:06d}"


# ---------------------------------------------------------------------- the director, who starts and stops them


class Timeline:
    """One lane for each worker, one line for each event."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.colour = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
        lanes = "".join(self.paint(f"{name:<{WIDTH}}", name) for name in WORKERS)
        print(f"\n   time   {lanes}")

    def paint(self, text: str, who: str, bold: bool = False) -> str:
        return f"\033[{'1;' if bold else ''}{COLOURS[who]}m{text}\033[0m" if self.colour else text

    def show(self, who: str, text: str, bold: bool = False) -> None:
        indent = " " * (WIDTH * WORKERS.index(who)) if who in WORKERS else ""
        print(f"{time.monotonic() - self.start:6.2f} s  {indent}{self.paint(text, who, bold)}", flush=True)

    def direct(self, text: str) -> None:
        print(
            f"{time.monotonic() - self.start:6.2f} s  {self.paint('— ' + text + ' —', 'director', bold=True)}",
            flush=True,
        )


def play(fenced: bool) -> tuple[int, int]:
    """Run one half of the story; return how many writes were reported as done, and what the record says."""
    with tempfile.TemporaryDirectory(prefix="fencelock-demo-") as folder:
        database = sqlite3.connect(f"{folder}/application.db")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE record (value INTEGER)")
        database.execute("INSERT INTO record VALUES (0)")
        database.commit()
        workers = {name: start(name, folder, fenced) for name in WORKERS}
        try:
            writes = watch(workers)
        finally:
            for worker in workers.values():
                worker.kill()
                worker.wait()
                if worker.stdout is not None:
                    worker.stdout.close()
        value = database.execute("SELECT value FROM record").fetchone()[0]
        database.close()
    return writes, value


def start(name: str, folder: str, fenced: bool) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "worker", name, folder, "fenced" if fenced else "bare"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def watch(workers: dict[str, subprocess.Popen[str]]) -> int:
    """Show what the workers tell; stop the victim at its second read, and let it go on when its lease is long over."""
    events: queue.Queue[tuple[str, dict[str, object] | None]] = queue.Queue()
    for name, worker in workers.items():
        threading.Thread(target=listen, args=(name, worker, events), daemon=True).start()
    timeline = Timeline()
    victim, reads, writes, newest, running = workers[VICTIM], 0, 0, 0, set(workers)
    while running:
        name, event = events.get(timeout=60)
        if event is None:
            running.discard(name)
        elif event["event"] == "resume":
            victim.send_signal(signal.SIGCONT)
            timeline.direct(f"{VICTIM} goes on, and does not know that time has passed")
        else:
            text, value = str(event["text"]), int(str(event.get("value", 0)))
            stale = event["event"] == "wrote" and value <= newest
            timeline.show(
                name, f"{text} OVER {newest}!" if stale else text, stale or event["event"] in ("refused", "lost")
            )
            writes += event["event"] == "wrote"
            newest = value if event["event"] == "wrote" else newest
            reads += event["event"] == "read" and name == VICTIM
            if reads == 2 and event["event"] == "read" and name == VICTIM:
                victim.send_signal(signal.SIGSTOP)
                timeline.direct(f"{VICTIM} is stopped for {STOPPED_FOR:g} s; its lease lasts {TTL:g} s")
                threading.Timer(STOPPED_FOR, events.put, ((VICTIM, {"event": "resume"}),)).start()
    return writes


def listen(name: str, worker: subprocess.Popen[str], events: queue.Queue[tuple[str, dict[str, object] | None]]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        events.put((name, json.loads(line)))
    events.put((name, None))


def main() -> int:
    print(__doc__.partition("\n\n")[0])
    print("\n1. The lock alone. Every worker holds it when it writes, or believes so.")
    writes, value = play(fenced=False)
    print(f"\n   {writes} writes were reported as done; the record says {value}: {writes - value} lost without a word.")
    if writes == value:
        print("   Nothing was lost this time, so the first half shows nothing; run it again.")
        return 2
    print("\n2. The same with the fence: the record refuses a token older than one it has seen.")
    fenced_writes, fenced_value = play(fenced=True)
    lost = fenced_writes - fenced_value
    print(f"\n   {fenced_writes} writes were reported as done; the record says {fenced_value}: {lost} lost.")
    print("\nThe lock keeps workers from getting in each other's way. The fence keeps the data right.")
    return 1 if lost else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4] == "fenced")
    else:
        sys.exit(main())
