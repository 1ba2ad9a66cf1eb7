"""An uncontended acquire and release on ZooKeeper, compared with the bare requests and the peers."""

from __future__ import annotations

import asyncio

from bench import zookeeper_peers as peers
from bench.harness import Goal, Timing, interleaved, show, with_async_lock, with_lock
from tests.servers.zookeeper import ZooKeeper

OURS = "fencelock"
BARE = "create, children and delete over kazoo, bare"
KAZOO = "kazoo Lock (no token)"


def main(rounds: int) -> list[Goal]:
    with ZooKeeper(settings=peers.SETTINGS, environment=peers.JVM) as server:
        blocking = measure_blocking(server.url, rounds)
        asyncio = measure_asyncio(server.url, rounds)
        peers.finish()
    return [
        Goal("ZooKeeper: blocking pair ÷ the bare requests", ratio(blocking, OURS, BARE), 1.2),
        Goal("ZooKeeper: kazoo Lock's pair ÷ ours", ratio(blocking, KAZOO, OURS), 1.2, at_most=False),
        Goal("ZooKeeper: asyncio pair ÷ the bare requests", ratio(asyncio, OURS, BARE), 1.2),
    ]


def ratio(timings: dict[str, Timing], name: str, base: str) -> float:
    return timings[name].over(timings[base])


def measure_blocking(url: str, rounds: int) -> dict[str, Timing]:
    locks = {OURS: peers.ours(url), KAZOO: peers.kazoo(url), "tooz (no token)": peers.tooz(url)}
    contestants = {BARE: peers.bare(url)}
    contestants |= {name: with_lock(lock) for name, lock in locks.items()}
    timings = interleaved(contestants, rounds, repetitions=50)
    show("ZooKeeper, uncontended acquire + release, blocking", timings, base=BARE)
    return timings


def measure_asyncio(url: str, rounds: int) -> dict[str, Timing]:
    loop = asyncio.new_event_loop()
    contestants = {
        BARE: peers.bare_async(url, loop),
        OURS: with_async_lock(peers.ours_async(url, loop), loop),
    }
    timings = interleaved(contestants, rounds, repetitions=50)
    show("ZooKeeper, uncontended acquire + release, asyncio", timings, base=BARE)
    return timings
