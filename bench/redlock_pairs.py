"""An uncontended acquire and release over five Redis nodes, beside the same on one, with and without a dead node.

A node can be dead in two ways that no refused connection tells of: a network that swallows everything, and a process
that is stopped. The first time-out falls into the warm-up: what is measured is every pair after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench import redis_peers as peers
from bench.harness import Goal, Run, interleaved, show, with_async_lock, with_lock
from tests.engines import Proxy, Redis, RedisNodes

NODES = 5
BARE_ONE = "fenced scripts, bare, 1 node"
BARE_FIVE = f"fenced scripts, bare, {NODES} nodes"
ONE = "fencelock, 1 node"
FIVE = f"fencelock, {NODES} nodes"
CUT_OFF = f"fencelock, {NODES} nodes, 1 cut off"
STOPPED = f"fencelock, {NODES} nodes, 1 stopped"


def main(rounds: int) -> list[Goal]:
    # Six, for the node that is stopped is a stranger to the others.
    with RedisNodes(NODES + 1, settings=peers.SETTINGS) as nodes, Proxy(nodes.members[NODES - 1]) as proxy:
        *healthy, stopped = nodes.members
        four = ",".join(node.address for node in healthy[:-1])
        urls = {
            ONE: healthy[0].url,
            FIVE: nodes.url_at(f"{four},{healthy[-1].address}"),
            CUT_OFF: nodes.url_at(f"{four},{proxy.address}"),
            STOPPED: nodes.url_at(f"{four},{stopped.address}"),
        }
        goals = measure("blocking", blocking(urls, healthy), proxy, stopped, rounds)
        aio = peers.Aio()
        goals += measure("asyncio", asynchronous(aio, urls, healthy), proxy, stopped, rounds)
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


def measure(colour: str, contestants: dict[str, Run], proxy: Proxy, stopped: Redis, rounds: int) -> list[Goal]:
    for run in contestants.values():
        run(1)  # a node dies under clients that know it
    proxy.drop()
    stopped.pause()
    timings = interleaved(contestants, rounds, repetitions=50)
    stopped.resume()
    proxy.heal()
    show(f"Redlock, uncontended acquire + release, {colour}", timings, base=ONE)
    one = timings[ONE]
    return [
        Goal(f"Redlock, {colour}: pair on {NODES} nodes ÷ on one", timings[FIVE].over(one), 2.5),
        Goal(f"Redlock, {colour}: pair with a node cut off ÷ on one node", timings[CUT_OFF].over(one), 3.0),
        Goal(f"Redlock, {colour}: pair with a node stopped ÷ on one node", timings[STOPPED].over(one), 3.0),
    ]
