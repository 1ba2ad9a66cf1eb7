"""Processes with the same keys, killed at random: every key is executed exactly once, with one message."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from fencelock.lockfree.outbox import Outbox
from tests.lockfree.databases import Database
from tests.support.processes import Child

KEYS = 30

WORK = """
import random
from fencelock import KeyInProgress
from fencelock.lockfree.idempotency import IdempotencyKey
from fencelock.lockfree.outbox import Outbox

prefix, seed, keys = args
chance, outbox = random.Random(int(seed)), Outbox(prefix)
left = [f"{prefix}:{number}" for number in range(int(keys))]
print(0, flush=True)
while left:
    key = chance.choice(left)
    try:
        with IdempotencyKey(connection, key, wait=chance.choice([True, False, 0.05])) as run:
            if not run.replayed:
                connection.cursor().execute(f"INSERT INTO charge VALUES ('{key}', 1)")
                outbox.append(connection, key, 1)
                if chance.random() < 0.3:
                    raise ZeroDivisionError
                run.result = key
        assert run.result == key
        connection.commit()
        left.remove(key)
    except (ZeroDivisionError, KeyInProgress):
        connection.rollback()
print(1, flush=True)
"""


def test_every_key_is_executed_once(database: Database, key: str, child: Callable[..., Child]) -> None:
    """No write is missing or done twice, in the application's table and in the outbox."""
    chance = random.Random(key)
    workers = [child(database, WORK, key, str(seed), str(KEYS)) for seed in range(3)]
    for seed in range(3, 5):
        killed = workers.pop(0)
        killed.read_json()
        time.sleep(chance.random() / 10)
        killed.kill()
        workers.append(child(database, WORK, key, str(seed), str(KEYS)))
    for worker in workers:
        assert [worker.read_json(), worker.read_json()] == [0, 1]
    counts = database.ask("SELECT name, count(*) FROM charge WHERE name LIKE ? GROUP BY name", f"{key}:%")
    assert sorted(counts) == sorted((f"{key}:{number}", 1) for number in range(KEYS))
    with database.connected() as connection:
        assert Outbox(key).pending(connection) == KEYS
