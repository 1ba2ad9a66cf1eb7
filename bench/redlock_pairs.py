"""An uncontended acquire and release over five Redis nodes, compared with one node, with and without a dead node.

A node can fail without refusing connections: the network drops all packets, or the process is stopped. The first timeout
happens in the warm-up; the measured pairs come after it.

It runs twice: with the nodes on a core of their own, as they usually run on other machines; and on the cores that the
system chooses. There the client and a single node often share a core, so a pair on one node wakes no other core and is
three times as fast. Five nodes cannot share one core in this way, so the second run compares with the bare scripts on five
nodes (docs/decisions, 14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from bench import redis_peers as peers
from bench.harness import Goal, Run, Timing, interleaved, one_core, other_core, show, with_async_lock, with_lock
from tests.servers import Proxy, Redis, RedisNodes

NODES = 5
BARE_ONE = "fenced scripts, bare, 1 node"
BARE_FIVE = f"fenced scripts, bare, {NODES} nodes"
ONE = "fencelock, 1 node"
FIVE = f"fencelock, {NODES} nodes"
CUT_OFF = f"fencelock, {NODES} nodes, 1 cut off"
STOPPED = f"fencelock, {NODES} nodes, 1 stopped"
Judge = Callable[[str, Mapping[str, Timing]], list[Goal]]


def main(rounds: int) -> list[Goal]:
    with ExitStack() as started:
        with one_core():
            nodes, proxy = start(started)
        with other_core():
            goals = contest("nodes on a core of their own", nodes, proxy, rounds, beside_one_node)
    with ExitStack() as started:
        nodes, proxy = start(started)
        return goals + contest("any core", nodes, proxy, rounds, beside_bare_scripts)


def start(started: ExitStack) -> tuple[RedisNodes, Proxy]:
    # One more than NODES: the node that is stopped is not one of the healthy five.
    nodes = started.enter_context(RedisNodes(NODES + 1, settings=peers.SETTINGS))
    return nodes, started.enter_context(Proxy(nodes.members[NODES - 1]))


def contest(where: str, nodes: RedisNodes, proxy: Proxy, rounds: int, judge: Judge) -> list[Goal]:
    *healthy, stopped = nodes.members
    four = ",".join(node.address for node in healthy[:-1])
    urls = {
        ONE: healthy[0].url,
        FIVE: nodes.url_at(f"{four},{healthy[-1].address}"),
        CUT_OFF: nodes.url_at(f"{four},{proxy.address}"),
        STOPPED: nodes.url_at(f"{four},{stopped.address}"),
    }
    goals = judge(f"blocking, {where}", measure(f"blocking, {where}", blocking(urls, healthy), proxy, stopped, rounds))
    aio = peers.Aio()
    contestants = asynchronous(aio, urls, healthy)
    # The event loop takes most of the time of a pair, so the same goal applies on any core.
    goals += beside_one_node(f"asyncio, {where}", measure(f"asyncio, {where}", contestants, proxy, stopped, rounds))
    aio.close()
    return goals


def blocking(urls: Mapping[str, str], healthy: Sequence[Redis]) -> dict[str, Run]:
    locks = {name: peers.ours(url) for name, url in urls.items()}
    locks[f"pottery Redlock, {NODES} nodes (no token)"] = peers.pottery(*(node.url for node in healthy))
    contestants = {BARE_ONE: peers.bare(healthy[0]), BARE_FIVE: peers.bare(*healthy)}
    return contestants | {name: with_lock(lock) for name, lock in locks.items()}


def asynchronous(aio: peers.Aio, urls: Mapping[str, str], healthy: Sequence[Redis]) -> dict[str, Run]:
    locks = {name: aio.ours(url) for name, url in urls.items()}
    locks[f"pottery AIORedlock, {NODES} nodes (no token)"] = aio.pottery(*(node.url for node in healthy))
    contestants = {BARE_ONE: aio.bare(healthy[0]), BARE_FIVE: aio.bare(*healthy)}
    return contestants | {name: with_async_lock(lock, aio.loop) for name, lock in locks.items()}


def measure(
    runtime_name: str, contestants: dict[str, Run], proxy: Proxy, stopped: Redis, rounds: int
) -> Mapping[str, Timing]:
    for run in contestants.values():
        run(1)  # each client has connected before the nodes fail
    proxy.drop()
    stopped.pause()
    timings = interleaved(contestants, rounds, repetitions=50)
    stopped.resume()
    proxy.heal()
    show(f"Redlock, uncontended acquire + release, {runtime_name}", timings, base=ONE)
    return timings


def beside_one_node(runtime_name: str, timings: Mapping[str, Timing]) -> list[Goal]:
    one = timings[ONE]
    return [
        Goal(f"Redlock, {runtime_name}: pair on {NODES} nodes ÷ on one", timings[FIVE].over(one), 2.5),
        Goal(f"Redlock, {runtime_name}: pair with a node cut off ÷ on one node", timings[CUT_OFF].over(one), 3.0),
        Goal(f"Redlock, {runtime_name}: pair with a node stopped ÷ on one node", timings[STOPPED].over(one), 3.0),
    ]


def beside_bare_scripts(runtime_name: str, timings: Mapping[str, Timing]) -> list[Goal]:
    bare = timings[BARE_FIVE]
    return [
        Goal(f"Redlock, {runtime_name}: pair on {NODES} nodes ÷ bare scripts there", timings[FIVE].over(bare), 1.35)
    ]
