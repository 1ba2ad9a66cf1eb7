"""Leader election: terms, observers, and `run`."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from fencelock import Candidate, ClientClosed, InvalidArgument, InvalidType, Leader, LeaseLost, LockTimeout, LossReason
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.runtimes import LeaseView, LocksView, client_of
from tests.contract.steps import background, renewed, take, wait_until_unclaimed, waiting
from tests.contract.test_watch import collect, has
from tests.support.waiting import SOON, eventually


async def test_term_is_a_lease(factory: MakeClient, locks: LocksView) -> None:
    """One candidate leads; its term has a token, and others see its value only while it leads."""
    election = locks.election("x", value="http://web-1")
    rival = factory.connect(owner="rival").election("x", value="http://web-2")
    assert await election.leader() is None
    assert await election.candidates() == []
    async with election.campaign() as term:
        assert await rival.leader() == Leader(locks.owner, "http://web-1", term.token)
        with pytest.raises(LockTimeout):
            await rival.campaign(timeout=0.05).acquire()
        async with background(rival.campaign(timeout=SOON).acquire()) as (task,):
            await waiting(locks, "x")
            assert await election.candidates() == [
                Candidate(locks.owner, "http://web-1"),
                Candidate("rival", "http://web-2"),
            ]
            await term.release()
            successor = await task
            assert successor.token > term.token
            assert await election.leader() == Leader("rival", "http://web-2", successor.token)
            await successor.release()
    assert await election.leader() is None


@pytest.mark.client_side
async def test_election_and_lock_of_one_name_exclude_each_other(locks: LocksView) -> None:
    """An election and a lock of the same name exclude each other."""
    async with locks.election("x").campaign():
        assert await asyncio.create_task(locks.lock("x").try_acquire()) is None
        locks.assert_held("x")


@pytest.mark.client_side
async def test_arguments_are_checked_when_the_object_is_created(locks: LocksView) -> None:
    """An election checks its name, options and value (text of at most 1024 bytes), and `run` checks `stop` and `work`."""
    assert locks.election("x", value="é" * 512).name == "x"
    for value, error in (("é" * 513, InvalidArgument), ("a\0b", InvalidArgument), (b"x", InvalidType)):
        with pytest.raises(error, match="value"):
            locks.election("x", value=value)
    with pytest.raises(ValueError, match="ttl"):
        locks.election("x", ttl=-1)
    with pytest.raises(ValueError, match="name"):
        locks.election("")
    election = locks.election("x")
    with pytest.raises(InvalidType, match="stop"):
        election.observe(stop=True)
    with pytest.raises(ValueError, match="grace"):
        election.healthy(-1)


async def test_resign_releases_the_term_of_this_client(factory: MakeClient, locks: LocksView) -> None:
    """`resign` releases the term of this client, never that of another one, and returns whether there was one."""
    election, rival = locks.election("x"), factory.connect().election("x")
    assert await election.resign() is False
    term = await election.campaign().acquire()
    assert await rival.resign() is False
    term.check()
    assert await election.resign() is True
    assert await election.resign() is False
    await wait_until_unclaimed(locks, "x")
    assert not term.lost.is_set()


# ---------------------------------------------------------------------------- observers


@pytest.mark.client_side
async def test_observe_yields_the_leader_and_every_change(factory: MakeClient, locks: LocksView) -> None:
    """`observe` yields the current state, then each change of the leader once; renewals and new candidates are no change."""
    first, second = (factory.connect(owner=owner).election("x", value=owner, ttl=0.9) for owner in ("one", "two"))
    stop, seen = factory.stop_event(), list[Leader | None]()
    async with background(collect(locks.election("x").observe(stop), seen)) as (task,):
        await has(seen, 1)
        assert seen == [None]
        term = await first.campaign().acquire()
        await has(seen, 2)
        assert seen[-1] == Leader("one", "one", term.token)
        async with background(second.campaign().acquire(SOON)) as (waiter,):
            await waiting(locks, "x")
            await renewed(term, 2)
            assert len(seen) == 2
            await term.release()
            successor = await waiter
        await has(seen, 3)
        assert seen[-1] == Leader("two", "two", successor.token)
        await successor.release()
        await has(seen, 4)
        assert seen[-1] is None
        stop.set()
        await asyncio.wait_for(task, SOON)
    later: list[Leader | None] = []
    async with first.campaign() as term, background(collect(locks.election("x").observe(), later)):
        await has(later, 1)
        assert later == [Leader("one", "one", term.token)]


@pytest.mark.client_side
async def test_observers_never_see_an_older_leader_after_a_newer_one(factory: MakeClient, locks: LocksView) -> None:
    """`observe` drops the state of an earlier term that a lagging member returns late."""
    client, election = client_of(locks), factory.connect().election("x")
    faulty = Faulty.around(locks)
    terms = [await election.campaign().acquire()]
    old = await client.inspect("x")
    await terms[0].release()
    terms.append(await election.campaign().acquire())
    stop, seen = factory.stop_event(), list[Leader | None]()
    async with background(collect(locks.election("x").observe(stop), seen)) as (task,):
        await has(seen, 1)
        inspect = faulty.inner.inspect

        async def lagging(name: str) -> Any:
            return old

        faulty.inner.inspect = lagging  # type: ignore[method-assign]
        calls = faulty.calls["inspect"]

        async def read_again() -> bool:
            return faulty.calls["inspect"] >= calls + 2

        await eventually(read_again, "the old state is read")
        faulty.inner.inspect = inspect  # type: ignore[method-assign]
        await terms[1].release()
        await has(seen, 2)
        stop.set()
        await asyncio.wait_for(task, SOON)
    assert [leader and leader.token for leader in seen] == [terms[1].token, None]


@pytest.mark.client_side
async def test_observers_share_one_poll(factory: MakeClient, locks: LocksView) -> None:
    """Ten observers of two election objects of one client read the engine no more often than one observer."""
    faulty, stop = Faulty.around(locks), factory.stop_event()
    seen: list[list[Leader | None]] = [[] for _ in range(10)]
    elections = [locks.election("x"), locks.election("x")]
    rival = factory.connect().election("x")
    begun = time.monotonic()
    async with background(
        *(collect(elections[at % 2].observe(stop), states) for at, states in enumerate(seen))
    ) as tasks:
        for states in seen:
            await has(states, 1)
        async with rival.campaign():
            for states in seen:
                await has(states, 2)
        for states in seen:
            await has(states, 3)
        assert faulty.calls["inspect"] <= (time.monotonic() - begun) / 0.4 + 3
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON)


# ---------------------------------------------------------------------------- run


class Work:
    """The work of a leader: it records its terms, and ends each one on the test's command, or with an error."""

    def __init__(self) -> None:
        self.terms: list[LeaseView] = []
        self.left = 0
        self.error: BaseException | None = None
        self._enough = asyncio.Semaphore(0)

    async def __call__(self, term: LeaseView) -> None:
        self.terms.append(term)
        try:
            await self._enough.acquire()
            if self.error is not None:
                raise self.error
        finally:
            self.left += 1

    def leave(self) -> None:
        """Let the current, or the next, term end."""
        self._enough.release()

    async def leads(self, number: int = 1) -> LeaseView:
        """Wait for the beginning of that term."""

        async def begun() -> bool:
            return len(self.terms) >= number

        await eventually(begun, f"term {number} begins")
        return self.terms[number - 1]


async def test_run_leads_again_and_again_until_stop(factory: MakeClient, locks: LocksView) -> None:
    """`run` releases the lock after the work has returned, and campaigns again with a higher token, until `stop` is set."""
    work, stop = Work(), factory.stop_event()
    async with background(locks.election("x").run(work.__call__, stop)) as (task,):
        first = await work.leads()
        assert (await locks.inspect("x")).token == first.token
        work.leave()
        second = await work.leads(2)
        assert second.token > first.token
        assert not first.lost.is_set()
        stop.set()
        await asyncio.sleep(0.1)
        second.check()  # `stop` neither cancels the work nor releases the lock
        assert not task.done()
        work.leave()
        await asyncio.wait_for(task, SOON)
    assert len(work.terms) == 2
    await wait_until_unclaimed(locks, "x", timeout=1)


@pytest.mark.fair
async def test_candidate_campaigns_again_at_the_end_of_the_queue(factory: MakeClient) -> None:
    """After its term a candidate queues behind the other one, so that two candidates take turns."""
    candidates = [factory.connect(owner=owner).election("x") for owner in ("a", "b")]
    works, stop, locks = [Work(), Work()], factory.stop_event(), factory.connect()
    async with background(candidates[0].run(works[0].__call__, stop)) as (first,):
        await works[0].leads()
        async with background(candidates[1].run(works[1].__call__, stop)) as (second,):
            for turn in (1, 2):
                await waiting(locks, "x")
                works[0].leave()
                await works[1].leads(turn)
                await waiting(locks, "x")
                works[1].leave()
                await works[0].leads(turn + 1)
            stop.set()
            works[0].leave()
            works[1].leave()
            async with asyncio.timeout(SOON):
                await asyncio.gather(first, second)
    await wait_until_unclaimed(locks, "x")


async def test_stopped_candidate_never_works(factory: MakeClient, locks: LocksView) -> None:
    """A candidate whose `stop` is set before or during its wait never works and leaves the queue."""
    work, stop = Work(), factory.stop_event()
    async with factory.connect().lock("x"):
        async with background(locks.election("x").run(work.__call__, stop)) as (task,):
            await waiting(locks, "x")
            stop.set()
            await asyncio.wait_for(task, 3)
        assert (await locks.inspect("x")).waiters == ()
    await asyncio.wait_for(locks.election("x").run(work.__call__, stop), SOON)
    assert work.terms == []
    await wait_until_unclaimed(locks, "x")


@pytest.mark.client_side
@pytest.mark.runtime_name("blocking")
async def test_leader_keeps_its_lock_until_its_work_returns(factory: MakeClient, locks: LocksView) -> None:
    """A leader whose work ignores `stop` for three ttls keeps its lock renewed until the work returns."""
    work, stop = Work(), factory.stop_event()
    async with background(locks.election("x", ttl=0.4).run(work.__call__, stop)) as (task,):
        term = await work.leads()
        stop.set()
        end = time.monotonic() + 3 * term.ttl
        while time.monotonic() < end:
            term.check()
            assert (await locks.inspect("x")).token == term.token
            await asyncio.sleep(0.1)
        work.leave()
        await asyncio.wait_for(task, SOON)
    await wait_until_unclaimed(locks, "x", timeout=1)


@pytest.mark.client_side
async def test_work_that_raises_resigns(locks: LocksView) -> None:
    """`run` raises the error of the work unchanged and releases the lock."""
    work = Work()
    work.error = ZeroDivisionError("work failed")
    work.leave()
    with pytest.raises(ZeroDivisionError, match="work failed"):
        await asyncio.wait_for(locks.election("x").run(work.__call__), SOON)
    assert len(work.terms) == 1
    await wait_until_unclaimed(locks, "x", timeout=1)


@pytest.mark.client_side
async def test_loss_ends_the_work_and_the_candidate_campaigns_again(factory: MakeClient, locks: LocksView) -> None:
    """A loss cancels the work in asyncio and sets `term.lost` in threads; the next term has a higher token."""
    stop, tokens = factory.stop_event(), list[int]()
    cancelled = 0

    async def work(term: LeaseView) -> None:
        nonlocal cancelled
        tokens.append(term.token)
        if len(tokens) == 2:
            stop.set()
            return
        try:
            assert await term.lost.wait(SOON)
            if factory.runtime_name == "aio":
                await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async with background(locks.election("x", ttl=0.9).run(work, stop)) as (task,):

        async def leads() -> bool:
            return bool(tokens)

        await eventually(leads, "it leads")
        await factory.connect().force_release("x", reason="test")
        await asyncio.wait_for(task, SOON)
    assert len(tokens) == 2
    assert tokens[1] > tokens[0]
    assert cancelled == (factory.runtime_name == "aio")
    await wait_until_unclaimed(locks, "x")


@pytest.mark.client_side
async def test_candidate_does_not_campaign_while_its_lost_work_runs(factory: MakeClient, locks: LocksView) -> None:
    """A candidate whose work ignores the loss does not campaign again before that work returns, while a rival leads."""
    work, stop, rival = Work(), factory.stop_event(), factory.connect()

    async def stubborn(term: LeaseView) -> None:
        inner = asyncio.ensure_future(work(term))
        while not inner.done():
            try:
                await asyncio.shield(inner)
            except asyncio.CancelledError:
                continue

    async with background(locks.election("x", ttl=0.9).run(stubborn, stop)) as (task,):
        term = await work.leads()
        await rival.force_release("x", reason="test")
        async with rival.lock("x", timeout=SOON) as successor:
            assert await term.lost.wait(SOON)
            await asyncio.sleep(0.2)
            assert not task.done()
            assert (await rival.inspect("x")).waiters == ()
            stop.set()
            work.leave()
            await asyncio.wait_for(task, SOON)
            successor.check()
    assert len(work.terms) == 1


@pytest.mark.client_side
async def test_lease_lost_of_another_lock_is_an_error_of_the_work(factory: MakeClient, locks: LocksView) -> None:
    """LeaseLost of the term starts the next campaign; LeaseLost of another lock comes out of `run`."""
    other = factory.connect()
    tokens: list[int] = []

    async def work(term: LeaseView) -> None:
        tokens.append(term.token)
        name = "x" if len(tokens) == 1 else "y"
        if name == "y":
            lease = await other.lock("y", ttl=0.9).acquire()
        else:
            lease = term
        await factory.connect().force_release(name, reason="test")
        while not lease.lost.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                break
        lease.check()

    with pytest.raises(LeaseLost) as caught:
        await asyncio.wait_for(locks.election("x", ttl=0.9).run(work), SOON)
    assert caught.value.name == "y"
    assert len(tokens) == 2
    await wait_until_unclaimed(locks, "x", timeout=1)


@pytest.mark.client_side
async def test_resign_ends_the_term_of_the_running_work(factory: MakeClient, locks: LocksView) -> None:
    """After `resign` the work's `check` raises LeaseLost, and the candidate campaigns again."""
    election, stop, tokens = locks.election("x"), factory.stop_event(), list[int]()

    async def work(term: LeaseView) -> None:
        tokens.append(term.token)
        if len(tokens) == 2:
            stop.set()
            return
        assert await election.resign() is True
        term.check()

    await asyncio.wait_for(election.run(work, stop), SOON)
    assert len(tokens) == 2


@pytest.mark.client_side
@pytest.mark.runtime_name("aio")
async def test_cancelled_run_releases_or_leaves_the_queue(factory: MakeClient, locks: LocksView) -> None:
    """Cancelling `run` ends the work and raises CancelledError; the lock is released, or the claim leaves the queue."""
    work, other = Work(), factory.connect()
    task = asyncio.ensure_future(locks.election("x").run(work.__call__))
    await work.leads()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.left == 1
    await wait_until_unclaimed(other, "x", timeout=1)
    async with other.lock("x"):
        task = asyncio.ensure_future(locks.election("x").run(work.__call__))
        await waiting(other, "x")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other.inspect("x")).waiters == ()


@pytest.mark.client_side
async def test_run_retries_after_an_outage(
    factory: MakeClient, locks: LocksView, caplog: pytest.LogCaptureFixture
) -> None:
    """`run` logs an unreachable engine once and retries until the candidate leads."""
    faulty, work, stop = Faulty.around(locks), Work(), factory.stop_event()
    faulty.refuse("attempt", 4)
    with caplog.at_level(logging.WARNING, logger="fencelock"):
        async with background(locks.election("x").run(work.__call__, stop)) as (task,):
            await work.leads()
            assert caplog.text.count("cannot campaign") == 1
            stop.set()
            work.leave()
            await asyncio.wait_for(task, SOON)
    assert faulty.calls["attempt"] >= 5
    faulty.refuse("attempt", 1000)
    stop.clear()
    async with background(locks.election("x").run(work.__call__, stop)) as (task,):
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.wait_for(task, 3)


@pytest.mark.client_side
async def test_close_while_leading_ends_run(factory: MakeClient) -> None:
    """Closing the client under `run` ends the term, and `run` raises ClientClosed after the work has returned."""
    locks, work = factory.connect(), Work()
    async with background(locks.election("x").run(work.__call__)) as (task,):
        term = await work.leads()
        await locks.close()
        assert term.reason is LossReason.CLOSED
        work.leave()
        with pytest.raises(ClientClosed):
            await asyncio.wait_for(task, SOON)
    with pytest.raises(ClientClosed):
        await anext(locks.election("x").observe())
    assert await take(factory.connect(), "x") > term.token


# ---------------------------------------------------------------------------- healthy


@pytest.mark.client_side
async def test_healthy_is_false_after_grace_without_renewal(factory: MakeClient, locks: LocksView) -> None:
    """`healthy` is False only if this client leads and could not renew for `grace` seconds."""
    election, rival = locks.election("x", ttl=1.2), factory.connect().election("x")
    assert election.healthy(grace=0)
    faulty = Faulty.around(locks)
    term = await election.campaign().acquire()
    await renewed(term)
    assert election.healthy(grace=0.5)
    assert rival.healthy(grace=0)
    faulty.refuse("renew", 1000)

    async def unhealthy() -> bool:
        return not election.healthy(grace=0.1)

    await eventually(unhealthy, "it is not healthy")
    assert election.healthy(grace=SOON)
    faulty.heal()
    if not term.lost.is_set():
        await renewed(term)
        assert election.healthy(grace=0.5)
    await term.release()
    assert election.healthy(grace=0)


@pytest.mark.client_side
async def test_healthy_is_false_until_a_lost_term_is_released(locks: LocksView) -> None:
    """`healthy` stays False for a lost term until it is released."""
    election = locks.election("x", ttl=0.4, renew=False)
    term = await election.campaign().acquire()
    assert election.healthy(grace=0.1)
    assert await term.lost.wait(SOON)

    async def unhealthy() -> bool:
        return not election.healthy(grace=0.1)

    await eventually(unhealthy, "it is not healthy")
    await term.release()
    assert election.healthy(grace=0)
