"""The story of fencelock in ten seconds: a lock fails, the fence holds.

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

logging.getLogger("fencelock").addHandler(logging.NullHandler())  # the story tells of losses itself

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
"""A worker tells of its write when the next may already hold the lock: events wait so long to be put in order."""


class Event(NamedTuple):
    """What somebody did, and when. The clock is the same for all processes of a machine."""

    at: float
    who: str
    what: str
    token: int = 0
    value: int = 0


# ---------------------------------------------------------------------- a worker, in a process of its own


def work(name: str, folder: str, fenced: bool) -> None:
    """Add one to the record ROUNDS times; tell the director about every step."""
    database = sqlite3.connect(f"{folder}/application.db", timeout=10, isolation_level=None)
    with fencelock.connect(f"sqlite:///{folder}/locks.db", ttl=TTL, owner=name) as locks:
        done = 0
        while done < ROUNDS:
            try:
                with locks.lock("record") as lease:
                    tell(time.monotonic(), "holds", lease.token)
                    done += add_one(database, lease, fenced)
            except fencelock.LeaseLost:
                tell(time.monotonic(), "learns")
            time.sleep(0.05)


def add_one(database: sqlite3.Connection, lease: fencelock.Lease, fenced: bool) -> bool:
    """Read, think, write, as applications do. With the fence, the check comes before the first read.

    The write carries the token and not the lease's clock: a worker that is stopped after its last look at the clock, or a
    message that is late, is just this. (A fence that gets a lease looks at its clock first, and raises LeaseLost.)
    """
    sent = TokenPair(lease.token, lease.id, lease.name)
    try:
        with transaction(database) as at:
            if fenced:
                SqlFence().check(database, lease)
            value = database.execute("SELECT value FROM record").fetchone()[0]
        lease.check()  # the last look at the clock
        tell(at, "reads", lease.token, value)
        time.sleep(0.3)  # the thinking, in which anything may happen
        with transaction(database) as at:
            if fenced:
                SqlFence().check(database, sent)
            database.execute("UPDATE record SET value = ?", (value + 1,))
    except fencelock.StaleToken:
        tell(at, "refused", lease.token)
        return False
    tell(at, "writes", lease.token, value + 1)
    return True


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[float]:
    """Be alone with the database; give a time at which this was so, by which the director can put events in order."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield time.monotonic()
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def tell(at: float, what: str, token: int = 0, value: int = 0) -> None:
    print(json.dumps([at, what, token, value]), flush=True)


# ---------------------------------------------------------------------- the timeline, which shows what they do


class Timeline:
    """One lane for each worker, one line for each event, in the order of their times."""

    def __init__(self, explain: bool) -> None:
        self.start = time.monotonic()
        self.writes = 0
        self.learned = False
        """Whether the victim was told that its lease is lost."""
        self._explain = explain
        self._color = colourful(os.environ, sys.stdout.isatty())
        self._tokens: dict[int, int] = {}
        self._newest = 0
        self._admitted = 0

    def show(self, event: Event) -> None:
        """Show one event. The first is a worker that holds the lock, and brings the heading with it."""
        if not self._tokens:
            self._head(event.token)
        text, bold = self._describe(event)
        indent = " " * (LANE * WORKERS.index(event.who)) if event.who in WORKERS else ""
        print(f"{event.at - self.start:6.2f} s  {indent}{self._paint(text, event.who, bold)}", flush=True)

    def _describe(self, event: Event) -> tuple[str, bool]:
        """Return the event in words, and whether to stress it."""
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
        """Return a token's place among those of this half: as tokens rise, so do these."""
        return self._tokens.setdefault(token, len(self._tokens) + 1)

    def _head(self, token: int) -> None:
        if self._explain:
            print("\n   #1, #2, ... are the fencing tokens in the order in which they were")
            print(f"   granted; each half counts anew. In full, this #1 is {token}.")
        lanes = "".join(self._paint(f"{name:<{LANE}}", name) for name in WORKERS)
        print(f"\n   time   {lanes.rstrip()}")

    def _paint(self, text: str, who: str, bold: bool = False) -> str:
        return f"\033[{'1;' if bold else ''}{COLORS[who]}m{text}\033[0m" if self._color else text


def colourful(environment: Mapping[str, str], terminal: bool) -> bool:
    """Return whether to use colours: see https://no-color.org."""
    if environment.get("FORCE_COLOR"):
        return True
    return terminal and not environment.get("NO_COLOR")


# ---------------------------------------------------------------------- the director, who starts and stops them


class Outcome(NamedTuple):
    """How one half ended."""

    writes: int
    """How many were reported as done."""
    value: int
    """What the record says."""
    learned: bool

    @property
    def gone(self) -> int:
        return self.writes - self.value


def play(fenced: bool) -> Outcome:
    """Run one half of the story."""
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
            impatient = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for worker in workers.values():
                worker.kill()
                worker.wait()
            signal.signal(signal.SIGINT, impatient)
        value = database.execute("SELECT value FROM record").fetchone()[0]
        database.close()
    return Outcome(timeline.writes, value, timeline.learned)


def start(name: str, folder: str, fenced: bool) -> subprocess.Popen[str]:
    """Start a worker in a process group of its own, which the terminal's Ctrl-C does not reach: we end it ourselves."""
    command = [sys.executable, __file__, "worker", name, folder, "fenced" if fenced else "bare"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)


def watch(workers: dict[str, subprocess.Popen[str]], timeline: Timeline) -> Timeline:
    """Show what the workers tell; stop the victim at its second read, and let it go on when its lease is long over."""
    heard: queue.Queue[Event] = queue.Queue()
    for name, worker in workers.items():
        threading.Thread(target=listen, args=(name, worker, heard), daemon=True).start()
    pending: list[Event] = []
    running, reads, go_on_at = set(workers), 0, inf
    while running or pending:
        now = time.monotonic()
        if now > timeline.start + TOO_LONG:
            raise TimeoutError(f"{', '.join(running)} did not come to an end")
        if now >= go_on_at:
            go_on_at = inf
            heappush(pending, Event(now, DIRECTOR, f"{VICTIM} goes on, and does not know that time has passed"))
            workers[VICTIM].send_signal(signal.SIGCONT)
        while pending and (not running or pending[0].at <= now - HOLD_BACK):
            timeline.show(heappop(pending))
        try:
            event = heard.get(timeout=0.02)
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
            go_on_at = now + STOPPED_FOR
            text = f"{VICTIM} is stopped for {STOPPED_FOR:g} s; its lease lasts {TTL:g} s"
            heappush(pending, Event(now, DIRECTOR, text))
    return timeline


def listen(name: str, worker: subprocess.Popen[str], heard: queue.Queue[Event]) -> None:
    assert worker.stdout is not None
    with worker.stdout as lines:
        for line in lines:
            at, what, token, value = json.loads(line)
            heard.put(Event(at, name, what, token, value))
    heard.put(Event(time.monotonic(), name, "ends"))


def main() -> int:
    print(__doc__)
    print("1. The lock alone. Every worker holds it when it writes, or believes so.", flush=True)
    bare = play(fenced=False)
    print(
        f"\n   {bare.writes} writes were reported as done; the record says {bare.value}: {bare.gone} updates are gone."
    )
    if not bare.gone:
        print("   Nothing was lost this time, so the first half shows nothing; run it again.")
        return 2
    if bare.learned:
        print(f"   {VICTIM} did learn that its lease was lost, but too late: it had written by then.")
    print("\n2. The same with the fence: the record refuses a token that is older than one")
    print("   it has seen.", flush=True)
    fenced = play(fenced=True)
    print(f"\n   {fenced.writes} writes were reported as done; the record says {fenced.value}: {fenced.gone} are gone.")
    print("\nThe lock keeps workers from getting in each other's way. The fence keeps the")
    print("data right.")
    return 1 if fenced.gone else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4] == "fenced")
        sys.exit()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
