"""The relay when a receiver refuses for reasons of its own, and when the table holds what cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, LeaseLost, StaleToken
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
