"""A read lease, a permit, and a group of two names, compared with a plain lock, on every engine that supports them all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import fencelock
from bench.harness import Goal, interleaved, show, with_lock
from tests.servers import Etcd, Postgres, Redis
from tests.servers.server import Server
from tests.servers.zookeeper import ZooKeeper

LOCK, READ, PERMIT, GROUP = "lock", "read lease", "permit", "group of two"
SERVERS: dict[str, Callable[[], Server]] = {
    "Redis": Redis,
    "PostgreSQL rows": Postgres,
    "etcd": Etcd,
    "ZooKeeper": ZooKeeper,
}


def main(rounds: int) -> list[Goal]:
    with tempfile.TemporaryDirectory(prefix="fencelock-bench-") as folder:
        goals = measure("SQLite", f"sqlite:///{folder}/locks.db", rounds)
    for name, make_server in SERVERS.items():
        with make_server() as server:
            goals += measure(name, server.url, rounds)
    return goals


def measure(name: str, url: str, rounds: int) -> list[Goal]:
    with fencelock.connect(url) as locks:
        contestants = {
            LOCK: with_lock(locks.lock("lock")),
            READ: with_lock(locks.rwlock("catalog").read()),
            PERMIT: with_lock(locks.semaphore("erp", 5)),
            GROUP: with_lock(locks.multi("a", "b")),
        }
        timings = interleaved(contestants, rounds, repetitions=50)
    show(f"{name}, uncontended acquire + release", timings, base=LOCK)
    bounds = {READ: 1.1, PERMIT: 1.1, GROUP: 2.1}
    return [Goal(f"{name}: {what} ÷ lock", timings[what].over(timings[LOCK]), bound) for what, bound in bounds.items()]
