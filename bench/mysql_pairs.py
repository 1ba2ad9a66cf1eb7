"""An uncontended acquire and release on MariaDB, compared with the bare statements and with tooz."""

from __future__ import annotations

from bench import mysql_peers as peers
from bench.harness import Goal, Timing, interleaved, show, with_async_lock, with_lock
from tests.servers import MariaDB

OURS = "fencelock"
OURS_AIO = "fencelock, asyncio"
BARE = "GET_LOCK, NEXTVAL, RELEASE_LOCK, bare PyMySQL"


def main(rounds: int) -> list[Goal]:
    with MariaDB() as server:
        timings = measure(server, rounds)
        slow = {OURS: with_lock(peers.ours(server.url)), "tooz (no token)": with_lock(peers.tooz(server.url))}
        peer = interleaved(slow, max(2, rounds // 8), repetitions=10)
        show("MariaDB, the same compared with tooz, which connects for each lock", peer, base=OURS)
    return [
        Goal("MariaDB: blocking pair ÷ the bare statements", ratio(timings, OURS), 1.6),
        Goal("MariaDB: asyncio pair ÷ the bare statements, blocking", ratio(timings, OURS_AIO), 1.6),
    ]


def ratio(timings: dict[str, Timing], name: str) -> float:
    return timings[name].over(timings[BARE])


def measure(server: MariaDB, rounds: int) -> dict[str, Timing]:
    aio = peers.Aio()
    contestants = {
        BARE: with_lock(peers.bare(server.url)),
        "GET_LOCK, RELEASE_LOCK, bare PyMySQL (no token)": with_lock(peers.bare_without_token(server.url)),
        "the same statements over a raw socket": with_lock(peers.raw(server.url)),
        OURS: with_lock(peers.ours(server.url)),
        OURS_AIO: with_async_lock(aio.ours(server.url), aio.loop),
    }
    timings = interleaved(contestants, rounds, repetitions=100)
    aio.close()
    show("MariaDB, uncontended acquire + release", timings, base=BARE)
    return timings
