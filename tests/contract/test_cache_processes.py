"""Single flight across processes: many callers, and builders that are killed or stopped."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import background
from tests.contract.worker import Worker
from tests.support.waiting import SOON, eventually

pytestmark = [pytest.mark.processes, pytest.mark.records]

PREPARE = """
import inspect, threading, time

async def result_of(value):
    return await value if inspect.isawaitable(value) else value

def builder(value, seconds):
    if inspect.iscoroutinefunction(locks.raw.close):
        async def build():
            open(log, "a").write(value + "\\n")
            await asyncio.sleep(seconds)
            return value
    else:
        def build():
            open(log, "a").write(value + "\\n")
            time.sleep(seconds)
            return value
    return build
"""
GET = "result = await result_of(locks.raw.single_flight('k', builder(value, seconds), ttl=60, lease_ttl=ttl_scale(1)))"
GET_MANY = """
if inspect.iscoroutinefunction(locks.raw.close):
    values = await asyncio.gather(*(locks.raw.single_flight('k', builder(value, 0.3), ttl=60) for _ in range(callers)))
else:
    values = []
    threads = [
        threading.Thread(target=lambda: values.append(locks.raw.single_flight('k', builder(value, 0.3), ttl=60)))
        for _ in range(callers)
    ]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
result = sorted(set(values)), len(values)
"""


async def start(factory: MakeClient, log: str) -> Worker:
    worker = await factory.worker()
    await worker.do(PREPARE)
    await worker.do("result = None", log=log)
    return worker


def builds(log: str) -> list[str]:
    with open(log, encoding="utf-8") as file:
        return file.read().split()


@pytest.fixture
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("builds") / "log"
    path.touch()
    return str(path)


@pytest.mark.parametrize(("processes", "callers"), [(4, 15), pytest.param(8, 25, marks=pytest.mark.long)])
async def test_many_callers_in_several_processes_share_one_build(
    factory: MakeClient, log: str, processes: int, callers: int
) -> None:
    """All callers of all processes (the long form: 200 in 8) get the value of one build."""
    workers = await asyncio.gather(*(start(factory, log) for _ in range(processes)))
    answers = await asyncio.gather(
        *(worker.do(GET_MANY, value=f"w{number}", callers=callers) for number, worker in enumerate(workers))
    )
    (built,) = builds(log)
    assert answers == [[[built], callers]] * processes


async def test_killed_builder_is_replaced_once(factory: MakeClient, locks: LocksView, log: str) -> None:
    """Exactly one waiter replaces a killed builder, after its ttl."""
    first, *others = [await start(factory, log) for _ in range(3)]
    async with background(first.do(GET, value="killed", seconds=60)) as (_,):

        async def began() -> bool:
            return builds(log) == ["killed"]

        await eventually(began, "the first build has begun")
        async with background(*(worker.do(GET, value="second", seconds=0) for worker in others)) as waiting:

            async def queued() -> bool:
                return len((await locks.inspect("cache:k")).waiters) == 2

            await eventually(queued, "the others wait")
            await first.kill()
            assert [await task for task in waiting] == ["second", "second"]
    assert builds(log) == ["killed", "second"]


async def test_stopped_builder_does_not_overwrite_a_newer_value(
    factory: MakeClient, locks: LocksView, log: str
) -> None:
    """A builder that is stopped past its ttl and then resumed does not overwrite the value of the next builder."""
    first, second = [await start(factory, log) for _ in range(2)]
    async with background(first.do(GET, value="late", seconds=0.5)) as (building,):

        async def began() -> bool:
            return builds(log) == ["late"]

        await eventually(began, "the first build has begun")
        first.stop()
        assert await second.do(GET, value="newer", seconds=0) == "newer"
        first.resume()
        assert await asyncio.wait_for(building, SOON) in ("late", "newer")
    assert await second.do(GET, value="third", seconds=0) == "newer"
    assert builds(log) == ["late", "newer"]
