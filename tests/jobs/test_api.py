"""What is peculiar to the objects of `once` and `schedule`: arguments, decorators, the next slot."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any

import pytest

import fencelock
from fencelock import aio


@pytest.mark.parametrize(
    "options",
    [
        {"every": 60, "catch_up": "some"},
        {"every": 60, "overlap": "both"},
        {"every": 60, "attempts": 0},
        {"every": 60, "attempts": True},
        {"every": 60, "within": 0},
        {"every": 60, "ttl": 0.001},
        {"every": 60, "purpose": "correctness"},
    ],
)
def test_wrong_option_of_a_schedule_is_refused(options: dict[str, Any]) -> None:
    """Creating a schedule refuses a wrong option."""
    with fencelock.connect("memory://jobs") as locks:
        with pytest.raises((fencelock.InvalidArgument, fencelock.GuaranteeUnavailable), match=r"ttl|job"):
            locks.schedule("job", **options)


@pytest.mark.parametrize("options", [{"keep": 1}, {"keep": None}, {"attempts": 1.5}, {"slot": ""}, {"slot": 5}])
def test_wrong_option_of_once_is_refused(options: dict[str, Any]) -> None:
    """Creating a `once` object refuses a wrong option."""
    with fencelock.connect("memory://jobs") as locks:
        with pytest.raises(fencelock.InvalidArgument):
            locks.once("job", **{"slot": "1", **options})


async def test_work_of_the_wrong_kind_is_refused() -> None:
    """The blocking API refuses a coroutine function and asyncio's a plain one, before anything runs."""

    async def awaited(slot: Any) -> None: ...

    def plain(slot: Any) -> None: ...

    with fencelock.connect("memory://jobs") as locks:
        schedule, once = locks.schedule("work", every=60), locks.once("work", "1")
        for call in (schedule.run_due, schedule.run, schedule.trigger, schedule, once.run):
            with pytest.raises(TypeError, match="async def"):
                call(awaited)
    async with aio.connect("memory://jobs") as awaits:
        other, another = awaits.schedule("work", every=60), awaits.once("work", "1")
        methods: list[Any] = [other.run_due, other.run, other.trigger, another.run]
        for method in methods:
            with pytest.raises(TypeError, match="async def"):
                await method(plain)
        with pytest.raises(TypeError, match="async def"):
            other(plain)  # type: ignore[arg-type]


async def test_work_without_a_parameter_is_refused_before_it_uses_up_a_slot() -> None:
    """A function that does not accept the slot is refused before the claim; the slot is still free to run."""

    def plain() -> None: ...

    async def awaited(first: Any, second: Any) -> None: ...

    words = r"^work is called with one argument, as in `def work\(slot\)`; \w+\(\) does not accept that: "
    with fencelock.connect("memory://no-parameter") as locks:
        schedule, once = locks.schedule("work", every=60), locks.once("work", "1")
        calls: list[Any] = [schedule.run_due, schedule.run, schedule.trigger, schedule, once.run]
        for call in calls:
            with pytest.raises(fencelock.InvalidType, match=words):
                call(plain)
        with pytest.raises(fencelock.InvalidType, match=r"`def work\(term\)`"):
            locks.election("work").run(plain)  # type: ignore[arg-type]
        assert schedule.history() == []
        assert once.run(print)
    async with aio.connect("memory://no-parameter") as awaits:
        other, another = awaits.schedule("work", every=60), awaits.once("work", "2")
        methods: list[Any] = [other.run_due, other.run, other.trigger, another.run]
        for method in methods:
            with pytest.raises(fencelock.InvalidType, match=words):
                await method(awaited)


def test_decorator_may_take_the_slot_for_a_function_without_a_parameter() -> None:
    """The parameters of the function that is called count, not those of one that it wraps."""

    def wrapped() -> None: ...

    @wraps(wrapped)
    def work(slot: object) -> None:
        wrapped()

    with fencelock.connect("memory://wrapped") as locks:
        assert locks.once("work", "1").run(work)


def test_changed_expression_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A schedule that finds another expression under its name says so once: two jobs may share the name."""
    with fencelock.connect("memory://changed") as locks:
        locks.schedule("billing", every=2).run_due(lambda slot: None)
        assert not caplog.records
        changed = locks.schedule("billing", every=3600)
        for _ in range(2):
            changed.run_due(lambda slot: None)
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "the expression of 'billing' has changed from 'every 2 s' to 'every 3600 s'"
        )
        assert "rename one" in record.getMessage()


async def test_decorated_function_takes_no_argument_and_runs_what_is_due() -> None:
    """A decorated function keeps its name and takes no argument, as schedulers expect; each call runs what is due."""
    ran: list[object] = []
    with fencelock.connect("memory://decorated") as locks:

        @locks.schedule("job", every=31536000, within=4e7)
        def job(slot: fencelock.Slot) -> None:
            """Do it."""
            ran.append(slot)

        assert (job.__name__, job.__doc__, str(inspect.signature(job))) == ("job", "Do it.", "() -> 'list[Run]'")
        assert [run.outcome.value for run in job()] == ["succeeded"]
        assert job() == []
    async with aio.connect("memory://decorated") as awaits:

        @awaits.schedule("other", every=31536000, within=4e7)
        async def other(slot: aio.Slot) -> None:
            ran.append(slot)

        assert len(await other()) == 1
    assert len(ran) == 2


def test_next_returns_utc() -> None:
    """`next` returns the next slot in UTC, whatever the time zone of the expression."""
    with fencelock.connect("memory://jobs") as locks:
        schedule = locks.schedule("next", cron="30 2 * * *", tz="Europe/Berlin")
        schedule._schedule.clock = lambda: datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()
        assert schedule.next() == datetime(2026, 7, 2, 0, 30, tzinfo=UTC)
        assert repr(schedule) == "<Schedule 'next'>"


def test_next_is_after_a_slot_that_ran_early() -> None:
    """After `run_due` has run a slot ahead of its time, `next` returns the slot behind it."""
    with fencelock.connect("memory://early") as locks:
        schedule = locks.schedule("early", every=3600)
        schedule._schedule.clock = lambda: 1_800_000_000.0 - 10
        assert schedule.next().timestamp() == 1_800_000_000
        (run,) = schedule.run_due(lambda slot: None)
        assert run.time == datetime.fromtimestamp(1_800_000_000, UTC)
        assert schedule.next().timestamp() == 1_800_000_000 + 3600
        other = locks.schedule("early", every=3600)
        other._schedule.clock = schedule._schedule.clock
        assert other.run_due(lambda slot: None) == []
        assert other.next() == schedule.next()


def test_history_is_bounded() -> None:
    """The record keeps the last 50 runs, and `limit` takes the newest of them."""
    with fencelock.connect("memory://history") as locks:
        schedule = locks.schedule("history", every=60)
        for minute in range(60):
            schedule._schedule.clock = partial(float, 1_800_000_000 + 60 * minute)
            assert len(schedule.run_due(lambda slot: None)) == 1
        assert len(schedule.history(100)) == 50
        newest = schedule.history(1)[0].time
        assert newest is not None
        assert newest.timestamp() == 1_800_000_000.0 + 60 * 59
        with pytest.raises(fencelock.InvalidArgument):
            schedule.history(0)


def test_stop_ends_the_sleep_soon() -> None:
    """`run` with a distant next slot ends within a second after `stop`, and after the client is closed."""
    for end in ("stop", "close"):
        locks = fencelock.connect(f"memory://stopped-{end}")
        stop, errors = threading.Event(), list[Exception]()

        def run(locks: fencelock.Locks = locks, stop: threading.Event = stop, errors: Any = errors) -> None:
            try:
                locks.schedule("job", every=31536000).run(lambda slot: None, stop)
            except fencelock.ClientClosed as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.1)
        stop.set() if end == "stop" else locks.close()
        thread.join(5)
        assert not thread.is_alive()
        assert bool(errors) == (end == "close")
        locks.close()


async def test_cancelled_run_is_recorded_as_failed() -> None:
    """A task that is cancelled during its work records a failed run, and stays cancelled."""
    async with aio.connect("memory://cancelled") as locks:
        schedule = locks.schedule("job", every=31536000, within=4e7)
        began = asyncio.Event()

        async def work(slot: aio.Slot) -> None:
            began.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(schedule.run_due(work))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (run,) = await schedule.history()
        assert (run.outcome.value, run.error) == ("failed", "CancelledError")
        assert [name async for name in locks.names()] == []
