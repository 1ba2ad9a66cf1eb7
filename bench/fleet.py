"""A fleet: waiters for a rebuilt value and stale reads beside a rebuild on Redis, and rate limits of 16 processes."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fencelock
from bench.harness import Goal
from tests.servers import Etcd, Redis, ZooKeeper
from tests.servers.mariadb import sql_server

PROCESSES, THREADS = 8, 25
"""Processes that wait, and threads in each: 200 waiters in total."""
FLEET = 16
LIMIT, BURST, SECONDS = 400, 20, 3.0
FASTEST = 10**6
"""Calls a second that no engine serves: such a limit never waits."""
READS = 2000


def main(rounds: int) -> list[Goal]:
    with Redis() as server:
        goals = [*rebuilt_value(server.url, rounds), *stale_reads(server.url, rounds), *rate_limit(server.url)]
    return [*goals, *compare_and_set()]


@contextmanager
def fleet(size: int, target: Callable[[str, Any], None], url: str) -> Iterator[list[Any]]:
    """Start processes; yield a pipe to each of them."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [context.Process(target=target, args=(url, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    try:
        yield [ours for ours, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---------------------------------------------------------------------- 200 waiters


def rebuilt_value(url: str, rounds: int) -> list[Goal]:
    """Measure the time from the end of a build, before its store, to the return of the last of 200 waiters."""
    delays = []
    with fencelock.connect(url) as locks, fleet(PROCESSES, wait_for_values, url) as pipes:
        for number in range(rounds + 1):
            key = f"report:{number}"
            built = 0.0

            def build(key: str = key) -> str:
                nonlocal built
                for pipe in pipes:
                    pipe.send(key)
                for pipe in pipes:
                    pipe.recv()  # all its threads are about to call
                while len(locks.inspect(f"cache:{key}").waiters) < PROCESSES:
                    time.sleep(0.005)
                time.sleep(0.05)
                built = time.monotonic()
                return "v" * 1000

            locks.single_flight(key, build, ttl=60)
            last = max(pipe.recv() for pipe in pipes)
            delays.append((last - built) * 1000)
    delays = delays[1:]  # the first one connects
    low, median, high = statistics.quantiles(delays, n=4)
    print(
        f"\nRedis, {PROCESSES * THREADS} waiters in {PROCESSES} processes: from the build to the last return"
        f"\n  median {median:.1f} ms, quartiles {low:.1f} … {high:.1f} ms, longest {max(delays):.1f} ms"
    )
    return [Goal("single flight on Redis: 200 waiters have the rebuilt value, ms", median, 50)]


def wait_for_values(url: str, pipe: Any) -> None:
    with fencelock.connect(url) as locks:
        while True:
            key = pipe.recv()
            ready, ends = threading.Barrier(THREADS + 1), [0.0] * THREADS

            def wait(thread: int, key: str, ready: threading.Barrier, ends: list[float]) -> None:
                ready.wait()
                locks.single_flight(key, lambda: "own", ttl=60)
                ends[thread] = time.monotonic()

            threads = [threading.Thread(target=wait, args=(thread, key, ready, ends)) for thread in range(THREADS)]
            for thread in threads:
                thread.start()
            ready.wait()
            pipe.send(None)
            for thread in threads:
                thread.join()
            pipe.send(max(ends))


# ---------------------------------------------------------------------- stale reads


def stale_reads(url: str, rounds: int) -> list[Goal]:
    """Compare the p99 of reads of a fresh value with that of reads of a stale one that is being rebuilt all the time."""
    fresh, stale = [], []

    def slow_build() -> str:
        time.sleep(0.3)
        return "v" * 100

    with fencelock.connect(url) as locks:
        for _ in range(max(3, rounds // 4)):
            fresh.append(p99(lambda: locks.single_flight("fresh", slow_build, ttl=3600)))
            stale.append(p99(lambda: locks.single_flight("stale", slow_build, ttl=0.001, stale=3600)))
        time.sleep(0.5)  # the last rebuild ends before the client is closed
    ratio = statistics.median(mine / theirs for mine, theirs in zip(stale, fresh, strict=True))
    print(
        f"\nRedis, p99 of {READS} reads of a cached value\n  fresh, no rebuild {statistics.median(fresh):.0f} µs, "
        f"stale during rebuilds {statistics.median(stale):.0f} µs"
    )
    return [Goal("single flight on Redis: p99 of stale reads during a rebuild ÷ of fresh reads", ratio, 1.25)]


def p99(read: Callable[[], object]) -> float:
    read()
    times = []
    for _ in range(READS):
        start = time.perf_counter()
        read()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[int(READS * 0.99)]


# ---------------------------------------------------------------------- rate limit


def rate_limit(url: str) -> list[Goal]:
    """Count the calls of 16 processes in every second, and how much of n they use."""
    with fleet(FLEET, call_limited, url) as pipes:
        times = limited_calls(pipes, LIMIT, BURST)
    first, most = 0, 0
    for last, moment in enumerate(times):
        while times[first] <= moment - 1.0:
            first += 1
        most = max(most, last - first + 1)
    used = share_used(times, LIMIT, BURST)
    print(
        f"\nRedis, rate limit of {LIMIT} a second and a burst of {BURST}, {FLEET} processes, {SECONDS:g} s\n"
        f"  at most {most} calls in any second (n + burst = {LIMIT + BURST}), {used:.1%} of n used"
    )
    return [
        Goal("rate limit on Redis, 16 processes: calls in the fullest second ÷ (n + burst)", most / (LIMIT + BURST), 1),
        Goal("rate limit on Redis, 16 processes: share of n that is used", used, 0.95, at_most=False),
    ]


def compare_and_set() -> list[Goal]:
    """Measure the rate limit on the engines that charge it by compare and set: the share of n used, and the fastest rate."""
    print(f"\nRate limit by compare and set: share of n used by {FLEET} processes, and calls a second without a limit")
    goals = []
    for title, start in (("MySQL", sql_server), ("ZooKeeper", ZooKeeper), ("etcd", Etcd)):
        with start() as server, fleet(FLEET, call_limited, server.url) as pipes:
            used = {n: share_used(limited_calls(pipes, n, n // 4), n, n // 4) for n in (20, 100, 200, 400)}
            rates = [len(limited_calls(pipes[:size], FASTEST, FASTEST)) / SECONDS for size in (1, FLEET)]
        shares = ", ".join(f"n = {n}: {share:.1%}" for n, share in used.items())
        print(f"  {title:9} {shares}; 1 process {rates[0]:.0f}, {FLEET} processes {rates[1]:.0f} calls/s")
        goals.append(Goal(f"rate limit on {title}, 16 processes: share of n = 20 used", used[20], 0.95, at_most=False))
    return goals


def limited_calls(pipes: list[Any], n: int, burst: int) -> list[float]:
    """Let processes call as often as a limit allows; return the times of the calls."""
    for pipe in pipes:
        pipe.send((f"{n}-{len(pipes)}", n, burst))
    for pipe in pipes:
        pipe.recv()  # it is connected
    begin = time.monotonic() + 0.1
    for pipe in pipes:
        pipe.send(begin)
    return sorted(moment for pipe in pipes for moment in pipe.recv())


def share_used(times: list[float], n: int, burst: int) -> float:
    return (len(times) - burst) / (n * (times[-1] - times[0]))


def call_limited(url: str, pipe: Any) -> None:
    with fencelock.connect(url) as locks:
        while True:
            name, n, burst = pipe.recv()
            limit = locks.rate_limit(name, n, per=1.0, burst=burst)
            limit.state()
            pipe.send(None)
            begin = pipe.recv()
            time.sleep(max(0.0, begin - time.monotonic()))
            times = []
            while time.monotonic() < begin + SECONDS:
                limit.acquire()
                times.append(time.monotonic())
            pipe.send(times)
