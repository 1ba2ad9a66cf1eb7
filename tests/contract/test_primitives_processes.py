"""Reader-writer locks, multi-locks and elections between processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import time
from itertools import groupby
from pathlib import Path

import pytest

from fencelock import Mode
from fencelock.core.clock import boottime
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, renewed, wait_until_unclaimed, waiting
from tests.contract.worker import Worker
from tests.support.waiting import SOON, eventually

pytestmark = pytest.mark.processes

SETUP = """
import threading, time
from fencelock.core.clock import boottime

out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
aio = 'aio' in sys.argv
stop = asyncio.Event() if aio else threading.Event()

def note(*values):
    os.write(out, (' '.join(map(str, values)) + '\\n').encode())

async def pause(seconds):
    await asyncio.sleep(seconds) if aio else time.sleep(seconds)

running = []
def start(work):
    if aio:
        running.append(asyncio.create_task(work()))
    else:
        running.append(threading.Thread(target=lambda: drive(work()), daemon=True))
        running[-1].start()

async def finish():
    stop.set()
    for one in running:
        await one if aio else one.join()
"""


def lines(path: Path) -> list[list[str]]:
    """Return what the workers have noted so far, without a line that is being written."""
    return [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


# ---------------------------------------------------------------------------- readers and writers


@pytest.mark.shared
@pytest.mark.fair
async def test_writer_waits_only_for_earlier_readers_of_20_busy_ones(
    factory: MakeClient, locks: LocksView, tmp_path: Path
) -> None:
    """A writer waits only for earlier readers, although 20 readers in four processes read without a pause."""
    path = tmp_path / "reads"
    workers = [await factory.worker() for _ in range(4)]
    for worker in workers:
        await worker.do(SETUP, path=str(path))
        await worker.do(
            """
async def read():
    lock = locks.rwlock('x').read()
    while not stop.is_set():
        called = boottime()
        async with lock:
            granted = boottime()
            await pause(0.01)
            note(called, granted, boottime())
for _ in range(5):
    start(read)
"""
        )
    turns: list[tuple[float, float, float]] = []
    for _ in range(3):
        async with background(locks.rwlock("x", timeout=SOON).write().acquire()) as (task,):

            async def queued(task: asyncio.Task[object] = task) -> bool:
                seen = await locks.inspect("x")
                modes = [holder.mode for holder in seen.holders] + [waiter.mode for waiter in seen.waiters]
                return task.done() or Mode.EXCLUSIVE in modes

            await eventually(queued, "the writer is in the queue")
            enqueued = boottime()
            lease = await task
            granted = boottime()
            assert [holder.mode for holder in (await locks.inspect("x")).holders] == [Mode.EXCLUSIVE]
            await asyncio.sleep(0.02)
            lease.check()
            turns.append((enqueued, granted, boottime()))
            assert await lease.release() is True
    for worker in workers:
        await worker.do("await finish()")
    reads = [tuple(map(float, line)) for line in lines(path)]
    assert len(reads) >= 20
    for enqueued, granted, released in turns:
        overtaking = [read for read in reads if enqueued < read[0] < released and read[1] < released]
        assert not overtaking, "a reader that came after the writer was admitted before its release"
        assert not [read for read in reads if read[1] < released and granted < read[2]], "a reader beside the writer"
    await wait_until_unclaimed(locks, "x")


@pytest.mark.shared
async def test_killed_reader_disappears_while_another_renews(
    factory: MakeClient, case: EngineCase, locks: LocksView
) -> None:
    """A killed reader is gone within its own ttl, and a writer then waits only for the reader that still renews."""
    victim = await factory.worker()
    ttl = await victim.do("lease = await locks.rwlock('x', ttl=0.9).read().acquire(); result = lease.ttl")
    reading = await locks.rwlock("x", ttl=0.9).read().acquire()
    async with background(locks.rwlock("x", timeout=SOON).write().acquire()) as (writer,):
        await waiting(locks, "x")
        await victim.kill()
        killed = time.monotonic()

        async def alone() -> bool:
            return len((await locks.inspect("x")).holders) == 1

        await eventually(alone, "the killed reader is gone")
        assert time.monotonic() - killed < ttl + case.slack + 2
        await renewed(reading, 2)
        assert not writer.done()
        assert await reading.release() is True
        await (await writer).release()


@pytest.mark.limit
async def test_permit_of_a_killed_process_goes_to_the_first_waiter(factory: MakeClient, locks: LocksView) -> None:
    """The permit of a killed process goes to the first waiter within its ttl."""
    victim = await factory.worker()
    await victim.do("lease = await locks.semaphore('x', 2, ttl=0.9).acquire()")
    kept = await locks.semaphore("x", 2, ttl=0.9).acquire()
    async with background(locks.semaphore("x", 2).acquire(SOON)) as (task,):
        await waiting(locks, "x")
        await victim.kill()
        successor = await task
        kept.check()
        assert len((await locks.inspect("x")).holders) == 2
        await successor.release()
        await kept.release()


# ---------------------------------------------------------------------------- multi-locks

FAST = ("sqlite", "redis")


@pytest.mark.parametrize(
    "number",
    [80, *(pytest.param(2_000, marks=pytest.mark.long, id=f"part {part} of 10,000") for part in range(1, 6))],
)
async def test_processes_with_opposite_orders_do_not_deadlock(
    factory: MakeClient, case: EngineCase, locks: LocksView, tmp_path: Path, number: int
) -> None:
    """Four processes acquire the same names in opposite orders without a deadlock, and each name has one holder at a time."""
    if case.id not in FAST:
        number = min(number, 200)
    names = ("a", "b", "c")
    for name in names:
        (tmp_path / name).write_text("0")
    workers = [await factory.worker() for _ in range(4)]
    work = """
async def count(names):
    async with locks.multi(*names, timeout=60) as group:
        for name in names:
            with open(os.path.join(folder, name)) as file:
                value = int(file.read())
            with open(os.path.join(folder, name), 'w') as file:
                file.write(str(value + 1))
        group.check()

pairs = [['a', 'b', 'c'], ['c', 'b'], ['b', 'a'], ['c', 'a']]
for turn in range(turns):
    await count(pairs[(turn + place) % 4][:: 1 if (turn + place) % 8 < 4 else -1])
"""
    async with asyncio.TaskGroup() as group:
        for place, worker in enumerate(workers):
            group.create_task(worker.do(work, folder=str(tmp_path), turns=number // 4, place=place))
    assert {name: int((tmp_path / name).read_text()) for name in names} == dict.fromkeys(names, number // 4 * 3)
    for name in names:
        await wait_until_unclaimed(locks, name)


async def test_names_of_a_killed_process_are_free_within_its_ttl(factory: MakeClient, locks: LocksView) -> None:
    """The names that a killed process held of its group, and its place in the next queue, are free within its ttl."""
    victim, holder = await factory.worker(), await locks.lock("b").acquire()
    async with background(victim.do("await locks.multi('a', 'b', ttl=0.6).acquire()")):
        await waiting(locks, "b")
        assert (await locks.inspect("a")).holders
        await victim.kill()
        await wait_until_unclaimed(locks, "a")
        await holder.release()
        async with locks.multi("a", "b", timeout=SOON):
            pass


# ---------------------------------------------------------------------------- elections

CAMPAIGN = """
if aio:
    async def work(term):
        while not stop.is_set():
            now = boottime()
            if term.lost.is_set():
                return
            note(now, term.token, os.getpid())
            await asyncio.sleep(0.01)
else:
    def work(term):
        while not stop.is_set():
            now = boottime()
            if term.lost.is_set():
                return
            note(now, term.token, os.getpid())
            time.sleep(0.01)

async def campaign():
    run = locks.raw.election('x', value=str(os.getpid()), ttl=ttl_scale(ttl)).run(work, stop)
    if run is not None:
        await run
start(campaign)
"""


class Candidates:
    """Candidates in separate processes, which write down each time at which they had a valid term."""

    def __init__(self, factory: MakeClient, path: Path, ttl: float) -> None:
        self._factory = factory
        self._path = path
        self._ttl = ttl
        self.workers: dict[int, Worker] = {}

    async def add(self) -> Worker:
        """Start one more candidate."""
        worker = await self._factory.worker()
        self.workers[worker.pid] = worker
        await worker.do(SETUP, path=str(self._path))
        await worker.do(CAMPAIGN, ttl=self._ttl)
        return worker

    def last(self) -> tuple[float, int, int]:
        """Return when a candidate led last, its term and its process."""
        noted = lines(self._path) if self._path.exists() else []
        if not noted:
            return 0.0, 0, 0
        return max((float(at), int(token), int(pid)) for at, token, pid in noted)

    async def leader_above(self, token: int, within: float) -> tuple[float, int, int]:
        """Wait for a leader of a later term."""

        async def leads() -> bool:
            return self.last()[1] > token

        await eventually(leads, "there is a new leader", within)
        return self.last()

    def check(self) -> int:
        """Assert that no two terms were ever valid at the same moment; return the number of terms."""
        noted = sorted((float(at), int(token)) for at, token, _ in lines(self._path))
        terms = [token for token, _ in groupby(noted, key=lambda moment: moment[1])]
        assert terms == sorted(set(terms)), "two leaders at the same time, or an older one after a newer one"
        return len(terms)


async def kill_and_stop_leaders(
    factory: MakeClient, case: EngineCase, path: Path, candidates: int, turns: int, strict: bool
) -> None:
    """Kill and stop leaders in turn, and check the times that all candidates have written."""
    ttl = 1.0
    seconds = factory.ttl_scale(ttl)
    group = Candidates(factory, path, ttl)
    for _ in range(candidates):
        await group.add()
    within = seconds + 1.0 + case.slack if strict else seconds + SOON
    _, token, pid = await group.leader_above(0, SOON)
    for turn in range(turns):
        leader = group.workers[pid]
        begun = boottime()
        if turn % 2:
            leader.stop()
        else:
            await leader.kill()
        _, token, pid = await group.leader_above(token, within + 5)
        first = min(float(when) for when, term, _ in lines(path) if int(term) == token)
        assert first - begun <= within, f"the new leader came after {first - begun:.2f} s"
        if turn % 2:
            leader.resume()
            await asyncio.sleep(0.1)  # it checks its term now, which must be lost
        else:
            del group.workers[leader.pid]
            await group.add()
    for worker in group.workers.values():
        await worker.do("stop.set()")
    for worker in group.workers.values():
        await worker.do("await finish()")
    assert group.check() > turns
    await wait_until_unclaimed(factory.connect(), "x")


@pytest.mark.runtime_name("blocking")
async def test_leaders_are_killed_and_stopped(factory: MakeClient, case: EngineCase, tmp_path: Path) -> None:
    """While leaders are killed and stopped, there is at most one valid leader at any moment, and always a next one."""
    await kill_and_stop_leaders(factory, case, tmp_path / "terms", candidates=4, turns=2, strict=False)


@pytest.mark.long
async def test_20_candidates(factory: MakeClient, case: EngineCase, tmp_path: Path) -> None:
    """Among 20 processes whose leaders are killed and stopped there is one valid leader, and a new one within ttl + 1 s."""
    await kill_and_stop_leaders(factory, case, tmp_path / "terms", candidates=20, turns=10, strict=True)


@pytest.mark.runtime_name("blocking")
async def test_stopped_candidate_does_not_win_later(factory: MakeClient, locks: LocksView, tmp_path: Path) -> None:
    """A candidate that is stopped while it waits, is granted the lock and loses it does not lead after it is resumed."""
    group = Candidates(factory, tmp_path / "terms", 0.6)
    holder = await locks.lock("x").acquire()
    candidate = await group.add()
    await waiting(locks, "x")
    candidate.stop()
    await holder.release()
    async with locks.lock("x", timeout=SOON) as successor:
        candidate.resume()
        await asyncio.sleep(0.3)
        assert group.last() == (0.0, 0, 0), "it led without the lock"
        successor.check()
    _, token, _ = await group.leader_above(0, SOON)
    assert token > successor.token
    await candidate.do("await finish()")
    await wait_until_unclaimed(locks, "x")
