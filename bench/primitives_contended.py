"""Eight processes on one name, on Redis, with a body of 2 ms: a lock, a semaphore of four, and readers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import fencelock
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal
from tests.servers import Redis

BODY = 0.002
LOCK, SEMAPHORE, READERS = "lock", "semaphore of 4", "readers"


def lock(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(url).lock("lock")


def semaphore(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(url).semaphore("erp", 4)


def readers(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(url).rwlock("catalog").read()


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {LOCK: lock, SEMAPHORE: semaphore, READERS: readers}
    title = f"Redis, {PROCESSES} processes on one name, body of {BODY * 1000:g} ms"
    with Redis() as server:
        outcomes = compare(title, contestants, server.url, rounds=rounds, body=BODY)
    lock_alone = outcomes[LOCK]
    return [
        Goal(f"Redis contended: grants/s of a {SEMAPHORE} ÷ a lock's", outcomes[SEMAPHORE].over(lock_alone), 1, False),
        Goal(f"Redis contended: grants/s of {READERS} ÷ a lock's", outcomes[READERS].over(lock_alone), 1, False),
    ]
