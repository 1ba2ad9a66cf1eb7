"""Eight processes on one name, on etcd, beside the peers and the bound, with an empty body.

etcd3gw's lock does not wait: `acquire()` returns whether it got the lock, and its `with` block runs in either case. So the
benchmark repeats `acquire()` until it returns True. The table also has the `with` block unchanged, which excludes nobody.
"""

from __future__ import annotations

from bench import etcd_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.etcd_bare import BareLock
from bench.harness import Goal
from tests.servers import Etcd

OURS = "fencelock (first come, first served)"
BOUND = "bare hand-over (promises nothing)"
GATEWAY = "etcd3gw, acquire() repeated until True"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {
        OURS: peers.ours,
        BOUND: BareLock,
        GATEWAY: peers.etcd3gw_insistent,
        "etcd3gw's with block (excludes nobody)": peers.etcd3gw,
        "tooz (watches, barges)": peers.tooz,
    }
    with Etcd() as server:
        found = compare(f"etcd, {PROCESSES} processes on one name", contestants, server.url, rounds=rounds)
    ours = found[OURS]
    return [
        Goal("etcd contended: grants/s ÷ etcd3gw's", ours.over(found[GATEWAY]), 3, at_most=False),
        Goal("etcd contended: the most uneven process, % of the mean", ours.uneven * 100, 5),
    ]
