"""The relay when a receiver refuses for reasons of its own, and when the table holds what cannot be read."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, LeaseLost, StaleToken, aio
from fencelock.lockfree.outbox import Message, Outbox
from fencelock.lockfree.relay import Relay
from tests.lockfree.databases import Database


@pytest.mark.parametrize("error", [StaleToken, LeaseLost])
@pytest.mark.parametrize("on", ["sqlite"])
def test_a_receiver_with_locks_of_its_own(database: Database, key: str, error: type[FencelockError]) -> None:
    """A delivery that loses a lock of its own, or is refused by a fence, fails like any other: other keys go on."""
    outbox, got = Outbox(key), []
    with database.transaction() as connection:
        for name in ("a", "b", "a", "b"):
            outbox.append(connection, name, 1)

    with fencelock.connect(f"memory://{key}") as locks:

        def deliver(message: Message) -> None:
            if message.key == "a":
                raise error("the receiver's own", "elsewhere")
            got.append(message.id)
            if len(got) == 2:
                relay.stop()

        relay = Relay(outbox, database.connect, deliver, locks, poll=0.05)
        relay.run()
        assert len(got) == 2
        with database.connected() as connection:
            assert outbox.pending(connection) == 2
        with pytest.raises(error, match="own"):
            relay.drain()


@pytest.mark.parametrize("on", ["sqlite"])
def test_a_message_that_is_no_json(database: Database, key: str) -> None:
    """A message that somebody else has written, and that cannot be read, holds up its own key and no other."""
    outbox = Outbox(key)
    got: list[Any] = []
    with database.transaction() as connection:
        sql = "INSERT INTO fencelock_outbox (outbox, name, payload) VALUES (?, 'a', 'junk')"
        connection.execute(sql, (key,))
        outbox.append(connection, "b", 1)
        outbox.append(connection, "a", 2)
    with fencelock.connect(f"memory://{key}") as locks:
        with pytest.raises(FencelockError, match="no JSON"):
            Relay(outbox, database.connect, lambda message: got.append(message.key), locks).drain()
    assert got == ["b"]


@pytest.mark.parametrize("on", ["sqlite"])
async def test_a_blocking_delivery_does_not_stop_the_event_loop(database: Database, key: str) -> None:
    """Under asyncio a plain function is called in a thread: tasks, and so the renewal of leases, go on meanwhile."""
    outbox, started, go_on = Outbox(key), threading.Event(), threading.Event()
    went_on: list[bool] = []
    with database.transaction() as connection:
        outbox.append(connection, "a", 1)

    def deliver(message: Message) -> None:
        started.set()
        went_on.append(go_on.wait(20))

    async with aio.connect(f"memory://{key}") as locks:
        draining = asyncio.create_task(Relay(outbox, database.connect, deliver, locks).drain())
        await asyncio.to_thread(started.wait, 20)
        go_on.set()
        assert await draining == 1
    assert went_on == [True]


@pytest.mark.parametrize("on", ["sqlite"])
async def test_a_blocking_delivery_is_waited_for_after_a_loss(database: Database, key: str) -> None:
    """A relay that lost its lease does not end before the delivery that it cannot interrupt."""
    outbox, started, go_on, lost = Outbox(key), threading.Event(), threading.Event(), asyncio.Event()
    ended: list[str] = []
    with database.transaction() as connection:
        outbox.append(connection, "a", 1)

    def deliver(message: Message) -> None:
        started.set()
        go_on.wait(20)
        ended.append("delivery")

    async with aio.connect(f"memory://{key}", on_lost=lambda lease, reason: lost.set()) as locks:
        draining = asyncio.create_task(Relay(outbox, database.connect, deliver, locks, ttl=0.3).drain())
        draining.add_done_callback(lambda task: ended.append("relay"))
        await asyncio.to_thread(started.wait, 20)
        await locks.force_release(f"outbox:{key}", reason="a test")
        await lost.wait()
        for _ in range(10):  # let the loss reach the relay's task
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(LeaseLost):
            await draining
    assert ended == ["delivery", "relay"]


@pytest.mark.parametrize("on", ["sqlite"])
async def test_every_kind_of_awaited_delivery_runs_on_the_event_loop(database: Database, key: str) -> None:
    """`async def`, a part of it, an object that is called like it, and a function that returns a coroutine are awaited."""
    outbox = Outbox(key)
    got: list[str] = []

    class Sender:
        async def __call__(self, message: Message) -> None:
            await deliver("object", message)

    async def deliver(how: str, message: Message) -> None:
        asyncio.get_running_loop()
        await asyncio.sleep(0)
        got.append(how)

    hows: list[Any] = [partial(deliver, "partial"), Sender(), lambda message: deliver("lambda", message)]
    async with aio.connect(f"memory://{key}") as locks:
        for how in hows:
            with database.transaction() as connection:
                outbox.append(connection, "a", 1)
            assert await Relay(outbox, database.connect, how, locks).drain() == 1
    assert got == ["partial", "object", "lambda"]
