"""Many processes add to one value, are stopped and killed at random, and not one addition is lost or done twice.

`python -m tests.fences.increments` does 10,000 on PostgreSQL, MariaDB, SQLite and Redis; `make torture` calls it. A short
run on one of them is `python -m tests.fences.increments KIND ADDRESS FOLDER GOAL SEED`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import fencelock
from fencelock.fences import TokenPair
from tests.fences.counters import SqlCounter, close, open_counter

ROOT = Path(__file__).parents[2]
TTL = 0.4
WORKERS = 8


def work(kind: str, address: str, url: str, goal: int) -> None:
    """Add one until the value has reached the goal."""
    locks = fencelock.connect(url, ttl=TTL)
    chance = random.Random()
    while True:
        stock = open_counter(kind, address)
        try:
            while True:
                lease = locks.lock("stock").acquire()
                try:
                    # A token pair: a holder that was stopped must be refused by the fence, not by its own clock.
                    pair = TokenPair(lease.token, lease.id)
                    saw = stock.read(pair)
                    if saw >= goal:
                        return
                    if chance.random() < 0.05:
                        time.sleep(chance.random() * TTL / 10)  # some stops should hit between read and write
                    stock.write(pair, saw, saw + 1)
                except fencelock.StaleToken:
                    pass
                finally:
                    lease.release()
        except Exception as error:
            # The server has ended an idle transaction and its connection. The log shows whether the write was committed.
            if type(error).__module__.partition(".")[0] not in ("psycopg", "pymysql", "redis"):
                raise
            close(stock)


class Worker:
    """A fork of this process, which has imported everything already and has neither threads nor connections."""

    def __init__(self, *argv: Any) -> None:
        self.code: int | None = None
        self.stopped_until: float | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work(*argv)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def kill(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Director:
    """Starts the workers, and stops or kills some of them."""

    def __init__(self, kind: str, address: str, folder: Path, goal: int, seed: int) -> None:
        self.job = kind, address, f"sqlite:///{folder}/locks.db", goal
        self.random = random.Random(seed)
        self.workers: list[Worker] = []
        self.kills = self.stops = 0

    def run(self, limit: float, pause: float, hits: float) -> None:
        """Kill or stop a worker now and then, at most `hits` times, until all have ended."""
        end = time.monotonic() + limit
        try:
            self.workers += [Worker(*self.job) for _ in range(WORKERS)]
            while alive := [worker for worker in self.workers if not worker.ended()]:
                now = time.monotonic()
                assert now < end, "they do not come to an end"
                for worker in alive:
                    if worker.stopped_until is not None and now >= worker.stopped_until:
                        os.kill(worker.pid, signal.SIGCONT)
                        worker.stopped_until = None
                # The last ones are to come to their end.
                if len(alive) > WORKERS // 2 and self.stops + self.kills < hits:
                    self.inject_fault(self.random.choice(alive), now)
                time.sleep(pause * (0.5 + self.random.random()))
            assert {worker.code for worker in self.workers} <= {0, -signal.SIGKILL}
        finally:
            for worker in self.workers:
                worker.kill()

    def inject_fault(self, worker: Worker, now: float) -> None:
        if self.random.random() < 0.2:
            self.kills += 1
            worker.kill()
            self.workers.append(Worker(*self.job))
        elif worker.stopped_until is None:
            self.stops += 1
            os.kill(worker.pid, signal.SIGSTOP)
            worker.stopped_until = now + self.random.choice((0.05, TTL, 2 * TTL, 3 * TTL))


def mistakes(log: list[tuple[int, int, int]], final: int) -> list[str]:
    """Return the violations in the writes that a resource has accepted."""
    wrong = [
        f"{saw} became {value} after {before}" for (_, _, before), (_, saw, value) in pairwise(log) if saw != before
    ]
    wrong += [f"{saw} became {value}" for _, saw, value in log if value != saw + 1]
    tokens = [token for token, _, _ in log]
    if tokens != sorted(tokens):
        wrong.append("an older token was accepted after a newer one")
    if final != len(log):
        wrong.append(f"the value is {final} after {len(log)} increments")
    return wrong


def increments(
    kind: str, address: str, folder: Path, goal: int, seed: int, *, limit: float, pause: float, hits: float = inf
) -> Director:
    """Run the workers until the goal is reached, and check that every increment counts once."""
    director = Director(kind, address, folder, goal, seed)
    director.run(limit, pause, hits)
    stock = open_counter(kind, address, fenced=False)
    log = stock.accepted()
    final = stock.read(None)
    close(stock)
    assert mistakes(log, final) == []
    assert len(log) == goal
    return director


def main() -> None:
    """Run the full test on every kind of resource."""
    from tests.servers import MariaDB, Postgres, Redis

    goal, seed = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(time.time())
    with ExitStack() as stack:
        postgres, mariadb, redis = (stack.enter_context(kind()) for kind in (Postgres, MariaDB, Redis))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fencelock-increments-")))
        places = {
            "postgres": postgres.url,
            "mariadb": mariadb.address,
            "sqlite": str(folder / "stock"),
            "redis": redis.url,
        }
        for kind, address in places.items():
            stock = open_counter(kind, address, fenced=False)
            if isinstance(stock, SqlCounter):
                stock.prepare(stock.connection)
            close(stock)
            (folder / kind).mkdir()
            began = time.monotonic()
            director = increments(kind, address, folder / kind, goal, seed, limit=1800, pause=1.5)
            print(
                f"{kind}: {goal} increments by {WORKERS} processes, {director.kills} killed, {director.stops} stops, "
                f"{time.monotonic() - began:.0f} s: none lost, none twice",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 6:
        kind, address, folder, goal, seed = sys.argv[1:]
        short = increments(kind, address, Path(folder), int(goal), int(seed), limit=100, pause=0.4, hits=10)
        print(f"{short.stops} stops, {short.kills} killed")
    else:
        main()
