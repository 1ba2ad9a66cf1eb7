"""Starts the workers, stops and kills them at random, and turns their logs into a history."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import fencelock
from fencelock.core.clock import boottime
from fencelock.sim.history import History, Kind, Leftover, Note, Op, Outcome, Write
from tests.support.processes import Child

TTL = 0.4
WORKERS = 6


@dataclass
class Running:
    """A worker process and its state."""

    name: str
    child: Child
    log: Path
    stopped_until: float | None = None


@dataclass
class Torture:
    """One run on one engine, in one folder."""

    url: str
    folder: Path
    fenced: bool
    seed: int
    history: History = field(default_factory=History)
    killed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.application = self.folder / "application.db"
        self.running: list[Running] = []
        self.logs: dict[str, Path] = {}
        self.started = 0
        database = sqlite3.connect(self.application, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE record (value INTEGER)")
        database.execute("INSERT INTO record VALUES (0)")
        database.execute("CREATE TABLE log (owner TEXT, token INTEGER, at REAL, saw INTEGER, value INTEGER)")
        database.close()

    def run(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> History:
        """Stop and kill workers until the time is over or `enough()` is true; then end all workers; return the history."""
        try:
            for _ in range(WORKERS):
                self.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end and not enough():
                self.wake(boottime())
                self.inject_fault()
                time.sleep(0.05 + self.random.random() * 0.2)
            self.wake(float("inf"))
            for worker in self.running:
                worker.child.process.terminate()
            for worker in self.running:
                code, _ = worker.child.ends()
                not_started = code == -signal.SIGTERM and not worker.log.read_text(
                    "utf-8"
                )  # SIGTERM came before its handler
                assert code == 0 or not_started, f"{worker.name} ended with {code}; see {worker.log}"
        finally:
            for worker in self.running:
                worker.child.kill()
        self.history.quiet = boottime()
        self.collect()
        return self.history

    def start(self) -> None:
        self.started += 1
        name = f"w{self.started}"
        log = self.logs[name] = self.folder / f"{name}.log"
        log.touch()  # the worker may be killed before it creates the file
        arguments = (self.url, str(self.application), str(log), name, "fenced" if self.fenced else "bare", str(TTL))
        self.running.append(Running(name, Child.of_module("tests.torture.worker", *arguments), log))

    def wake(self, now: float) -> None:
        for worker in self.running:
            if worker.stopped_until is not None and now >= worker.stopped_until:
                worker.child.resume()
                worker.stopped_until = None

    def inject_fault(self) -> None:
        worker = self.random.choice(self.running)
        if self.random.random() < 0.2:
            self.killed[worker.name] = boottime()
            worker.child.kill()
            self.note(worker.name, "killed")
            self.running.remove(worker)
            self.start()
        elif worker.stopped_until is None:
            length = self.random.choice((0.05, 0.2, 2 * TTL, 3 * TTL))
            worker.child.stop()
            worker.stopped_until = boottime() + length
            self.note(worker.name, f"stopped for {length:g} s")

    def note(self, who: str, what: str) -> None:
        self.history.add(Note(boottime(), who, what))

    def accepted(self) -> list[Write]:
        """Return the accepted writes from the log of the resource, in the order of its transactions."""
        database = sqlite3.connect(self.application, timeout=30)
        rows = database.execute("SELECT owner, token, at, saw, value FROM log ORDER BY rowid").fetchall()
        database.close()
        return [
            Write("record", owner, token, number, saw, value, True)
            for number, (owner, token, _, saw, value) in enumerate(rows)
        ]

    def collect(self) -> None:
        self.history.writes = self.accepted()
        for name, log in self.logs.items():
            for op in operations(name, log.read_text("utf-8"), self.killed.get(name)):
                self.history.add(op)
        time.sleep(TTL * 1.1)
        with fencelock.connect(self.url) as locks:
            for name in locks.names():
                snapshot = locks.inspect(name)
                for role, somebody in [("holder", h) for h in snapshot.holders] + [
                    ("waiter", w) for w in snapshot.waiters
                ]:
                    self.history.add(Leftover(name, somebody.owner, role, boottime()))


def operations(name: str, text: str, killed: float | None) -> list[Op]:
    """Return a worker's log as operations; the last line may be incomplete, and the last grant may have no end."""
    ops: list[Op] = []
    open_grant: Op | None = None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        match entry["event"]:
            case "timeout":
                ops.append(Op("record", Kind.ACQUIRE, name, entry["called"], entry["at"], Outcome.FAILED))
            case "grant":
                # Without an "end" the worker was killed: it held the lease until then, but not past its first deadline.
                until = min(entry["deadline"], killed if killed is not None else entry["deadline"])
                open_grant = Op(
                    "record", Kind.ACQUIRE, name, entry["called"], entry["at"], Outcome.OK, entry["token"], None,
                    entry["at"], until,
                )  # fmt: skip
            case "end" if open_grant is not None:
                ops.append(replace(open_grant, valid_until=entry["until"]))
                open_grant = None
            case "release":
                outcome = Outcome.OK if entry["ok"] else Outcome.FAILED
                ops.append(Op("record", Kind.RELEASE, name, entry["called"], entry["at"], outcome, entry["token"]))
    if open_grant is not None:
        ops.append(open_grant)
    return ops
