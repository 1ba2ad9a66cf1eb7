"""Count the keys and bytes that many names leave on Redis after they are released. `--rounds 10` uses a million names."""

from __future__ import annotations

import time

import redis

import fencelock
from bench import redis_peers as peers
from bench.harness import Goal, progress
from tests.servers import Redis

NAMES = 100_000
BUCKETS = 1024
FEW = 16


def main(rounds: int) -> list[Goal]:
    total = rounds * NAMES
    with Redis(settings=peers.SETTINGS) as server, redis.Redis.from_url(server.url) as client:
        before = client.info("memory")["used_memory"]
        began = time.monotonic()
        with fencelock.connect(server.url) as locks:
            for number in range(total):
                if number % 1000 == 0:
                    progress(f"{number:,} of {total:,} names")
                with locks.lock(f"name-{number}"):
                    pass
        seconds = time.monotonic() - began
        keys, memory = client.dbsize(), client.info("memory")["used_memory"] - before
    progress("")
    print(f"\nRedis, {total:,} different names locked and released, in {seconds:.0f} s")
    print(f"  left behind: {keys:,} keys, {memory / 1024:,.0f} KiB")
    return [Goal(f"Redis: keys left behind by {total:,} names", keys, BUCKETS + FEW)]
