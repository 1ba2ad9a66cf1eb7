"""The relay with errors of the receiver, malformed messages, and arguments of the other API."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, InvalidType, LeaseLost, StaleToken, aio
from fencelock.aio.lockfree import outbox as aio_outbox
from fencelock.aio.lockfree import relay as aio_relay
from fencelock.lockfree.outbox import Message, Outbox
from fencelock.lockfree.relay import Relay
from tests.lockfree.databases import Database


@pytest.mark.parametrize("error", [StaleToken, LeaseLost])
@pytest.mark.parametrize("on", ["sqlite"])
def test_receiver_that_loses_its_own_lock(database: Database, key: str, error: type[FencelockError]) -> None:
    """LeaseLost or StaleToken of a receiver is a failure like any other: other keys are delivered."""
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
def test_message_that_is_no_json(database: Database, key: str) -> None:
    """A malformed message of another program delays its own key and no other."""
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
async def test_every_kind_of_coroutine_function_delivers(database: Database, key: str) -> None:
    """`async def`, a partial of it, and an object with an `async def __call__` are awaited on the event loop."""
    import aiosqlite

    outbox = Outbox(key)
    got: list[str] = []

    class Sender:
        async def __call__(self, message: Message) -> None:
            await deliver("object", message)

    async def deliver(how: str, message: Message) -> None:
        asyncio.get_running_loop()
        await asyncio.sleep(0)
        got.append(how)

    hows: list[Any] = [partial(deliver, "partial"), Sender()]
    async with aio.connect(f"memory://{key}") as locks:
        for how in hows:
            with database.transaction() as connection:
                outbox.append(connection, "a", 1)
            relay = aio_relay.Relay(aio_outbox.Outbox(key), lambda: aiosqlite.connect(database.path()), how, locks)
            assert await relay.drain() == 1
    assert got == ["partial", "object"]


@pytest.mark.parametrize("on", ["sqlite"])
async def test_the_other_half_is_refused(database: Database, key: str) -> None:
    """A relay refuses locks, an outbox, a connection and a `deliver` of the other API, and says what it needs."""

    async def deliver(message: Message) -> None: ...

    ours, theirs = Outbox(key), aio_outbox.Outbox(key)
    async with aio.connect(f"memory://{key}") as locks:
        with pytest.raises(InvalidType, match=r"use fencelock\.aio\.lockfree"):
            Relay(ours, database.connect, print, locks)
        with pytest.raises(InvalidType, match=r"use fencelock\.lockfree"):
            aio_relay.Relay(ours, database.connect, deliver, locks)
        with pytest.raises(InvalidType, match="must be a coroutine function"):
            aio_relay.Relay(theirs, database.connect, print, locks)
        with pytest.raises(InvalidType, match=r"use fencelock\.lockfree"):
            await aio_relay.Relay(theirs, database.connect, deliver, locks).drain()
    with fencelock.connect(f"memory://{key}") as blocking_locks:
        with pytest.raises(InvalidType, match="must be a plain function"):
            Relay(ours, database.connect, deliver, blocking_locks)
