"""Eight processes on one name, on Redis, compared with the peers: with an empty body, and with one of 2 ms.

tooz is missing: its lock is redis-py's, and waits in the same way.
"""

from __future__ import annotations

from bench import redis_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal
from tests.servers import Redis

OURS = "fencelock (first come, first served)"
REDIS_PY = "redis-py Lock (100 ms poll, barges)"
BODY = 0.002


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {
        "BLPOP and RPUSH, bare (no ttl, no token)": peers.BareList,
        "our scripts over a bare socket": peers.Bare,
        OURS: peers.ours,
        REDIS_PY: peers.redis_py,
        "python-redis-lock (woken, barges)": peers.python_redis_lock,
        "pottery Redlock, 1 node (polls, barges)": peers.pottery,
    }
    title = f"Redis, {PROCESSES} processes on one name"
    with Redis(settings=peers.SETTINGS) as server:
        empty = compare(f"{title}, empty body", contestants, server.url, rounds=rounds)
        compare(f"{title}, body of {BODY * 1000:g} ms", contestants, server.url, rounds=rounds, body=BODY)
    ours = empty[OURS]
    return [
        Goal("Redis contended: grants per second ÷ redis-py's", ours.over(empty[REDIS_PY]), 1.3, at_most=False),
        Goal("Redis contended: wait p99, ms", ours.p99, 10),
        Goal("Redis contended: the most uneven process, % of the mean", ours.uneven * 100, 5),
    ]
