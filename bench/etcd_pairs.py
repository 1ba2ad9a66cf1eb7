"""An uncontended acquire and release on etcd, beside bare gRPC and beside the peers."""

from __future__ import annotations

from bench import etcd_peers as peers
from bench.harness import Goal, Timing, interleaved, show, with_async_lock, with_lock
from tests.servers import Etcd

OURS = "fencelock"
BARE = "txn + delete, bare grpcio"
GATEWAY = "etcd3gw (no token)"
TOOZ = "tooz (no token)"


def main(rounds: int) -> list[Goal]:
    with Etcd() as server:
        blocking = measure_blocking(server, rounds)
        asyncio = measure_asyncio(server, rounds)
    return [
        Goal("etcd: blocking pair ÷ bare grpcio's", ratio(blocking, BARE), 1.25),
        Goal("etcd: asyncio pair ÷ bare grpc.aio's", ratio(asyncio, BARE), 1.25),
        Goal("etcd: etcd3gw's pair ÷ ours", 1 / ratio(blocking, GATEWAY), 2, at_most=False),
        Goal("etcd: tooz's pair ÷ ours", 1 / ratio(blocking, TOOZ), 2, at_most=False),
    ]


def ratio(timings: dict[str, Timing], base: str) -> float:
    return timings[OURS].over(timings[base])


def measure_blocking(server: Etcd, rounds: int) -> dict[str, Timing]:
    locks = {OURS: peers.ours(server.url), GATEWAY: peers.etcd3gw(server.url), TOOZ: peers.tooz(server.url)}
    contestants = {BARE: peers.bare(server)} | {name: with_lock(lock) for name, lock in locks.items()}
    timings = interleaved(contestants, rounds, repetitions=30)
    show("etcd, uncontended acquire + release, blocking", timings, base=BARE)
    return timings


def measure_asyncio(server: Etcd, rounds: int) -> dict[str, Timing]:
    aio = peers.Aio()
    contestants = {BARE: aio.bare(server), OURS: with_async_lock(aio.ours(server.url), aio.loop)}
    timings = interleaved(contestants, rounds, repetitions=30)
    aio.close()
    show("etcd, uncontended acquire + release, asyncio", timings, base=BARE)
    return timings
