"""Eight processes on one name, on ZooKeeper, compared with kazoo's lock and a bare socket. tooz's lock is kazoo's."""

from __future__ import annotations

from bench import zookeeper_peers as peers
from bench.contended import PROCESSES, Make, compare
from bench.harness import Goal
from tests.servers.zookeeper import ZooKeeper

OURS = "fencelock"
KAZOO = "kazoo Lock"
WARM_UP = 5.0
"""Seconds that each contestant runs first, so that Java has compiled the server's code before the measurement."""
BARE = "bare sockets, no library (the bound)"


def main(rounds: int) -> list[Goal]:
    contestants: dict[str, Make] = {OURS: peers.ours, KAZOO: peers.kazoo, BARE: peers.raw}
    with ZooKeeper(settings=peers.SETTINGS, environment=peers.JVM) as server:
        title = f"ZooKeeper, {PROCESSES} processes on one name, empty body"
        found = compare(title, contestants, server.url, rounds=rounds, warm_up=WARM_UP)
    ratio = found[OURS].over(found[KAZOO])
    return [
        Goal("ZooKeeper contended: grants per second ÷ kazoo Lock's", ratio, 1.2, at_most=False),
        Goal("ZooKeeper contended: the most uneven process, % of the mean", found[OURS].uneven * 100, 5),
    ]
