"""An uncontended acquire and release on Redis, compared with the bare fenced scripts and with the peers.

It runs twice: with client and server on one core, which shows the work of each contestant; and on the cores that the
system chooses, where waking the other core takes most of the time for every contestant.
"""

from __future__ import annotations

from bench import redis_peers as peers
from bench.harness import Goal, Timing, interleaved, one_core, show, with_async_lock, with_lock
from tests.servers import Redis

OURS = "fencelock"
BARE = "fenced scripts, bare connection"
REDIS_PY = "redis-py Lock (no token)"


def main(rounds: int) -> list[Goal]:
    with one_core():
        goals = measure("one core", rounds)
    return goals + measure("any core", rounds)


def measure(where: str, rounds: int) -> list[Goal]:
    with Redis(settings=peers.SETTINGS) as server:
        blocking = measure_blocking(server, where, rounds)
        asyncio = measure_asyncio(server, where, rounds)
    return [
        Goal(f"Redis, {where}: blocking pair ÷ redis-py's", ratio(blocking, REDIS_PY), 0.65),
        Goal(f"Redis, {where}: asyncio pair ÷ redis-py's", ratio(asyncio, REDIS_PY), 0.7),
    ]


def ratio(timings: dict[str, Timing], base: str) -> float:
    return timings[OURS].over(timings[base])


def measure_blocking(server: Redis, where: str, rounds: int) -> dict[str, Timing]:
    locks = {
        "our scripts over a bare socket": peers.Bare(server.url),
        OURS: peers.ours(server.url),
        REDIS_PY: peers.redis_py(server.url),
        "python-redis-lock (no token)": peers.python_redis_lock(server.url),
        "pottery Redlock, 1 node (no token)": peers.pottery(server.url),
        "tooz (no token)": peers.tooz(server.url),
    }
    contestants = {"two PINGs over a bare socket": peers.pings(server.url), BARE: peers.bare(server)}
    contestants |= {name: with_lock(lock) for name, lock in locks.items()}
    timings = interleaved(contestants, rounds * 4, repetitions=25)
    show(f"Redis, uncontended acquire + release, blocking, {where}", timings, base=REDIS_PY)
    return timings


def measure_asyncio(server: Redis, where: str, rounds: int) -> dict[str, Timing]:
    aio = peers.Aio()
    locks = {
        OURS: aio.ours(server.url),
        REDIS_PY: aio.redis_py(server.url),
        "pottery AIORedlock, 1 node (no token)": aio.pottery(server.url),
    }
    contestants = {BARE: aio.bare(server)}
    contestants |= {name: with_async_lock(lock, aio.loop) for name, lock in locks.items()}
    timings = interleaved(contestants, rounds * 4, repetitions=25)
    aio.close()
    show(f"Redis, uncontended acquire + release, asyncio, {where}", timings, base=REDIS_PY)
    return timings
