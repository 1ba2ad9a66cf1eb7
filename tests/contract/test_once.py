"""`once`: a slot runs at most as often as it has attempts, in whichever process, and whatever happens to its replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fencelock.core.records import records_of
from fencelock.errors import EngineUnavailable, LeaseLost
from fencelock.primitives.runs import decode
from tests.contract.factory import MakeClient
from tests.contract.faults import Faulty
from tests.contract.jobs import nothing, once, until_lost
from tests.contract.runtimes import LocksView
from tests.contract.steps import background
from tests.support.waiting import eventually

pytestmark = pytest.mark.records


async def stored(factory: MakeClient, name: str, slot: str) -> tuple[str, int, int]:
    """Return the outcome, attempt and token that the record has."""
    record = await records_of(factory.engine(), "the test").read(f"once:{name}/{slot}")
    assert record is not None
    run = decode(name, json.loads(record.value))
    return run.outcome.value, run.attempt, run.token


async def test_slot_runs_once(factory: MakeClient, locks: LocksView) -> None:
    """A slot that ran does not run again in any client; other slots and other names do."""
    other = factory.connect()
    assert await once(factory, locks, "bill", "1").run(nothing) is True
    for client in (locks, other):
        assert await once(factory, client, "bill", "1", attempts=3).run(nothing) is False
        async with once(factory, client, "bill", "1") as slot:
            assert slot is None
    assert await once(factory, other, "bill", "2").run(nothing) is True
    assert await once(factory, other, "a/b", "c").run(nothing) is True
    assert await once(factory, other, "a", "b/c").run(nothing) is True
    assert await once(factory, other, "long" * 256, "slot" * 256).run(nothing) is True
    assert await once(factory, locks, "long" * 256, "slot" * 256).run(nothing) is False
    outcome, attempt, token = await stored(factory, "bill", "1")
    assert (outcome, attempt) == ("succeeded", 1)
    async with once(factory, other, "bill", "1", again=True) as slot:
        assert (slot.attempt, slot.slot, slot.time) == (2, "1", None)
        assert slot.token > token


async def test_running_slot_is_not_run_elsewhere(factory: MakeClient, locks: LocksView) -> None:
    """While a slot runs no other client runs it, even with attempts left or `again=True`, and no client waits."""
    other = factory.connect()
    async with once(factory, locks, "bill", "1") as slot:
        assert slot is not None
        for options in ({}, {"attempts": 5}, {"again": True}):
            assert await once(factory, other, "bill", "1", **options).run(nothing) is False
    assert (await stored(factory, "bill", "1"))[0] == "succeeded"


@pytest.mark.client_side
async def test_failed_run_uses_up_an_attempt(factory: MakeClient, locks: LocksView) -> None:
    """A body that raises is a failed run; the slot runs again only while it has attempts, with a higher token."""
    tokens = []
    for attempt in (1, 2):
        with pytest.raises(ZeroDivisionError):
            async with once(factory, locks, "bill", "1", attempts=2) as slot:
                assert slot.attempt == attempt
                tokens.append(slot.token)
                _ = 1 / 0
        assert await stored(factory, "bill", "1") == ("failed", attempt, slot.token)
    assert tokens == sorted(set(tokens))
    assert await once(factory, locks, "bill", "1", attempts=2).run(nothing) is False
    assert await once(factory, locks, "bill", "1", attempts=3).run(nothing) is True


@pytest.mark.client_side
@pytest.mark.parametrize("fault", ["lose", "drop"])
async def test_slot_whose_claim_got_no_reply_runs_once(factory: MakeClient, locks: LocksView, fault: str) -> None:
    """After a claim without a reply the client reads the record: the slot runs once, whether the claim was written or not."""
    faulty = Faulty.around(locks)
    getattr(faulty, fault)("write")
    assert await once(factory, locks, "bill", "1").run(nothing) is True
    assert await once(factory, factory.connect(), "bill", "1").run(nothing) is False
    assert (await stored(factory, "bill", "1"))[:2] == ("succeeded", 1)


@pytest.mark.client_side
@pytest.mark.parametrize("step", ["read", "attempt", "write"])
async def test_nothing_runs_while_the_engine_fails(factory: MakeClient, locks: LocksView, step: str) -> None:
    """If the engine fails before the claim is written, the error comes out and nothing runs; afterwards the slot runs."""
    faulty = Faulty.around(locks)
    ran: list[Any] = []

    async def work(slot: Any) -> None:
        ran.append(slot)

    job = once(factory, locks, "bill", "1")
    faulty.refuse(step)
    with pytest.raises(EngineUnavailable):
        await job.run(work)
    assert not ran
    assert await job.run(work) is True
    assert len(ran) == 1


async def test_run_that_lost_its_lease_cannot_replace_the_next_outcome(factory: MakeClient, locks: LocksView) -> None:
    """A run that lost its lease sees it, and its outcome does not replace that of the next attempt."""
    other = factory.connect()
    began = asyncio.Event()

    async def work(slot: Any) -> None:
        began.set()
        await until_lost(slot)

    async with background(once(factory, locks, "bill", "1", ttl=1, attempts=2).run(work)) as (task,):
        await began.wait()
        await other.force_release("once:bill/1", reason="a test")
        tokens: list[int] = []

        async def second_attempt(slot: Any) -> None:
            tokens.append(slot.token)
            with pytest.raises(LeaseLost):
                await task

        async def ran() -> bool:
            return bool(await once(factory, other, "bill", "1", attempts=2).run(second_attempt))

        await eventually(ran, "the slot runs again")  # a server may take a moment to end the session of the first
        assert [await stored(factory, "bill", "1")] == [("succeeded", 2, token) for token in tokens]
