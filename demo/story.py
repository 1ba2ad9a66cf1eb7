"""What a fence is for, in ten seconds: a lock fails, the fence protects the data.

Three workers, real processes, add one to a shared record, each under the lock,
again and again. One of them is stopped (SIGSTOP) between its read and its write
for longer than its lease lasts, and then goes on. Once without the fence, once
with it.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an older Python can read this file, but not the library)
    sys.exit(f"the demo needs Python 3.11 or later, and this is {sys.version.split()[0]}: make demo PYTHON=python3.11")

import json
import logging
import os
import queue
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import fencelock
from fencelock.fences import TokenPair
from fencelock.fences.sql import SqlFence

logging.getLogger("fencelock").addHandler(logging.NullHandler())  # the timeline shows lost leases

WORKERS = ("alice", "bob", "carol")
VICTIM = "bob"
DIRECTOR = "director"
TTL = 1.0
ROUNDS = 4
STOPPED_FOR = 2.5 * TTL
TOO_LONG = 60.0

COLORS = {"alice": 36, "bob": 35, "carol": 34, DIRECTOR: 33}
LANE = 23
HOLD_BACK = 0.15
"""Seconds that events wait to be sorted: a worker reports its write when the next one may already hold the lock."""


class Event(NamedTuple):
    """One step of a worker or of the director. All processes of a machine share this clock."""

    at: float
    who: str
    what: str
    token: int = 0
    value: int = 0


# ---------------------------------------------------------------------- a worker, in a process of its own


def work(name: str, folder: str, fenced: bool) -> None:
    """Add one to the record ROUNDS times, and report every step to the director."""
    database = sqlite3.connect(f"{folder}/application.db", timeout=10, isolation_level=None)
    with fencelock.connect(f"sqlite:///{folder}/locks.db", ttl=TTL, owner=name) as locks:
        done = 0
        while done < ROUNDS:
            try:
                with locks.lock("record") as lease:
                    report(time.monotonic(), "holds", lease.token)
                    done += add_one(database, lease, fenced)
            except fencelock.LeaseLost:
                report(time.monotonic(), "learns")
            time.sleep(0.05)


def add_one(database: sqlite3.Connection, lease: fencelock.Lease, fenced: bool) -> bool:
    """Read, compute, write, as applications do. With the fence, the check comes before the first read.

    The second check gets only the token, as if the worker stopped after its last look at the clock, or as if a message
    arrived late. (A fence that gets a lease also checks the lease's own deadline, and raises LeaseLost.)
    """
    sent = TokenPair(lease.token, lease.id, lease.name)
    try:
        with transaction(database) as at:
            if fenced:
                SqlFence().check(database, lease)
            value = database.execute("SELECT value FROM record").fetchone()[0]
        lease.check()  # the last look at the clock
        report(at, "reads", lease.token, value)
        time.sleep(0.3)  # the computation; the worker may be stopped here
        with transaction(database) as at:
            if fenced:
                SqlFence().check(database, sent)
            database.execute("UPDATE record SET value = ?", (value + 1,))
    except fencelock.StaleToken:
        report(at, "refused", lease.token)
        return False
    report(at, "writes", lease.token, value + 1)
    return True


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[float]:
    """Run a write transaction and yield a time inside it; the director sorts events by these times."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield time.monotonic()
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def report(at: float, what: str, token: int = 0, value: int = 0) -> None:
    print(json.dumps([at, what, token, value]), flush=True)


# ---------------------------------------------------------------------- the timeline, which prints the events


class Timeline:
    """Prints one line for each event, in the order of their times, with one column for each worker."""

    def __init__(self, explain: bool) -> None:
        self.start = time.monotonic()
        self.writes = 0
        self.learned = False
        """Whether the victim got LeaseLost."""
        self._explain = explain
        self._color = use_colors(os.environ, sys.stdout.isatty())
        self._tokens: dict[int, int] = {}
        self._newest = 0
        self._admitted = 0

    def show(self, event: Event) -> None:
        """Print one event. The first event is a worker that holds the lock; print the heading before it."""
        if not self._tokens:
            self._head(event.token)
        text, bold = self._describe(event)
        indent = " " * (LANE * WORKERS.index(event.who)) if event.who in WORKERS else ""
        print(f"{event.at - self.start:6.2f} s  {indent}{self._paint(text, event.who, bold)}", flush=True)

    def _describe(self, event: Event) -> tuple[str, bool]:
        """Return the text for an event, and whether to print it in bold."""
        if event.what == "holds":
            return f"holds, token #{self._number(event.token)}", False
        if event.what == "reads":
            self._admitted = event.token
            return f"reads {event.value}", False
        if event.what == "writes":
            over, self._newest = self._newest, event.value
            self.writes += 1
            stale = event.value <= over
            return f"writes {event.value}" + (f" OVER {over}!" if stale else ""), stale
        if event.what == "refused":
            return (
                f"REFUSED: #{self._number(event.token)} is stale, #{self._number(self._admitted)} has been here",
                True,
            )
        if event.what == "learns":
            self.learned |= event.who == VICTIM
            return "learns: lease lost", True
        return f"-- {event.what} --", True

    def _number(self, token: int) -> int:
        """Return the number of a token among the tokens of this part, in the order of the grants."""
        return self._tokens.setdefault(token, len(self._tokens) + 1)

    def _head(self, token: int) -> None:
        if self._explain:
            print("\n   #1, #2, ... are the fencing tokens in the order in which they were")
            print(f"   granted; each part starts at #1. In full, this #1 is {token}.")
        lanes = "".join(self._paint(f"{name:<{LANE}}", name) for name in WORKERS)
        print(f"\n   time   {lanes.rstrip()}")

    def _paint(self, text: str, who: str, bold: bool = False) -> str:
        return f"\033[{'1;' if bold else ''}{COLORS[who]}m{text}\033[0m" if self._color else text


def use_colors(environment: Mapping[str, str], terminal: bool) -> bool:
    """Return whether to use colors: see https://no-color.org."""
    if environment.get("FORCE_COLOR"):
        return True
    return terminal and not environment.get("NO_COLOR")


# ---------------------------------------------------------------------- the director, which starts and stops workers


class Outcome(NamedTuple):
    """The result of one part."""

    writes: int
    """The writes that workers reported as done."""
    value: int
    """The value in the record at the end."""
    learned: bool

    @property
    def lost(self) -> int:
        return self.writes - self.value


def run_part(fenced: bool) -> Outcome:
    """Run one part of the demo: the workers, with or without the fence."""
    with tempfile.TemporaryDirectory(prefix="fencelock-demo-") as folder:
        database = sqlite3.connect(f"{folder}/application.db")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE record (value INTEGER)")
        database.execute("INSERT INTO record VALUES (0)")
        database.commit()
        workers: dict[str, subprocess.Popen[str]] = {}
        try:
            for name in WORKERS:
                workers[name] = start(name, folder, fenced)
            timeline = watch(workers, Timeline(explain=not fenced))
        finally:
            previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for worker in workers.values():
                worker.kill()
                worker.wait()
            signal.signal(signal.SIGINT, previous_handler)
        value = database.execute("SELECT value FROM record").fetchone()[0]
        database.close()
    return Outcome(timeline.writes, value, timeline.learned)


def start(name: str, folder: str, fenced: bool) -> subprocess.Popen[str]:
    """Start a worker in its own process group: Ctrl-C in the terminal does not reach it, and the director kills it."""
    command = [sys.executable, __file__, "worker", name, folder, "fenced" if fenced else "bare"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)


def watch(workers: dict[str, subprocess.Popen[str]], timeline: Timeline) -> Timeline:
    """Show the workers' reports; stop the victim at its second read, and resume it when its lease has expired."""
    reports: queue.Queue[Event] = queue.Queue()
    for name, worker in workers.items():
        threading.Thread(target=listen, args=(name, worker, reports), daemon=True).start()
    pending: list[Event] = []
    running, reads, resume_at = set(workers), 0, inf
    while running or pending:
        now = time.monotonic()
        if now > timeline.start + TOO_LONG:
            raise TimeoutError(f"{', '.join(running)} did not end in time")
        if now >= resume_at:
            resume_at = inf
            heappush(pending, Event(now, DIRECTOR, f"{VICTIM} goes on, and does not know that time has passed"))
            workers[VICTIM].send_signal(signal.SIGCONT)
        while pending and (not running or pending[0].at <= now - HOLD_BACK):
            timeline.show(heappop(pending))
        try:
            event = reports.get(timeout=0.02)
        except queue.Empty:
            continue
        if event.what == "ends":
            running.discard(event.who)
            continue
        heappush(pending, event)
        reads += event.who == VICTIM and event.what == "reads"
        if reads == 2 and event.who == VICTIM and event.what == "reads":
            workers[VICTIM].send_signal(signal.SIGSTOP)
            now = time.monotonic()
            resume_at = now + STOPPED_FOR
            text = f"{VICTIM} is stopped for {STOPPED_FOR:g} s; its lease lasts {TTL:g} s"
            heappush(pending, Event(now, DIRECTOR, text))
    return timeline


def listen(name: str, worker: subprocess.Popen[str], reports: queue.Queue[Event]) -> None:
    assert worker.stdout is not None
    with worker.stdout as lines:
        for line in lines:
            at, what, token, value = json.loads(line)
            reports.put(Event(at, name, what, token, value))
    reports.put(Event(time.monotonic(), name, "ends"))


def main() -> int:
    print(__doc__)
    print("1. The lock alone. Every worker holds it when it writes, or believes so.", flush=True)
    bare = run_part(fenced=False)
    print(
        f"\n   {bare.writes} writes were reported as done; the record says {bare.value}: {bare.lost} updates are gone."
    )
    if not bare.lost:
        print("   No update was lost this time, so the first part shows nothing; run it again.")
        return 2
    if bare.learned:
        print(f"   {VICTIM} did learn that its lease was lost, but too late: it had written by then.")
    print("\n2. The same with the fence: the record refuses a token that is older than one")
    print("   it has seen.", flush=True)
    fenced = run_part(fenced=True)
    print(f"\n   {fenced.writes} writes were reported as done; the record says {fenced.value}: {fenced.lost} are gone.")
    print("\nThe lock keeps workers from getting in each other's way. The fence keeps the")
    print("data right.")
    return 1 if fenced.lost else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4] == "fenced")
        sys.exit()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
