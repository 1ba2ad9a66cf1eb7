"""Eight processes on one name, on etcd, beside the peers, with an empty body."""

from __future__ import annotations

from bench import etcd_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal
from tests.engines import Etcd

OURS = "fencelock (first come, first served)"
GATEWAY = "etcd3gw (polls, barges)"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {OURS: peers.ours, GATEWAY: peers.etcd3gw, "tooz (watches, barges)": peers.tooz}
    with Etcd() as server:
        found = compare(f"etcd, {PROCESSES} processes on one name", contestants, server.url, rounds=rounds)
    ours = found[OURS]
    return [
        Goal("etcd contended: grants/s ÷ etcd3gw's", ours.per_second / found[GATEWAY].per_second, 4, at_most=False),
        Goal("etcd contended: the most uneven process, % of the mean", ours.uneven * 100, 5),
    ]
