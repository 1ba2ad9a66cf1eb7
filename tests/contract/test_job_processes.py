"""Jobs in several processes: clocks that differ, workers that are killed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fencelock.primitives.runs import as_datetime, slot_text
from tests.contract.factory import MakeClient
from tests.contract.jobs import nothing, once, schedule
from tests.contract.runtimes import LocksView
from tests.contract.worker import Worker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.records, pytest.mark.processes, pytest.mark.runtime_name("blocking")]

WATCH = """
import time
schedule = locks.raw.schedule("tick", every=every, overlap="wait", within=600)
schedule._schedule.clock = lambda: time.time() + skew

class Stop:  # slots run in order: the last one ends it, but not before it is due here, too
    def is_set(self):
        return time.time() + skew > end and last in open(path).read()

def work(slot):
    with open(path, "a") as file:
        file.write(f"{slot.slot}\\n")

schedule.run(work, Stop())
"""

HANG = """
import time

def work(slot):
    with open(path, "w") as file:
        file.write(str(slot.token))
    time.sleep(60)
"""


def content(path: Path) -> str:
    """Return what workers have written so far."""
    return path.read_text() if path.exists() else ""


async def runs_of_a_fleet(
    factory: MakeClient, path: Path, processes: int, slots: int, every: float, wrong: float
) -> None:
    """Let processes watch one schedule, with clocks that are up to `wrong` seconds off; each slot must run exactly once."""
    workers = await asyncio.gather(*(factory.worker() for _ in range(processes)))
    first = (time.time() + wrong + 3) // every * every  # after all of them watch, by whatever clock
    end = first + slots * every
    last = slot_text(as_datetime(round((end - every) * 1e6)))
    path.touch()  # noqa: ASYNC240
    skews = [wrong * (2 * number / (processes - 1) - 1) for number in range(processes)]
    await asyncio.gather(
        *(
            worker.do(WATCH, skew=skew, every=every, end=end, path=str(path), last=last)
            for worker, skew in zip(workers, skews, strict=True)
        )
    )
    ran = Counter(datetime.fromisoformat(line).timestamp() for line in content(path).split())
    counted = {slot: number for slot, number in ran.items() if first - every / 2 < slot < end - every / 2}
    assert len(counted) == slots
    assert set(ran.values()) == {1}


async def test_fleet_with_wrong_clocks(factory: MakeClient, tmp_path: Path) -> None:
    """Processes whose clocks differ by four seconds run each of 20 short slots exactly once between them."""
    await runs_of_a_fleet(factory, tmp_path / "runs", processes=4, slots=20, every=0.2, wrong=2.0)


@pytest.mark.long
async def test_large_fleet_with_wrong_clocks(factory: MakeClient, tmp_path: Path) -> None:
    """Fifty processes whose clocks differ by ten seconds run each of 100 slots exactly once between them."""
    await runs_of_a_fleet(factory, tmp_path / "runs", processes=50, slots=100, every=0.5, wrong=5.0)


async def hang(worker: Worker, source: str, path: Path, **values: Any) -> int:
    """Start a run in a worker that does not end; return its token once it runs."""
    task = asyncio.ensure_future(worker.do(HANG + source, path=str(path), **values))

    async def begun() -> bool:
        return content(path) != ""

    await eventually(begun, "the run has begun")
    worker.signal(9)
    await worker.ended()
    await asyncio.gather(task, return_exceptions=True)
    return int(content(path))


async def test_worker_of_once_is_killed(factory: MakeClient, locks: LocksView, tmp_path: Path) -> None:
    """A slot whose worker was killed does not run again; with two attempts it does, after its ttl, with a higher token."""
    worker = await factory.worker()
    token = await hang(
        worker, "locks.raw.once('bill', '1', ttl=ttl).run(work)", tmp_path / "x", ttl=factory.ttl_scale(0.5)
    )

    async def free() -> bool:
        return not (await locks.inspect("once:bill/1")).holders

    await eventually(free, "the lock of the dead worker runs out")
    assert await once(factory, locks, "bill", "1").run(nothing) is False
    async with once(factory, locks, "bill", "1", attempts=2) as slot:
        assert slot.attempt == 2
        assert slot.token > token
    assert await once(factory, locks, "bill", "1", attempts=2).run(nothing) is False


@pytest.mark.parametrize("attempts", [1, 2])
async def test_worker_of_a_schedule_is_killed(
    factory: MakeClient, locks: LocksView, tmp_path: Path, attempts: int
) -> None:
    """A slot whose worker was killed is abandoned. With two attempts, a process that waits runs it with a higher token."""
    hour = 1_800_003_600.0
    worker = await factory.worker()
    source = """
schedule = locks.raw.schedule("report", every=3600, attempts=attempts, ttl=ttl)
schedule._schedule.clock = lambda: hour
schedule.run_due(work)
"""
    token = await hang(worker, source, tmp_path / "x", hour=hour, attempts=attempts, ttl=factory.ttl_scale(0.5))
    job = schedule(factory, locks, "report", lambda: hour, every=3600, attempts=attempts)
    runs = await job.run_due()
    assert [run.attempt for run in runs] == ([2] if attempts == 2 else [])

    async def known() -> bool:
        return (await job.history())[-1].outcome.value == "abandoned"

    await eventually(known, "the first run counts as abandoned")
    assert [run.attempt for run in reversed(await job.history())] == list(range(1, attempts + 1))
    assert all(run.token > token for run in runs)
