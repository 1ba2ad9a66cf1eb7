"""Eight processes on one name, on etcd, beside the peers and the bound, with an empty body.

etcd3gw's lock does not wait: `acquire()` says whether it was free, and its `with` block is entered in either case. What
counts as a grant is a yes, so it is asked until it says so. Its `with` block is in the table as it comes, and is no lock.
"""

from __future__ import annotations

from bench import etcd_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.etcd_bare import Baton
from bench.harness import Goal
from tests.servers import Etcd

OURS = "fencelock (first come, first served)"
BOUND = "bare hand-over (promises nothing)"
GATEWAY = "etcd3gw, asked until it says yes"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {
        OURS: peers.ours,
        BOUND: Baton,
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
