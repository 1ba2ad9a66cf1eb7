"""The Redis fence, in both colours and in pipelines, on a real server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from fencelock import StaleToken
from fencelock.fences.redis import RedisFence
from tests.fences.bearers import bearer
from tests.servers.redis import Redis


class Caller:
    """A fence and its client, of either colour."""

    def __init__(self, url: str, runtime_name: str, **options: Any) -> None:
        self.runner = asyncio.Runner()
        module: Any = redis.asyncio if runtime_name == "asyncio" else redis
        self.client = module.Redis.from_url(url, **options)
        self.fence = RedisFence(self.client)
        self.do(self.client.flushdb())

    def do(self, outcome: Any) -> Any:
        return self.runner.run(_await(outcome)) if inspect.isawaitable(outcome) else outcome

    def close(self) -> None:
        self.do(self.client.aclose() if hasattr(self.client, "aclose") else self.client.close())
        self.runner.close()


async def _await(outcome: Any) -> Any:
    return await outcome


@pytest.fixture(params=["blocking", "asyncio"])
def one(request: pytest.FixtureRequest, redis_node: Redis) -> Iterator[Caller]:
    """A caller with an empty database."""
    caller = Caller(f"redis://{redis_node.address}/9996", request.param)
    yield caller
    caller.close()


def test_fenced_commands(one: Caller) -> None:
    """SET, HSET and DEL are carried out for the newest, with the answers that the commands have, and for nobody older."""
    fence, do = one.fence, one.do
    do(fence.enter(bearer(33), "stock"))
    do(fence.enter(bearer(34), "stock"))
    assert do(fence.set(bearer(34), "apples", 95, resource="stock", px=60000)) in (b"OK", "OK", True)
    assert do(fence.hset(bearer(34), "sold", {"apples": 5, "pears": 1}, resource="stock")) == 2
    assert do(one.client.pttl("apples")) > 0
    for stale in (bearer(33), bearer(34, "somebody else")):
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
    assert do(fence.delete(bearer(35), "apples", "sold", "pears", resource="stock")) == 2


def test_a_script_of_ones_own(one: Caller) -> None:
    """A script sees its own keys and arguments; answers and errors come back as they are; SCRIPT FLUSH is no matter."""
    script = "return {#KEYS, #ARGV, KEYS[1], ARGV[1], redis.call('INCRBY', KEYS[1], ARGV[1])}"
    answer: Any = None
    for _ in range(2):
        answer = one.do(one.fence.run(bearer(34), script, ["apples"], [10], resource="stock"))
        assert answer[:4] == [1, 1, b"apples", b"10"]
        one.do(one.client.script_flush())
    assert answer[4] == 20
    flagged = "#!lua flags=allow-oom\nreturn ARGV[1]"
    assert one.do(one.fence.run(bearer(34), flagged, resource="stock", args=["as it was"])) == b"as it was"
    with pytest.raises(redis.ResponseError, match="no good"):
        one.do(one.fence.run(bearer(34), "return redis.error_reply('ERR no good')", resource="stock"))
    with pytest.raises(StaleToken):
        one.do(one.fence.run(bearer(33), script, ["apples"], [10], resource="stock"))
    assert one.do(one.client.get("apples")) == b"20"


def test_in_a_pipeline(one: Caller) -> None:
    """In a pipeline the writes go with it, and a refusal that comes out of its execution is a StaleToken."""
    for lease, refused in ((bearer(34), False), (bearer(33), True)):
        pipeline = one.client.pipeline()
        one.fence.set(lease, "apples", lease.token, resource="stock", on=pipeline)
        one.fence.hset(lease, "sold", {"apples": lease.token}, resource="stock", on=pipeline)
        if refused:
            results = one.do(pipeline.execute(raise_on_error=False))
            assert all("STALETOKEN 33 is refused" in str(result) for result in results)
            one.fence.set(lease, "apples", lease.token, resource="stock", on=pipeline)
            with pytest.raises(StaleToken, match="refused token 33"), one.fence.refusals(lease, "stock"):
                one.do(pipeline.execute())
        else:
            assert one.do(pipeline.execute()) == [b"OK", 1]
    assert one.do(one.client.get("apples")) == b"34"
    assert one.do(one.client.hget("sold", "apples")) == b"34"
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"), one.fence.refusals(bearer(34), "stock"):
        one.do(one.client.incr("sold"))


def test_moved_and_collected(one: Caller, caplog: pytest.LogCaptureFixture) -> None:
    """A fence can be moved, logged; what is collected refuses tokens below the floor, as does what was never seen."""
    fence, do = one.fence, one.do
    assert do(fence.token("stock")) is None
    for resource, token in [("a", 10), ("b*[?]", 20), ("c", 30)]:
        do(fence.enter(bearer(token), resource))
    do(fence.rebase("c", 5, reason="another engine"))
    assert "the fence of 'c' was moved from token 30 to token 5: another engine" in caplog.text
    do(fence.enter(bearer(5), "c"))
    do(fence.enter(bearer(40), "c"))
    assert do(fence.collect(25)) == 2
    with caplog.at_level("INFO", "fencelock.fences"):
        assert do(fence.collect(15)) == 0
    assert "tokens below 25 are refused" in caplog.text  # not 15
    for resource in ("a", "b*[?]", "never seen"):
        with pytest.raises(StaleToken):
            do(fence.enter(bearer(24), resource))
        assert do(fence.token(resource)) == 25
        do(fence.enter(bearer(25), resource))
    assert do(fence.token("c")) == 40


def test_text_answers(redis_node: Redis) -> None:
    """A client that decodes its answers is fine, too."""
    caller = Caller(f"redis://{redis_node.address}/9996", "blocking", decode_responses=True)
    caller.fence.set(bearer(34, "ö 7"), "apples", 1, resource="stock")
    assert caller.fence.token("stock") == 34
    with pytest.raises(StaleToken):
        caller.fence.set(bearer(33), "apples", 1, resource="stock")
    caller.close()


def test_no_extra_round_trip(one: Caller) -> None:
    """A fenced write is one command from its second time on."""
    one.do(one.fence.set(bearer(34), "apples", 1, resource="stock"))
    before = one.do(one.client.info("commandstats"))
    one.do(one.fence.set(bearer(34), "apples", 2, resource="stock"))
    after = one.do(one.client.info("commandstats"))
    asked = {
        name.removeprefix("cmdstat_"): stats["calls"] - before.get(name, {"calls": 0})["calls"]
        for name, stats in after.items()
    }
    assert {name: calls for name, calls in asked.items() if calls} == {"evalsha": 1, "hmget": 1, "set": 1, "info": 1}


def test_more_than_lua_can_hand_on(one: Caller) -> None:
    """Thousands of fields and keys are written in one atomic step, with the answers that the commands have."""
    fence, do = one.fence, one.do
    fields = {f"field {number}": number for number in range(10_000)}
    assert do(fence.hset(bearer(34), "hash", fields, resource="stock")) == 10_000
    assert do(fence.hset(bearer(34), "hash", {**fields, "one": "more"}, resource="stock")) == 1
    assert do(one.client.hlen("hash")) == 10_001
    do(one.client.mset({f"key {number}": number for number in range(10_000)}))
    assert (
        do(fence.delete(bearer(34), "hash", *(f"key {number}" for number in range(10_000)), resource="stock")) == 10_001
    )
    with pytest.raises(StaleToken):
        do(fence.hset(bearer(33), "hash", fields, resource="stock"))
    assert do(one.client.exists("hash")) == 0


def test_marks_need_a_key(one: Caller) -> None:
    """An empty key is refused when the fence is made."""
    with pytest.raises(ValueError, match="key of their own"):
        RedisFence(one.client, key="")


def test_a_collection_leaves_fences_with_a_longer_key_alone(one: Caller) -> None:
    """Fences whose keys begin with each other share neither marks nor floors, and collect only their own."""
    short, long = RedisFence(one.client, key="a:"), RedisFence(one.client, key="a:b:")
    one.do(long.enter(bearer(5), "x"))
    assert one.do(short.token("b:x")) is None
    assert one.do(long.collect(10)) == 1
    one.do(long.enter(bearer(20), "y"))
    assert one.do(short.collect(100)) == 0
    assert [one.do(long.token(resource)) for resource in ("x", "y")] == [10, 20]
    with pytest.raises(StaleToken):
        one.do(long.enter(bearer(5), "x"))
