"""Idempotency keys without a transaction: a lock, and a record that is fenced by its token."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import GuaranteeUnavailable, InvalidType, KeyInProgress, KeyReused, StaleToken, aio
from fencelock.aio.lockfree import idempotency as aio_idempotency
from fencelock.lockfree.idempotency import IdempotencyKey, ResultTooLarge
from tests.lockfree.databases import children
from tests.servers.redis import Redis

CRASH = """
import fencelock
from fencelock.lockfree.idempotency import IdempotencyKey
with fencelock.connect(args[0], ttl=1) as locks:
    with IdempotencyKey(locks, args[1], payload="pay"):
        print(0, flush=True)
        sys.stdin.readline()
"""


def pay(locks: fencelock.Locks, key: str, payload: Any = "pay", **options: Any) -> tuple[bool, Any]:
    """Do the work of a key once."""
    with IdempotencyKey(locks, key, payload=payload, **options) as run:
        if not run.replayed:
            run.result = {"charged": 10}
    return run.replayed, run.result


def test_work_is_done_once(redis_node: Redis, key: str) -> None:
    """The first run does the work, a replay gets its result, another payload is refused; the lock is released each time."""
    with fencelock.connect(redis_node.url) as locks, fencelock.connect(redis_node.url) as others:
        assert pay(locks, key) == (False, {"charged": 10})
        assert pay(others, key) == (True, {"charged": 10})
        with pytest.raises(KeyReused):
            pay(others, key, "something else")
        with pytest.raises(ZeroDivisionError), IdempotencyKey(locks, key + "!", payload=1):
            raise ZeroDivisionError
        assert pay(others, key + "!", payload=1) == (False, {"charged": 10})
        assert list(locks.names(prefix="idempotency:")) == []


async def test_work_is_done_once_awaited(redis_node: Redis, key: str) -> None:
    """In asyncio, with a block and with the decorator, the work is done once."""
    calls = 0

    @aio_idempotency.idempotent("{name}", connection="locks")
    async def charge(locks: aio.Locks, name: str) -> int:
        nonlocal calls
        calls += 1
        return 10

    async with aio.connect(redis_node.url) as locks:
        assert [await charge(locks, key), await charge(locks, key)] == [10, 10]
        with pytest.raises(InvalidType, match=r"use fencelock\.aio\.lockfree"):
            with IdempotencyKey(locks, key):
                pass
    assert calls == 1


def test_key_in_progress_instead_of_waiting() -> None:
    """With wait=False a second run gets KeyInProgress."""
    with fencelock.connect("memory://busy") as locks, IdempotencyKey(locks, "x"):
        for wait in (False, 0.01):
            with pytest.raises(KeyInProgress):
                pay(locks, "x", wait=wait)


def test_crashed_run_is_taken_over(redis_node: Redis, databases: Any, key: str) -> None:
    """Another run takes over from a killed one with a higher token, and only after the lease has ended."""
    with children() as make, fencelock.connect(redis_node.url) as locks:
        crashing = make(databases("sqlite"), CRASH, redis_node.url, key)
        assert crashing.read_json() == 0
        crashing.kill()
        with pytest.raises(KeyReused):  # what crashed was about something else
            pay(locks, key, "something else")
        assert pay(locks, key) == (False, {"charged": 10})
        assert pay(locks, key) == (True, {"charged": 10})


def test_late_result_is_refused() -> None:
    """A run that lost its lease to another does not write over its result."""

    def finish(locks: fencelock.Locks) -> None:
        with IdempotencyKey(locks, "x") as quick:
            quick.result = "quick"

    with fencelock.connect("memory://late") as locks:
        with pytest.raises(StaleToken, match="another run with token"):
            with IdempotencyKey(locks, "x") as slow:
                locks.force_release("idempotency:x", reason="a test")
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(finish, locks).result()
                slow.result = "slow"
        with IdempotencyKey(locks, "x") as run:
            assert run.result == "quick"


def test_engine_without_records() -> None:
    """An engine that keeps no records is refused."""
    with fencelock.connect("redlock://localhost:1,localhost:2,localhost:3") as locks:
        with pytest.raises(GuaranteeUnavailable, match="keeps records"):
            pay(locks, "x")


def test_result_is_json() -> None:
    """A result that JSON cannot represent is refused at the end of the block, and the next run does the work."""
    with fencelock.connect("memory://json") as locks:
        with pytest.raises(TypeError), IdempotencyKey(locks, "x") as run:
            run.result = object()
        assert pay(locks, "x", None) == (False, json.loads('{"charged": 10}'))


@pytest.mark.parametrize("url", ["memory://large", "sqlite", "redis"])
def test_result_too_large_to_store_is_not_computed_again(
    redis_node: Redis, tmp_path: Path, url: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run ends as usual; a replay knows that the work was done, and says why it has no result."""
    url = {"redis": redis_node.url, "sqlite": f"sqlite:{tmp_path}/locks.db"}.get(url, url)
    large = "x" * 256 * 1024
    with fencelock.connect(url) as locks:
        with IdempotencyKey(locks, key, payload=1) as run:
            run.result = large
        assert (run.replayed, run.result) == (False, large)
        assert f"the result of {key!r} has 262" in caplog.text
        with IdempotencyKey(locks, key, payload=1, wait=False) as run:
            assert run.replayed
        with pytest.raises(ResultTooLarge, match="do not do it again") as caught:
            print(run.result)
        assert caught.value.name == key
        with pytest.raises(KeyReused), IdempotencyKey(locks, key, payload=2):
            pytest.fail("this is another payload")


async def test_decorated_function_with_a_result_too_large_runs_once(key: str) -> None:
    """The first call returns the result, and the second one raises instead of running again."""
    calls = 0

    @aio_idempotency.idempotent("{name}", connection="locks")
    async def report(locks: aio.Locks, name: str) -> str:
        nonlocal calls
        calls += 1
        return "x" * 300_000

    async with aio.connect("memory://large-decorated") as locks:
        assert len(await report(locks, key)) == 300_000
        with pytest.raises(ResultTooLarge):
            await report(locks, key)
    assert calls == 1
