"""Schedules: each slot runs once in the fleet, and the record says what happened to it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fencelock.core.records import records_of
from fencelock.errors import EngineUnavailable, GuaranteeUnavailable, LeaseLost
from fencelock.primitives.runs import Run
from tests.contract.engines import EngineCase
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.jobs import nothing, schedule, until_lost
from tests.contract.runtimes import LocksView
from tests.contract.steps import background
from tests.servers.plugin import Session
from tests.support.waiting import eventually

pytestmark = pytest.mark.records

NINE = 1_800_003_600.0
"""A full hour."""


def clock(seconds: float) -> Callable[[], float]:
    """Return a wall clock that stands still."""
    return lambda: seconds


def outcomes(runs: list[Run]) -> list[tuple[float, str, int]]:
    """Return the hours, outcomes and attempts of runs, oldest first."""
    return [
        ((run.time.timestamp() - NINE) / 3600, run.outcome.value, run.attempt) for run in reversed(runs) if run.time
    ]


async def test_due_slot_runs_once_in_the_fleet(factory: MakeClient, locks: LocksView) -> None:
    """Of several clients whose clocks differ, one runs the slot; an hour later one runs the next slot."""
    others = [factory.connect() for _ in range(3)]
    skews = (-5.0, 0.0, 2.0, 5.0)
    ran: list[Run] = []
    for hour in (0, 1):
        clients = [
            schedule(factory, client, "report", clock(NINE + hour * 3600 + skew), every=3600)
            for client, skew in zip([locks, *others], skews, strict=True)
        ]
        for runs in await asyncio.gather(*(client.run_due() for client in clients)):
            ran += runs
    assert sorted(outcomes(ran)) == [(0.0, "succeeded", 1), (1.0, "succeeded", 1)]
    kept = await schedule(factory, locks, "report", every=3600).history()
    assert outcomes(kept) == [(0.0, "succeeded", 1), (1.0, "succeeded", 1)]
    assert [(run.owner, run.id, run.token) for run in reversed(kept)] == [(run.owner, run.id, run.token) for run in ran]
    assert kept[0].token > kept[1].token
    # The record has no expiry.
    record = await records_of(factory.engine(), "the test").read("schedule:report")
    assert record is not None
    assert record.expires_in > 50 * 365 * 86400


async def test_two_processes_run_each_slot_once_until_stop(factory: MakeClient, locks: LocksView) -> None:
    """Two clients in `run` run each slot once between them, continue after an error, and end when `stop` is set."""
    other = factory.connect()
    stop, ran = threading.Event(), list[Any]()

    async def work(slot: Any) -> None:
        ran.append(slot.time)
        if len(ran) >= 6:
            stop.set()
        if len(ran) == 2:
            raise ZeroDivisionError

    jobs = [schedule(factory, client, "tick", every=0.2, overlap="wait") for client in (locks, other)]
    async with background(*(job.run(work, stop) for job in jobs)) as tasks:
        await asyncio.gather(*tasks)
    first = ran[0].timestamp()
    assert [round(slot.timestamp() - first, 3) for slot in ran[:6]] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    found = await jobs[0].history(50)
    assert sorted(run.time for run in found if run.time) == ran
    assert [run.error[:17] for run in found if run.outcome == "failed"] == ["ZeroDivisionError"]


@pytest.mark.client_side
async def test_missed_slots_are_caught_up(factory: MakeClient, locks: LocksView) -> None:
    """A client that starts six hours after the last run follows `catch_up`, and records the skipped slots once."""
    for name, expected in (
        ("none", [(0.0, "succeeded"), *((float(hour), "skipped") for hour in range(1, 7))]),
        ("latest", [(0.0, "succeeded"), *((float(hour), "skipped") for hour in range(1, 6)), (6.0, "succeeded")]),
        ("all", [(float(hour), "succeeded") for hour in range(7)]),
    ):
        options: dict[str, Any] = {"every": 3600, "catch_up": name, "within": 86400}
        await schedule(factory, locks, name, clock(NINE + 1), **options).run_due()
        stop = threading.Event()

        async def work(slot: Any, hour: float = 6.0, stop: Any = stop) -> None:
            if slot.time.timestamp() == NINE + hour * 3600:
                stop.set()

        late = schedule(factory, locks, name, clock(NINE + 6 * 3600 + 60), **options)
        async with background(late.run(work, stop)) as (task,):

            async def recorded(late: Any = late) -> bool:
                return outcomes(await late.history(1))[-1:][0][0] == 6.0

            await eventually(recorded, "the slot of 6:00 is decided")
            stop.set()
            await task
        assert [found[:2] for found in outcomes(await late.history())] == expected, name


@pytest.mark.client_side
@pytest.mark.parametrize("fault", ["lose", "drop"])
async def test_slot_whose_claim_got_no_reply_runs_once(factory: MakeClient, locks: LocksView, fault: str) -> None:
    """After a claim without a reply the client reads the record, and the slot runs once."""
    job = schedule(factory, locks, "report", clock(NINE), every=3600)
    assert len(await job.run_due()) == 1
    faulty = Faulty.around(locks)
    getattr(faulty, fault)("write", 2)
    job = schedule(factory, locks, "report", clock(NINE + 3600), every=3600)
    assert len(await job.run_due()) == 1
    other = schedule(factory, factory.connect(), "report", clock(NINE + 3601), every=3600)
    assert await other.run_due() == []
    assert outcomes(await other.history()) == [(0.0, "succeeded", 1), (1.0, "succeeded", 1)]


@pytest.mark.client_side
async def test_nothing_runs_in_an_outage(
    factory: MakeClient, locks: LocksView, caplog: pytest.LogCaptureFixture
) -> None:
    """In an outage `run_due` raises and `run` logs once; nothing runs before the engine is back, then the slot runs once."""
    job = schedule(factory, locks, "report", every=3600)
    faulty = Faulty.around(locks)
    ran: list[Any] = []
    stop = threading.Event()

    async def work(slot: Any) -> None:
        ran.append(slot.time)
        stop.set()

    for step in ("read", "attempt", "write"):
        job = schedule(factory, locks, "report", clock(NINE), every=3600)
        faulty.refuse(step, 2)  # the first write is that of the list of schedules
        with pytest.raises(EngineUnavailable):
            await job.run_due(work)
        faulty.heal()
    assert not ran
    began = time.time()
    watching = schedule(factory, locks, "other", lambda: NINE - 0.2 + time.time() - began, every=3600)
    faulty.refuse("read", 10_000)
    faulty.refuse("attempt", 3)
    with caplog.at_level(logging.WARNING, "fencelock.jobs"):
        async with background(watching.run(work, stop)) as (task,):
            calls = faulty.calls

            async def retried() -> bool:
                return calls["read"] > 8

            await eventually(retried, "the read is tried again")
            assert not ran
            faulty._faults["read"].clear()
            await task
    assert [slot.timestamp() for slot in ran] == [NINE]
    assert len([record for record in caplog.records if "cannot be run" in record.message]) <= 2


@pytest.mark.server
@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("attempt", "killed"),
        ("attempt", "stopped"),
        ("write", "killed"),
        pytest.param("write", "stopped", marks=pytest.mark.long),
    ],
)
async def test_nothing_runs_when_the_server_fails_before_its_reply(
    factory: MakeClient, locks: LocksView, case: EngineCase, engines: Session, step: str, fault: str
) -> None:
    """A server that is killed or stopped before it replies to a claim: nothing runs, and the slot runs once afterwards.

    `attempt` acquires the schedule's lock, `write` records the claim of the slot under it.
    """
    assert case.server is not None
    server = engines.get(case.server)
    # A crash of PostgreSQL may bring a released lock back until its ttl ends.
    options: dict[str, Any] = {"every": 3600, "ttl": 1}
    assert len(await schedule(factory, locks, "report", clock(NINE), **options).run_due()) == 1
    faulty = Faulty.around(locks)
    sent = threading.Event()

    def pause() -> None:
        server.pause()
        sent.set()

    faulty.before(step, pause)
    ran: list[Any] = []

    async def work(slot: Any) -> None:
        ran.append(slot)

    job = schedule(factory, locks, "report", clock(NINE + 3600), **options)
    async with background(job.run_due(work)) as (task,):
        await eventually(sent.is_set, "the request is on its way")
        await asyncio.sleep(0.1)
        assert not task.done(), "it waits for the reply"
        if fault == "killed":
            server.kill()
        # In asyncio, a lease that ends during the write cancels it.
        with pytest.raises(EngineUnavailable if step == "attempt" else (EngineUnavailable, LeaseLost)):
            await task
    assert not ran
    server.start()

    async def ended() -> bool:
        try:
            await job.run_due(work)
            return bool(ran)
        except EngineUnavailable:  # the server may need a moment before it replies again
            return False

    await eventually(ended, "the slot runs")
    other = schedule(factory, factory.connect(), "report", clock(NINE + 3601), **options)
    assert await job.run_due(work) == await other.run_due(work) == []
    assert [(slot.time.timestamp(), slot.attempt) for slot in ran] == [(NINE + 3600, 1)]
    assert outcomes(await other.history(1)) == [(1.0, "succeeded", 1)]


async def test_run_that_lost_its_lease_is_abandoned(factory: MakeClient, locks: LocksView) -> None:
    """A run that lost its lease is abandoned; with two attempts another process runs the slot with a higher token."""
    other = factory.connect()
    began = asyncio.Event()

    async def work(slot: Any) -> None:
        began.set()
        await until_lost(slot)

    options: dict[str, Any] = {"every": 3600, "attempts": 2, "ttl": 1}
    async with background(schedule(factory, locks, "report", clock(NINE), **options).run_due(work)) as (task,):
        await began.wait()
        await other.force_release("schedule:report", reason="a test")
        (run,) = await schedule(factory, other, "report", clock(NINE), **options).run_due()
        assert run.attempt == 2
        with pytest.raises(LeaseLost):
            await task
    kept = await schedule(factory, locks, "report", **options).history()
    assert outcomes(kept) == [(0.0, "abandoned", 1), (0.0, "succeeded", 2)]
    assert kept[0].token > kept[1].token


@pytest.mark.client_side
async def test_failed_run_is_repeated_while_it_has_attempts(factory: MakeClient, locks: LocksView) -> None:
    """`run_due` raises the error of the last attempt; an attempt that succeeds ends the slot."""

    async def fails_once(slot: Any) -> None:
        if slot.attempt == 1:
            raise ZeroDivisionError

    async def fails(slot: Any) -> None:
        raise ZeroDivisionError

    job = schedule(factory, locks, "report", clock(NINE), every=3600, attempts=2)
    assert outcomes(await job.run_due(fails_once)) == [(0.0, "succeeded", 2), (0.0, "failed", 1)]
    job = schedule(factory, locks, "report", clock(NINE + 3600), every=3600, attempts=2)
    with pytest.raises(ZeroDivisionError):
        await job.run_due(fails)
    assert await job.run_due(fails) == []
    assert outcomes(await job.history())[2:] == [(1.0, "failed", 1), (1.0, "failed", 2)]


@pytest.mark.client_side
async def test_slot_during_a_run_is_skipped(factory: MakeClient, locks: LocksView) -> None:
    """A slot or trigger that is due during a run is skipped, and the next run records that; else a trigger runs at once."""
    other = factory.connect()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def work(slot: Any) -> None:
        began.set()
        await go_on.wait()

    extra = await schedule(factory, locks, "report", clock(NINE - 60), every=3600).trigger()
    assert extra is not None
    assert extra.triggered
    now = [NINE]
    long = schedule(factory, locks, "report", lambda: now[0], every=3600)
    async with background(long.run_due(work)) as (task,):
        await began.wait()
        busy = schedule(factory, other, "report", clock(NINE + 3600), every=3600)
        assert await busy.run_due() == []
        assert await busy.trigger() is None
        assert [run.outcome.value for run in await busy.history()] == ["running", "succeeded"]
        now[0] = NINE + 3700
        go_on.set()
        await task
    after = schedule(factory, other, "report", clock(NINE + 7200), every=3600)
    assert len(await after.run_due()) == 1
    expected = [(0.0, "succeeded", 1), (1.0, "skipped", 1), (2.0, "succeeded", 1)]
    assert outcomes([run for run in await after.history() if not run.triggered]) == expected


@pytest.mark.client_side
async def test_overlap_wait_runs_the_slot_afterwards(factory: MakeClient, locks: LocksView) -> None:
    """With overlap="wait" a slot that is due during a run runs after it."""
    began, go_on = asyncio.Event(), asyncio.Event()

    async def work(slot: Any) -> None:
        began.set()
        await go_on.wait()

    options: dict[str, Any] = {"every": 3600, "overlap": "wait"}
    first = schedule(factory, locks, "report", clock(NINE), **options)
    second = schedule(factory, factory.connect(), "report", clock(NINE + 3600), **options)
    async with background(first.run_due(work)) as (task,):
        await began.wait()
        async with background(second.run_due(nothing)) as (waits,):

            async def queued() -> bool:
                return bool((await locks.inspect("schedule:report")).waiters)

            await eventually(queued, "the second run waits")
            go_on.set()
            assert outcomes(await waits) == [(1.0, "succeeded", 1)]
        assert outcomes(await task) == [(0.0, "succeeded", 1)]


@pytest.mark.client_side
async def test_changed_expression_replays_nothing(factory: MakeClient, locks: LocksView) -> None:
    """After a change of the expression no slot is replayed or caught up, and the high-water mark stays."""
    await schedule(factory, locks, "report", clock(NINE + 1), every=3600).run_due()
    half = schedule(factory, locks, "report", clock(NINE + 5 * 3600 + 600), every=1800, catch_up="all", within=86400)
    assert await half.run_due() == []
    half.raw._schedule.clock = clock(NINE + 5 * 3600 + 1800)
    assert outcomes(await half.run_due()) == [(5.5, "succeeded", 1)]
    back = schedule(factory, locks, "report", clock(NINE + 5.5 * 3600), every=3600)
    assert await back.run_due() == []


@pytest.mark.runtime_name("blocking")
async def test_redlock_refuses_jobs(engines: Any) -> None:
    """Redlock keeps no records, so creating `once` and `schedule` raises GuaranteeUnavailable."""
    import fencelock

    with fencelock.connect("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3") as locks:
        with pytest.raises(GuaranteeUnavailable, match="records"):
            locks.once("bill", "1")
        with pytest.raises(GuaranteeUnavailable, match="records"):
            locks.schedule("bill", every=60)
