"""Rate limits and cached values on Redis, compared with `limits`, `pyrate-limiter`, `dogpile.cache` and bare commands."""

from __future__ import annotations

from typing import Any

import dogpile.cache
import limits
import pyrate_limiter
import redis
from pyrate_limiter.buckets import RedisBucket

import fencelock
from bench.harness import Goal, Run, interleaved, show
from tests.servers import Redis

OURS_LIMIT, LIMITS = "fencelock rate_limit.try_acquire", "limits, moving window"
OURS_CACHE, GET = "fencelock single_flight, fresh", "GET with redis-py, bare"
PLENTY = 1_000_000


def main(rounds: int) -> list[Goal]:
    with Redis() as server, fencelock.connect(server.url) as locks:
        limit_timings = interleaved(
            {
                OURS_LIMIT: repeated(locks.rate_limit("ours", PLENTY, burst=PLENTY).try_acquire),
                LIMITS: repeated(_limits(server.url)),
                "pyrate-limiter": repeated(_pyrate(server.url)),
            },
            rounds,
            repetitions=50,
        )
        show("Redis, one call under a rate limit", limit_timings, base=LIMITS)
        client = redis.Redis.from_url(server.url)
        client.set("value", b"v" * 100)
        cache_timings = interleaved(
            {
                GET: repeated(lambda: client.get("value")),
                OURS_CACHE: repeated(lambda: locks.single_flight("value", lambda: "v" * 100, ttl=3600)),
                "dogpile.cache, fresh": repeated(_dogpile(server)),
            },
            rounds,
            repetitions=50,
        )
        show("Redis, one read of a fresh cached value", cache_timings, base=GET)
        client.close()
    return [
        Goal("rate limit on Redis: try_acquire ÷ limits'", limit_timings[OURS_LIMIT].over(limit_timings[LIMITS]), 0.8),
        Goal(
            "single flight on Redis: a fresh read ÷ a bare GET", cache_timings[OURS_CACHE].over(cache_timings[GET]), 1.2
        ),
    ]


def repeated(function: Any) -> Run:
    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            function()

    return run


def _limits(url: str) -> Any:
    limiter = limits.strategies.MovingWindowRateLimiter(limits.storage.storage_from_string(url))
    item = limits.RateLimitItemPerSecond(PLENTY)
    return lambda: limiter.hit(item, "theirs")


def _pyrate(url: str) -> Any:
    rate = pyrate_limiter.Rate(PLENTY, pyrate_limiter.Duration.SECOND)
    bucket = RedisBucket.init([rate], redis.Redis.from_url(url), "pyrate")
    limiter = pyrate_limiter.Limiter(bucket)
    return lambda: limiter.try_acquire("theirs")


def _dogpile(server: Redis) -> Any:
    region = dogpile.cache.make_region().configure(
        "dogpile.cache.redis", expiration_time=3600, arguments={"url": server.url, "distributed_lock": True}
    )
    return lambda: region.get_or_create("theirs", lambda: "v" * 100)
