"""An uncontended acquire and release over five Redis nodes, beside the same on one, with and without a dead node.

A node can be dead in two ways that no refused connection tells of: a network that swallows everything, and a process
that is stopped. The first time-out falls into the warm-up: what is measured is every pair after it.

Twice: with the nodes on a core of their own, as they are on other machines as a rule; and wherever the system puts them.
Client and node come to share a core then, so that a pair on one node wakes no other core and is three times as fast. Five
nodes on two cores cannot be, so there the bare scripts on five nodes are what is compared with: docs/decisions, 16.
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
    # Six, for the node that is stopped is a stranger to the others.
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
    # Its loop is what a pair takes longest for, so the goal can be held wherever the nodes are.
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
        run(1)  # a node dies under clients that know it
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
