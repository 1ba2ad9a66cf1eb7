"""A worker of the torture test: until SIGTERM it acquires the lock, adds one to a record, and logs each step."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import fencelock
from fencelock.core.clock import boottime
from fencelock.fences import TokenPair
from fencelock.fences.sql import SqlFence


class Worker:
    """The only worker of its process, with a name and a log file."""

    def __init__(self, url: str, application: str, log: TextIO, name: str, fenced: bool, ttl: float) -> None:
        self.name = name
        self.fenced = fenced
        self.log = log
        self.random = random.Random(name)
        self.locks = fencelock.connect(url, owner=name, ttl=ttl)
        self.database = sqlite3.connect(application, timeout=30, isolation_level=None)
        self.running = True
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        self.running = False

    def log_event(self, **fields: Any) -> None:
        self.log.write(json.dumps(fields) + "\n")
        self.log.flush()

    def run(self) -> None:
        while self.running:
            called = boottime()
            self.log_event(event="call", at=called)
            try:
                lease = self.locks.lock("record").acquire(timeout=2)
            except fencelock.LockTimeout:
                self.log_event(event="timeout", called=called, at=boottime())
                continue
            returned = boottime()
            self.log_event(event="grant", called=called, at=returned, token=lease.token, deadline=lease.deadline)
            try:
                self.add_one(lease)
            finally:
                # The lease counts as held until its release, or until the deadline, at which `check()` would raise.
                until = min(boottime(), lease.deadline)
                self.log_event(event="end", token=lease.token, until=until)
                self.log_event(event="release", token=lease.token, called=boottime(), ok=lease.release(), at=boottime())

    def add_one(self, lease: fencelock.Lease) -> None:
        # Only the token, not the lease with its deadline: the fence itself must refuse a worker that was stopped.
        pair = TokenPair(lease.token, lease.id)
        try:
            with self.transaction():
                if self.fenced:
                    SqlFence().check(self.database, pair, "record")
                value = self.database.execute("SELECT value FROM record").fetchone()[0]
            time.sleep(self.random.random() * 0.02)
            with self.transaction():
                if self.fenced:
                    SqlFence().check(self.database, pair, "record")
                self.database.execute("UPDATE record SET value = ?", (value + 1,))
                self.database.execute(
                    "INSERT INTO log VALUES (?, ?, ?, ?, ?)", (self.name, lease.token, boottime(), value, value + 1)
                )
        except fencelock.StaleToken:
            self.log_event(event="refused", token=lease.token, at=boottime())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.database.execute("ROLLBACK")
            raise
        self.database.execute("COMMIT")


def main() -> None:
    url, application, log, name, fenced, ttl = sys.argv[1:]
    with open(log, "w", encoding="utf-8") as file:
        worker = Worker(url, application, file, name, fenced == "fenced", float(ttl))
        worker.run()
        worker.locks.close()


if __name__ == "__main__":
    main()
