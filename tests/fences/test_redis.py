"""The Redis fence, blocking and asyncio, and in pipelines, on a real server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from fencelock import InvalidType, StaleToken
from fencelock.aio.fences import redis as aio_redis
from fencelock.fences import redis as fence_module
from tests.fences.fake_lease import fake_lease
from tests.servers.redis import Redis


class Client:
    """A fence and its client, blocking or of asyncio."""

    def __init__(self, url: str, runtime_name: str, **options: Any) -> None:
        self.runner = asyncio.Runner()
        module: Any = redis.asyncio if runtime_name == "asyncio" else redis
        self.client = module.Redis.from_url(url, **options)
        self.fence_class: Any = (aio_redis if runtime_name == "asyncio" else fence_module).RedisFence
        self.fence = self.fence_class(self.client)
        self.do(self.client.flushdb())

    def do(self, outcome: Any) -> Any:
        return self.runner.run(_await(outcome)) if inspect.isawaitable(outcome) else outcome

    def close(self) -> None:
        self.do(self.client.aclose() if hasattr(self.client, "aclose") else self.client.close())
        self.runner.close()


async def _await(outcome: Any) -> Any:
    return await outcome


@pytest.fixture(params=["blocking", "asyncio"])
def one(request: pytest.FixtureRequest, redis_node: Redis) -> Iterator[Client]:
    """A client with an empty database."""
    caller = Client(f"redis://{redis_node.address}/9996", request.param)
    yield caller
    caller.close()


def test_fenced_commands(one: Client) -> None:
    """SET, HSET and DEL work for the newest holder, with the replies of the commands, and for no older one."""
    fence, do = one.fence, one.do
    do(fence.enter(fake_lease(33), "stock"))
    do(fence.enter(fake_lease(34), "stock"))
    assert do(fence.set(fake_lease(34), "apples", 95, resource="stock", px=60000)) in (b"OK", "OK", True)
    assert do(fence.hset(fake_lease(34), "sold", {"apples": 5, "pears": 1}, resource="stock")) == 2
    assert do(one.client.pttl("apples")) > 0
    for stale in (fake_lease(33), fake_lease(34, "another claim")):
        for write in (
            partial(fence.set, stale, "apples", 0, resource="stock"),
            partial(fence.hset, stale, "sold", {"apples": 0}, resource="stock"),
            partial(fence.delete, stale, "apples", "sold", resource="stock"),
            partial(fence.enter, stale, "stock"),
        ):
            with pytest.raises(StaleToken, match="'stock' refused token") as caught:
                do(write())
            assert (caught.value.token, caught.value.seen, caught.value.name) == (stale.token, 34, "stock")
    assert do(one.client.get("apples")) == b"95"
    assert do(one.client.hgetall("sold")) == {b"apples": b"5", b"pears": b"1"}
    assert do(fence.delete(fake_lease(35), "apples", "sold", "pears", resource="stock")) == 2


def test_run_a_script(one: Client) -> None:
    """A script sees its own keys and arguments; replies and errors come back unchanged, also after SCRIPT FLUSH."""
    script = "return {#KEYS, #ARGV, KEYS[1], ARGV[1], redis.call('INCRBY', KEYS[1], ARGV[1])}"
    answer: Any = None
    for _ in range(2):
        answer = one.do(one.fence.run(fake_lease(34), script, ["apples"], [10], resource="stock"))
        assert answer[:4] == [1, 1, b"apples", b"10"]
        one.do(one.client.script_flush())
    assert answer[4] == 20
    flagged = "#!lua flags=allow-oom\nreturn ARGV[1]"
    assert one.do(one.fence.run(fake_lease(34), flagged, resource="stock", args=["as it was"])) == b"as it was"
    with pytest.raises(redis.ResponseError, match="no good"):
        one.do(one.fence.run(fake_lease(34), "return redis.error_reply('ERR no good')", resource="stock"))
    with pytest.raises(StaleToken):
        one.do(one.fence.run(fake_lease(33), script, ["apples"], [10], resource="stock"))
    assert one.do(one.client.get("apples")) == b"20"


def test_pipeline(one: Client) -> None:
    """Fenced writes join a pipeline, and its refusal is a StaleToken."""
    fenced: Any = None
    for lease, refused in ((fake_lease(34), False), (fake_lease(33), True)):
        pipeline = one.client.pipeline()
        fenced = one.fence.pipeline(lease, pipeline, "stock")
        fenced.set("apples", lease.token)
        fenced.hset("sold", {"apples": lease.token})
        if refused:
            results = one.do(pipeline.execute(raise_on_error=False))
            assert all("STALETOKEN 33 is refused" in str(result) for result in results)
            fenced.set("apples", lease.token)
            with pytest.raises(StaleToken, match="refused token 33"), fenced.refusals():
                one.do(pipeline.execute())
        else:
            assert one.do(pipeline.execute()) == [b"OK", 1]
    assert one.do(one.client.get("apples")) == b"34"
    assert one.do(one.client.hget("sold", "apples")) == b"34"
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"), fenced.refusals():
        one.do(one.client.incr("sold"))


def test_rebase_and_prune(one: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A fence can be moved, with a log entry; pruned and unknown resources refuse tokens below min_token."""
    fence, do = one.fence, one.do
    assert do(fence.token("stock")) is None
    for resource, token in [("a", 10), ("b*[?]", 20), ("c", 30)]:
        do(fence.enter(fake_lease(token), resource))
    do(fence.rebase("c", 5, reason="another engine"))
    assert "the fence of 'c' was moved from token 30 to token 5: another engine" in caplog.text
    do(fence.enter(fake_lease(5), "c"))
    do(fence.enter(fake_lease(40), "c"))
    assert do(fence.prune(25)) == 2
    with caplog.at_level("INFO", "fencelock.fences"):
        assert do(fence.prune(15)) == 0
    assert "tokens below 25 are refused" in caplog.text  # not 15
    for resource in ("a", "b*[?]", "never seen"):
        with pytest.raises(StaleToken):
            do(fence.enter(fake_lease(24), resource))
        assert do(fence.token(resource)) == 25
        do(fence.enter(fake_lease(25), resource))
    assert do(fence.token("c")) == 40


def test_client_that_decodes_replies(redis_node: Redis) -> None:
    """The fence works with a client that decodes replies."""
    caller = Client(f"redis://{redis_node.address}/9996", "blocking", decode_responses=True)
    caller.fence.set(fake_lease(34, "ö 7"), "apples", 1, resource="stock")
    assert caller.fence.token("stock") == 34
    with pytest.raises(StaleToken):
        caller.fence.set(fake_lease(33), "apples", 1, resource="stock")
    caller.close()


def test_no_extra_round_trip(one: Client) -> None:
    """From the second time on, a fenced write is one command."""
    one.do(one.fence.set(fake_lease(34), "apples", 1, resource="stock"))
    before = one.do(one.client.info("commandstats"))
    one.do(one.fence.set(fake_lease(34), "apples", 2, resource="stock"))
    after = one.do(one.client.info("commandstats"))
    asked = {
        name.removeprefix("cmdstat_"): stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
    }
    assert {name: calls for name, calls in asked.items() if calls} == {"evalsha": 1, "hmget": 1, "set": 1, "info": 1}


def test_thousands_of_keys_and_fields(one: Client) -> None:
    """The fence writes thousands of fields and keys in one atomic step, and returns the replies of the commands."""
    fence, do = one.fence, one.do
    fields = {f"field {number}": number for number in range(10_000)}
    assert do(fence.hset(fake_lease(34), "hash", fields, resource="stock")) == 10_000
    assert do(fence.hset(fake_lease(34), "hash", {**fields, "one": "more"}, resource="stock")) == 1
    assert do(one.client.hlen("hash")) == 10_001
    do(one.client.mset({f"key {number}": number for number in range(10_000)}))
    assert (
        do(fence.delete(fake_lease(34), "hash", *(f"key {number}" for number in range(10_000)), resource="stock"))
        == 10_001
    )
    with pytest.raises(StaleToken):
        do(fence.hset(fake_lease(33), "hash", fields, resource="stock"))
    assert do(one.client.exists("hash")) == 0


def test_marks_need_a_key(one: Client) -> None:
    """An empty key is refused when the fence is made."""
    with pytest.raises(ValueError, match="key of their own"):
        one.fence_class(one.client, key="")


def test_prune_spares_fences_with_a_longer_key(one: Client) -> None:
    """Fences whose keys begin alike share neither marks nor min_token, and prune only their own."""
    short, long = (one.fence_class(one.client, key=key) for key in ("a:", "a:b:"))
    one.do(long.enter(fake_lease(5), "x"))
    assert one.do(short.token("b:x")) is None
    assert one.do(long.prune(10)) == 1
    one.do(long.enter(fake_lease(20), "y"))
    assert one.do(short.prune(100)) == 0
    assert [one.do(long.token(resource)) for resource in ("x", "y")] == [10, 20]
    with pytest.raises(StaleToken):
        one.do(long.enter(fake_lease(5), "x"))


def test_rebase_all(one: Client, caplog: pytest.LogCaptureFixture) -> None:
    """All marks and min_token move to one token, with one log entry, and lower tokens are refused from there on."""
    fence, do = one.fence, one.do
    for resource, token in [("a", 1000), ("b", 2000)]:
        do(fence.enter(fake_lease(token), resource))
    assert do(fence.rebase_all(50, reason="another engine")) == 2
    assert "the fences of 2 resources were moved to token 50: another engine" in caplog.text
    assert do(fence.token("unknown")) is None
    do(fence.prune(500))
    assert do(fence.rebase_all(60, reason="another engine")) == 0
    do(fence.enter(fake_lease(60), "a"))
    for resource in ("a", "unknown"):
        with pytest.raises(StaleToken):
            do(fence.enter(fake_lease(59), resource))


def test_the_other_half_refuses_the_client(one: Client) -> None:
    """A client of asyncio in the blocking API, and the reverse, is an error that names the other module."""
    awaited = one.fence_class is aio_redis.RedisFence
    other: Any = fence_module.RedisFence if awaited else aio_redis.RedisFence
    with pytest.raises(InvalidType, match=r"use fencelock\.aio\.fences" if awaited else r"use fencelock\.fences"):
        other(one.client)
