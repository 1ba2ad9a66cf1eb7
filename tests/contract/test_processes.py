"""Holders and waiters in other processes that are killed, stopped, interrupted, forked, or end without a release."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.runtimes import LocksView
from tests.contract.steps import background, is_free, take, wait_until_unclaimed, waiting
from tests.contract.ttl_scale import TtlScale
from tests.contract.worker import WorkerFailed
from tests.support.waiting import SOON, eventually

pytestmark = pytest.mark.processes


async def test_processes_exclude_each_other(factory: MakeClient, locks: LocksView) -> None:
    """Processes exclude each other, and tokens rise across them."""
    worker = await factory.worker()
    token = await worker.acquire("x")
    assert not await is_free(locks, "x")
    assert await worker.do("result = await lease.release()") is True
    async with locks.lock("x", timeout=SOON) as lease:
        assert lease.token > token
        assert await worker.do("result = await locks.lock('x').try_acquire() is None")
    assert await worker.acquire("x") > lease.token


async def test_lock_of_a_killed_holder_is_free_after_its_ttl(
    factory: MakeClient, case: EngineCase, locks: LocksView, ttl_scale: TtlScale
) -> None:
    """The lock of a killed process is free after its ttl, or at once on engines where it ends with its connection."""
    worker = await factory.worker()
    token = await worker.acquire("x", ttl=1)
    await ttl_scale.sleep(0.5)  # renewed meanwhile
    asked = time.monotonic()
    remaining = await worker.do("result = lease.remaining")
    await worker.kill()
    async with locks.lock("x", timeout=SOON) as lease:
        assert remaining > 0
        assert case.ends_with_process or time.monotonic() - asked > remaining
        assert lease.token > token


async def test_stopped_holder_sees_its_loss(factory: MakeClient, locks: LocksView) -> None:
    """A holder that was stopped past its ttl sees its loss at its next check; the next holder has a higher token."""
    worker = await factory.worker()
    token = await worker.acquire("x", ttl=0.5)
    worker.stop()
    async with locks.lock("x", timeout=SOON) as lease:
        assert lease.token > token
        worker.resume()
        seen = await worker.do(
            """
before = lease.lost.is_set(), lease.remaining
try:
    lease.check()
    outcome = "it believes to hold the lock"
except Exception as error:
    outcome = type(error).__name__
result = [*before, outcome, str(lease.reason), await lease.release()]
"""
        )
        assert seen == [True, 0, "LeaseLost", "expired", False]
        lease.check()
        assert not await is_free(locks, "x")


async def test_holder_stopped_in_its_block_gets_lease_lost(factory: MakeClient, locks: LocksView) -> None:
    """A holder that was stopped inside its block past its ttl gets LeaseLost from the block."""
    worker = await factory.worker()
    async with background(
        worker.do(
            """
import time
async with locks.lock('x', ttl=0.4) as lease:
    inside = await locks.lock('inside').acquire()
    while not lease.lost.is_set():
        await asyncio.sleep(0.01) if 'aio' in sys.argv else time.sleep(0.01)
"""
        )
    ) as (task,):
        await eventually(lambda: _held(locks, "inside"), "the worker is in its block")
        worker.stop()
        assert await take(locks, "x") > 0
        worker.resume()
        with pytest.raises(WorkerFailed, match="LeaseLost"):
            await asyncio.wait_for(task, SOON)
    assert await is_free(locks, "x")


async def test_holder_whose_threads_could_not_run_sees_its_loss(factory: MakeClient, locks: LocksView) -> None:
    """A holder whose threads were blocked by the interpreter's lock past its deadline sees its loss by its own clock."""
    worker = await factory.worker()
    token = await worker.acquire("x", ttl=0.4)
    seen = await worker.do(
        "import ctypes; ctypes.PyDLL(None).usleep(int(ttl_scale(700_000)))\n"
        "result = [lease.lost.is_set(), lease.reason, lease.remaining]"
    )
    assert seen == [True, "expired", 0]
    assert await take(locks, "x") > token


async def _held(locks: LocksView, name: str) -> bool:
    return bool((await locks.inspect(name)).holders)


async def test_killed_waiter_does_not_block_the_others(factory: MakeClient, locks: LocksView) -> None:
    """When a waiter is killed the other waiters still get the lock."""
    victim, other = await factory.worker(), await factory.worker()
    lease = await locks.lock("x").acquire()
    async with background(victim.acquire("x", ttl=0.5)):
        await waiting(locks, "x", 1)
        async with background(other.acquire("x", ttl=0.5)) as (task,):
            await waiting(locks, "x", 2)
            await victim.kill()
            await lease.release()
            assert await asyncio.wait_for(task, SOON) > lease.token


async def test_waiter_behind_a_killed_holder_and_a_killed_waiter(factory: MakeClient, locks: LocksView) -> None:
    """A waiter behind a killed holder and a killed waiter gets the lock when their ttls end, however long its own ttl is."""
    holder, first, second = await factory.worker(), await factory.worker(), await factory.worker()
    await holder.acquire("x", ttl=0.5)
    async with background(first.acquire("x", ttl=0.5)):
        await waiting(locks, "x", 1)
        async with background(second.acquire("x", ttl=600)) as (task,):
            await waiting(locks, "x", 2)
            await holder.kill()
            await first.kill()
            await asyncio.wait_for(task, SOON)


async def test_stopped_waiter_does_not_believe_an_old_grant(factory: MakeClient, locks: LocksView) -> None:
    """A waiter that was stopped, granted the lock, and resumed after its ttl does not believe that it holds the lock."""
    worker = await factory.worker()
    lease = await locks.lock("x").acquire()
    acquire = "lease = await locks.lock('x', ttl=0.5).acquire(); result = lease.token, lease.remaining"
    async with background(worker.do(acquire)) as (task,):
        await waiting(locks, "x")
        worker.stop()
        await lease.release()
        async with locks.lock("x", timeout=SOON) as successor:  # after the ttl of the one that is stopped
            worker.resume()
            await asyncio.sleep(0.3)
            assert not task.done()
            successor.check()
        token, remaining = await asyncio.wait_for(task, SOON)
    assert token > successor.token
    assert remaining > 0


async def test_waiter_stopped_for_less_than_its_ttl_gets_a_good_lease(factory: MakeClient, locks: LocksView) -> None:
    """A waiter that is granted the lock while it is stopped for less than its ttl gets a lease that it can trust."""
    worker = await factory.worker()
    lease = await locks.lock("x").acquire()
    async with background(worker.acquire("x", ttl=3)) as (task,):
        await waiting(locks, "x")
        worker.stop()
        await lease.release()
        await asyncio.sleep(1.2)
        worker.resume()
        await asyncio.wait_for(task, SOON)
    assert await worker.do("result = lease.remaining / lease.ttl") > 1 / 3
    assert len((await locks.inspect("x")).holders) == 1


@pytest.mark.fair
async def test_processes_are_served_in_order(factory: MakeClient, locks: LocksView) -> None:
    """Waiters in several processes, and several waiters in one process, get the lock in the order of arrival."""
    workers = [await factory.worker() for _ in range(3)]
    served: list[int] = []
    lease = await locks.lock("x").acquire()

    async def elsewhere(number: int) -> None:
        await workers[number % 4 - 1].do("mine = await locks.lock('x').acquire()")
        served.append(number)
        await workers[number % 4 - 1].do("await mine.release()")

    async def here(number: int) -> None:
        async with locks.lock("x"):
            served.append(number)

    tasks = []
    for number in range(4):
        tasks.append(asyncio.create_task(elsewhere(number) if number % 4 else here(number)))
        await waiting(locks, "x", number + 1)
    for number in (4, 8):
        tasks.append(asyncio.create_task(here(number)))
        await waiting(locks, "x", len(tasks))
    await lease.release()
    async with asyncio.timeout(SOON):
        await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_in_a_block(factory: MakeClient, locks: LocksView, number: int) -> None:
    """SIGINT in a block releases the lock; SIGTERM ends the process, and the lease expires. Neither hangs."""
    worker = await factory.worker()
    async with background(
        worker.do(
            """
import time
async with locks.lock('x', ttl=1) as lease:
    inside = await locks.lock('inside', ttl=1).acquire()
    await asyncio.sleep(60) if 'aio' in sys.argv else time.sleep(60)
"""
        )
    ) as (task,):
        # Held is not enough: a signal that comes before the body begins finds a lease without a block.
        await eventually(lambda: _held(locks, "inside"), "the worker is inside its block")
        worker.signal(number)
        with pytest.raises(WorkerFailed, match=r"KeyboardInterrupt|CancelledError|Ended"):
            await asyncio.wait_for(task, SOON)
    if number == signal.SIGINT:
        assert await is_free(locks, "x")
    assert await take(locks, "x") > 0


async def test_interrupt_removes_the_queue_entry(factory: MakeClient, locks: LocksView) -> None:
    """SIGINT while waiting removes the queue entry."""
    worker = await factory.worker()
    async with locks.lock("x") as lease:
        async with background(worker.acquire("x", ttl=30)) as (task,):
            await waiting(locks, "x")
            worker.signal(signal.SIGINT)
            with pytest.raises(WorkerFailed, match=r"KeyboardInterrupt|CancelledError"):
                await asyncio.wait_for(task, SOON)
        assert (await locks.inspect("x")).waiters == ()
        lease.check()


@pytest.mark.runtime_name("blocking")
async def test_hundreds_of_interrupts_leave_no_claim(factory: MakeClient, locks: LocksView) -> None:
    """A process that is interrupted hundreds of times at any moment continues, and leaves no claim that lasts."""
    worker = await factory.worker()
    await worker.do(
        """
import signal, time
interrupts, grants, names, armed = 0, 0, ['x', 'y'], False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
with locks.raw.lock('x', ttl=ttl_scale(0.25)):
    pass  # connect first: a connect that takes longer than the time between two interrupts would never succeed
"""
    )
    async with background(
        worker.do(
            """
begun = time.monotonic()
def enough():
    limit = ttl_scale(3) if min(interrupts, grants) > 50 else 90  # a busy machine needs longer
    return time.monotonic() - begun > limit or (interrupts >= 200 and grants >= 100)
while not enough():
    try:
        while not enough():
            armed = interrupts <= 2 * grants + 10  # where a grant takes longer than the time between two interrupts
            with locks.raw.lock(names[grants % 2], ttl=ttl_scale(0.25), timeout=5):
                grants += 1
    except KeyboardInterrupt:
        interrupts += 1
    except Exception as error:
        armed = False
        if 'Lost' not in type(error).__name__ and 'Timeout' not in type(error).__name__:
            raise
armed = False
result = [interrupts, grants]
"""
        )
    ) as (task,):
        while not task.done():
            worker.signal(signal.SIGINT)
            await asyncio.sleep(0.003)
        interrupts, grants = await asyncio.wait_for(task, SOON)
    assert interrupts > 50
    assert grants > 50
    await wait_until_unclaimed(locks, "x")
    await wait_until_unclaimed(locks, "y")
    in_a_thread = (
        "import threading; thread = threading.Thread(target=use); thread.start(); thread.join(); result = done"
    )
    await worker.do("done = []\ndef use():\n    with locks.raw.lock('x', timeout=5) as lease: done.append(lease.token)")
    assert await worker.do(in_a_thread), "an interrupted thread kept a mutex"


async def test_signal_handler_may_read_a_lease(factory: MakeClient) -> None:
    """A signal handler may read a lease, whatever code it interrupts."""
    worker = await factory.worker()
    async with background(
        worker.do(
            """
import signal, time
lease = await locks.lock('x', ttl=9).acquire()
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append((lease.remaining, lease.lost.is_set(), repr(lease))))
result = 'ready'
"""
        )
    ) as (task,):
        await task
    async with background(
        worker.do(
            """
end = time.monotonic() + 60
while time.monotonic() < end and len(seen) < 100:
    await lease.renew()
    other = await locks.lock('y').acquire()
    await other.release()
lease.check()
result = len(seen)
"""
        )
    ) as (task,):
        while not task.done():
            worker.signal(signal.SIGUSR1)
            await asyncio.sleep(0.003)
        assert await asyncio.wait_for(task, SOON) > 50


@pytest.mark.parametrize("how", ["holding", "waiting in a thread", "closed"])
async def test_program_that_ends_without_a_release(factory: MakeClient, locks: LocksView, how: str) -> None:
    """A program that ends without a release does not hang, and its lock is free within its ttl."""
    worker = await factory.worker()
    if how == "waiting in a thread":
        holder = await locks.lock("x").acquire()
        waits = (
            "task = asyncio.create_task(locks.lock('x', ttl=1).acquire()); await asyncio.sleep(0.3)"
            if factory.runtime_name == "aio"
            else "import threading\n"
            "threading.Thread(target=locks.raw.lock('x', ttl=ttl_scale(1)).acquire, daemon=True).start()"
        )
        await worker.do(waits)
        await waiting(locks, "x")
        assert await worker.finish_input() == 0
        await holder.release()
    else:
        await worker.acquire("x", ttl=1)
        if how == "closed":
            await worker.do("await locks.close()")
            assert await is_free(locks, "x")
        assert await worker.finish_input() == 0
    assert await take(locks, "x") > 0


@pytest.mark.runtime_name("blocking")
async def test_normal_exit_releases_the_locks(factory: MakeClient, locks: LocksView) -> None:
    """A blocking program that exits normally releases its locks."""
    worker = await factory.worker()
    await worker.acquire("x", ttl=600)
    assert await worker.finish_input() == 0
    assert await is_free(locks, "x")


FORKED_LEASE = """
def child():
    return [lease.lost.is_set(), str(lease.reason), lease.remaining]
result = forked(child)
"""

FORKED_RELEASE = """
async def child():
    return await lease.release()
result = forked(child)
"""

FORKED_ACQUIRE = """
async def child():
    one = await locks.lock('other', ttl=1).acquire()
    busy = await locks.lock('x').try_acquire()
    held = (await locks.inspect('other')).holders[0].owner
    answer = [busy is None, held == locks.owner, held.endswith(f':{os.getpid()}'), await one.release()]
    await locks.close()
    return answer
result = forked(child)
"""

FORKED_BY_MULTIPROCESSING = """
import multiprocessing

def child(queue):
    async def work():
        mine = await locks.lock('other', ttl=1).acquire()
        token = mine.token
        await mine.release()
        return [lease.lost.is_set(), token]
    queue.put(drive(work()))

context = multiprocessing.get_context('fork')
queue = context.SimpleQueue()
process = context.Process(target=child, args=(queue,))
process.start()
result = queue.get()
process.join(15)
assert process.exitcode == 0, process.exitcode
"""


async def test_forked_child_loses_the_lease_and_the_parent_keeps_it(factory: MakeClient, locks: LocksView) -> None:
    """In a forked child the lease is lost; the parent keeps it renewed, and the child may use the client for other locks."""
    worker = await factory.worker()
    token = await worker.acquire("x", ttl=6)  # each fork stops the worker, on a busy machine for seconds
    assert await worker.do(FORKED_LEASE) == [True, "forked", 0]
    assert await worker.do(FORKED_RELEASE) is False
    assert await worker.do(FORKED_ACQUIRE) == [True, True, True, True]
    lost, other = await worker.do(FORKED_BY_MULTIPROCESSING)
    assert lost
    assert other > token
    left = await worker.do("result = lease.remaining")

    async def renewed() -> bool:
        return bool(await worker.do("lease.check(); result = lease.remaining") > left)

    await eventually(renewed, "the parent's lease is renewed")
    assert not await is_free(locks, "x")
    assert await worker.do("lease.check(); result = await lease.release()") is True
    assert await is_free(locks, "x")


FORKED_EVENTS = """
import asyncio, os
loop, written = asyncio.get_running_loop(), []
async def wait(lock):
    async with lock:
        pass
waits = [asyncio.ensure_future(lease.lost.wait(15)), asyncio.ensure_future(wait(locks.lock('x')))]
while not (await locks.inspect('x')).waiters:
    await asyncio.sleep(0.01)
wake = loop.call_soon_threadsafe
def noting(*args, **kwargs):
    written.append(os.getpid())
    return wake(*args, **kwargs)
loop.call_soon_threadsafe = noting
async def child():
    return [lease.lost.is_set(), os.getpid() in written]
result = forked(child)
del loop.call_soon_threadsafe
for each in waits:
    each.cancel()
await asyncio.gather(*waits, return_exceptions=True)
"""


@pytest.mark.runtime_name("aio")
async def test_forked_child_does_not_wake_the_loop_of_its_parent(factory: MakeClient) -> None:
    """A forked child loses its copy of the lease without writing into the pipe that the parent's event loop reads."""
    worker = await factory.worker()
    await worker.acquire("x", ttl=6)
    assert await worker.do(FORKED_EVENTS) == [True, False]


FORKED_LEFTOVER = """
assert await lease.lost.wait(15)
async def child():
    released = await lease.release()
    await locks.close()
    return [released, str(lease.reason)]
result = forked(child)
"""


async def test_forked_child_does_not_release_a_lease_lost_at_max_hold(factory: MakeClient, locks: LocksView) -> None:
    """A forked child does not release what its parent lost at max_hold and has not released yet, not even by close()."""
    worker = await factory.worker()
    await worker.acquire("x", ttl=60, max_hold=0.2)
    assert await worker.do(FORKED_LEFTOVER) == [False, "max_hold"]
    assert not await is_free(locks, "x")
    await worker.do("await locks.close()")
    assert await is_free(locks, "x")


@pytest.mark.runtime_name("blocking")
async def test_forked_child_in_a_block_gets_lease_lost(factory: MakeClient, locks: LocksView) -> None:
    """A forked child that leaves its parent's block gets LeaseLost, and the parent keeps the lock."""
    worker = await factory.worker()
    outcome = await worker.do(
        """
lock = locks.raw.lock('x', ttl=ttl_scale(1))
lease = lock.__enter__()
def child():
    try:
        lock.__exit__(None, None, None)
    except Exception as error:
        return [type(error).__name__, error.reason]
outcome = forked(child)
lease.check()
result = [*outcome, locks.raw.lock('x').try_acquire() is None]
lock.__exit__(None, None, None)
"""
    )
    assert outcome == ["LeaseLost", "forked", True]
    assert await is_free(locks, "x")


async def test_fork_does_not_disturb_waiters(factory: MakeClient, locks: LocksView, ttl_scale: TtlScale) -> None:
    """A fork does not disturb a waiting task or thread of the parent, and the child owns no part of its claim."""
    worker = await factory.worker()
    holder = await locks.lock("x").acquire()
    await worker.do(
        """
import threading
if 'aio' in sys.argv:
    task = asyncio.ensure_future(locks.lock('x', ttl=6).acquire())  # each fork stops the event loop for a while
else:
    got = []
    thread = threading.Thread(target=lambda: got.append(locks.raw.lock('x', ttl=ttl_scale(0.9)).acquire()))
    thread.start()
"""
    )
    await waiting(locks, "x")
    assert await worker.do(FORKED_ACQUIRE) == [True, True, True, True]
    assert len((await locks.inspect("x")).waiters) == 1
    if factory.runtime_name == "blocking":
        await ttl_scale.sleep(1.2)  # longer than its ttl: the waiting thread still repeats its attempts
    await holder.release()
    outcome = """
if 'aio' in sys.argv:
    lease = await task
else:
    thread.join(15)
    (lease,) = got
lease.check()
result = await lease.release() if 'aio' in sys.argv else lease.release()
"""
    assert await worker.do(outcome) is True


FORKED_BY_A_SIGNAL = """
import signal
reader, writer = os.pipe()
parent = os.getpid()
signal.signal(signal.SIGALRM, lambda *_: os.fork())
signal.setitimer(signal.ITIMER_REAL, ttl_scale(0.3))
try:
    got = locks.raw.lock('x').acquire()
    got.check()
    outcome = str(got.token)
    released = got.release()
except Exception as error:
    outcome = f'{type(error).__name__}: {error}'
finally:
    if os.getpid() != parent:
        os.write(writer, outcome.encode())
        os._exit(0)
os.close(writer)
child = os.read(reader, 1000).decode()
os.wait()
result = [outcome, child, released]
"""


@pytest.mark.runtime_name("blocking")
async def test_fork_by_a_signal_handler_while_waiting(
    factory: MakeClient, locks: LocksView, ttl_scale: TtlScale
) -> None:
    """When the waiting thread itself is forked, the parent gets the lock, and the child gets an error."""
    worker = await factory.worker()
    holder = await locks.lock("x").acquire()
    async with background(worker.do(FORKED_BY_A_SIGNAL)) as (waiter,):
        await waiting(locks, "x")
        await ttl_scale.sleep(1)
        await holder.release()
        outcome, child, released = await waiter
    assert int(outcome) > holder.token
    assert released
    assert child.startswith("Forked: 'x': this process was forked")
    assert await is_free(locks, "x")


@pytest.mark.runtime_name("blocking")
async def test_forks_in_several_threads_disturb_no_caller(factory: MakeClient) -> None:
    """Forks in several threads do not disturb other threads that use the client at the same time."""
    worker = await factory.worker()
    children, pairs = await worker.do(
        """
import threading, time
begun, children, pairs, failed = time.monotonic(), [], [], []
def enough():
    limit = ttl_scale(1) if min(len(children), len(pairs)) > 5 else 60  # a busy machine needs longer
    return time.monotonic() - begun > limit
kept = locks.raw.lock('kept', ttl=ttl_scale(2.5)).acquire()
def fork():
    while not enough():
        try:
            children.append(forked(lambda: kept.reason))
        except BaseException as error:
            failed.append(repr(error))
def use(number):
    while not enough():
        try:
            with locks.raw.lock(f'n{number % 2}', ttl=5):
                pairs.append(number)
        except BaseException as error:
            failed.append(repr(error))
threads = [threading.Thread(target=fork) for _ in range(2)] + [threading.Thread(target=use, args=(n,)) for n in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
left = kept.remaining
while kept.remaining <= left:  # it is still renewed
    kept.check()
    time.sleep(0.02)
assert not failed, failed[:3]
assert set(children) == {'forked'}, set(children)
result = [len(children), len(pairs)]
"""
    )
    assert children > 5
    assert pairs > 5


@pytest.mark.runtime_name("blocking")
async def test_forked_child_that_exits_releases_nothing(factory: MakeClient, locks: LocksView) -> None:
    """A forked child that runs to the end of the program releases no lock of its parent."""
    worker = await factory.worker()
    await worker.acquire("x", ttl=30)
    status = await worker.do(
        """
import atexit
pid = os.fork()
if pid == 0:
    atexit._run_exitfuncs()
    os._exit(0)
result = os.waitpid(pid, 0)[1]
"""
    )
    assert status == 0
    assert not await is_free(locks, "x")
    assert await worker.do("result = await lease.release()") is True
