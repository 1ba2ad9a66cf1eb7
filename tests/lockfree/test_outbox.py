"""The outbox: delivered if and only if it is committed, at least once, in order for each key, by one relay at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import FencelockError, LockTimeout, StaleToken, aio
from fencelock.aio.lockfree import outbox as aio_outbox
from fencelock.aio.lockfree import relay as aio_relay
from fencelock.fences.sql import SqlFence
from fencelock.lockfree.outbox import Message, Outbox
from fencelock.lockfree.relay import Relay
from tests.lockfree.apis import api_of, resolve
from tests.lockfree.databases import KINDS, Database
from tests.support.processes import Child
from tests.support.waiting import eventually_blocking

RELAY = """
import json
import fencelock
from fencelock.lockfree.outbox import Outbox
from fencelock.lockfree.relay import Relay

def deliver(message):
    print(json.dumps([message.key, message.payload, message.token]), flush=True)
    if hold == "hold":
        sys.stdin.readline()

where, name, hold = args
with fencelock.connect(where, ttl=5) as locks:
    Relay(Outbox(name), lambda: connect_to(url), deliver, locks, poll=0.05).run()
"""


def put(database: Database, outbox: Outbox, *messages: tuple[str, Any]) -> None:
    """Append messages, each in a transaction of its own."""
    for key, payload in messages:
        with database.transaction() as connection:
            outbox.append(connection, key, payload)


def pending(database: Database, outbox: Outbox) -> int:
    """Return the number of pending messages."""
    with database.connected() as connection:
        return int(outbox.pending(connection))


@contextmanager
def running(relay: Relay) -> Iterator[None]:
    """A relay that runs in a thread."""
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join()


async def test_every_kind_of_connection(database: Database, on: str, kind: str, key: str) -> None:
    """On every kind of connection committed messages are delivered, and rolled-back ones are not."""
    make = KINDS[on, kind]
    async with make(database) as connection:
        api = api_of(connection)
        outbox = api.outbox.Outbox(key)
        await api.sql.begin()
        await resolve(outbox.append(connection, "ä", {"n": 1}))
        await resolve(outbox.append(connection, "ä", {"n": 2}))
        await api.sql.commit()
        await api.sql.begin()
        await resolve(outbox.append(connection, "ä", {"n": 3}))
        await api.sql.rollback()
        await api.sql.begin()
        assert await resolve(outbox.pending(connection)) == 2
        await api.sql.rollback()
    got: list[Message] = []

    async def deliver(message: Message) -> None:
        got.append(message)

    if api.sql.awaited:
        async with aio.connect("memory://outbox-kinds") as locks, make(database) as connection:

            async def connect() -> Any:
                return connection

            assert await api.relay.Relay(outbox, connect, deliver, locks).drain() == 2
    else:
        with fencelock.connect("memory://outbox-kinds-blocking") as blocking_locks:
            async with make(database) as connection:
                assert api.relay.Relay(outbox, lambda: connection, got.append, blocking_locks).drain() == 2
    assert pending(database, Outbox(key)) == 0
    assert [(message.key, message.payload["n"]) for message in got] == [("ä", 1), ("ä", 2)]


def test_order_is_the_order_of_commits(database: Database, key: str) -> None:
    """An append waits for another transaction that has appended under the same key, and not for other keys."""
    outbox = Outbox(key)
    with database.connected() as first, ThreadPoolExecutor(2) as pool:
        outbox.append(first, "a", 1)
        second = pool.submit(put, database, outbox, ("a", 2))
        if database.name != "sqlite":  # which has one writer at a time in any case
            pool.submit(put, database, outbox, ("b", 3)).result(60)
        outbox.append(first, "a", 1.5)
        assert not second.done()
        first.commit()
        second.result(60)
    got: list[Any] = []
    with fencelock.connect("memory://order") as locks:
        Relay(outbox, database.connect, lambda message: got.append(message.payload), locks, batch=2).drain()
    assert [payload for payload in got if payload != 3] == [1, 1.5, 2]


def test_killed_while_delivering(database: Database, key: str, child: Callable[..., Child], tmp_path: Path) -> None:
    """If a relay is killed before it deletes a message, the next one delivers it again, with a higher token."""
    outbox, locks = Outbox(key), f"sqlite:///{tmp_path}/locks.db"
    put(database, outbox, ("a", 1), ("a", 2))
    first = child(database, RELAY, locks, key, "hold")
    said = [first.read_json()]
    first.kill()
    second = child(database, RELAY, locks, key, "")
    said += [second.read_json(), second.read_json()]
    assert [payload for _, payload, _ in said] == [1, 1, 2]
    assert said[1][2] > said[0][2]
    eventually_blocking(lambda: pending(database, outbox) == 0)


@pytest.mark.parametrize("on", ["sqlite", pytest.param("postgresql", marks=pytest.mark.engine("postgres"))])
def test_stopped_while_delivering(database: Database, key: str, child: Callable[..., Child], tmp_path: Path) -> None:
    """A relay that was stopped past its lease delivers and deletes nothing when it continues."""
    outbox, locks = Outbox(key), f"sqlite:///{tmp_path}/locks.db"
    put(database, outbox, ("a", 1), ("a", 2))
    first = child(database, RELAY, locks, key, "hold")
    assert first.read_json()[1] == 1
    first.stop()
    second = child(database, RELAY, locks, key, "")
    assert [second.read_json()[1], second.read_json()[1]] == [1, 2]
    put(database, outbox, ("a", 3))
    assert second.read_json()[1] == 3
    eventually_blocking(lambda: pending(database, outbox) == 0)
    first.resume()
    first.send_line()
    second.kill()
    put(database, outbox, ("a", 4))
    assert first.read_json()[1] == 4  # it acquired the lock again: it delivered neither 2 nor 3 before
    first.send_line()
    eventually_blocking(lambda: pending(database, outbox) == 0)


def test_replaced_relay_cannot_delete_messages(database: Database, key: str) -> None:
    """The fence refuses to let a replaced relay delete messages, also if it does not notice the end of its lease."""
    outbox = Outbox(key)
    put(database, outbox, ("a", 1), ("a", 2))
    with fencelock.connect("memory://replaced") as locks:
        relay = Relay(outbox, database.connect, lambda message: None, locks)
        name = f"outbox:{key}"

        def replace() -> None:
            with locks.lock(name) as newer, database.transaction() as connection:
                SqlFence().check(connection, newer, name)

        def deliver(message: Message) -> None:
            locks.force_release(name, reason="a test")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(replace).result()

        with pytest.raises((StaleToken, fencelock.LeaseLost)):
            Relay(outbox, database.connect, deliver, locks).drain()
        assert pending(database, outbox) == 2
        assert relay.drain() == 2


@pytest.mark.parametrize("on", ["sqlite"])
def test_failing_key_does_not_delay_other_keys(database: Database, key: str) -> None:
    """A message that cannot be delivered delays its own key, in order, and no other."""
    outbox, got = Outbox(key), []
    put(database, outbox, ("bad", 1), ("good", 2), ("bad", 3), ("good", 4))
    failures = iter(range(3))

    def deliver(message: Message) -> None:
        if message.key == "bad" and next(failures, None) is not None:
            raise ConnectionError("the receiver is down")
        got.append(message.payload)

    with fencelock.connect("memory://failing") as locks:
        with running(Relay(outbox, database.connect, deliver, locks, poll=0.01, batch=2)):
            eventually_blocking(lambda: len(got) == 4)
            eventually_blocking(lambda: pending(database, outbox) == 0)
    assert [payload for payload in got if payload % 2 == 0] == [2, 4]
    assert [payload for payload in got if payload % 2] == [1, 3]
    assert got[:2] == [2, 4]


@pytest.mark.parametrize("on", ["sqlite"])
def test_drain_deletes_what_it_delivered_before_an_error(database: Database, key: str) -> None:
    """`drain` raises an error of the receiver, and deletes the messages that were delivered before it."""
    outbox = Outbox(key)
    put(database, outbox, ("a", 1), ("b", 2))

    def deliver(message: Message) -> None:
        if message.payload == 2:
            raise ZeroDivisionError

    with fencelock.connect("memory://drain") as locks:
        relay = Relay(outbox, database.connect, deliver, locks)
        relay.stop()  # which is for `run`
        with pytest.raises(ZeroDivisionError):
            relay.drain()
        assert pending(database, outbox) == 1
        lease = locks.lock(f"outbox:{key}").acquire()
        with pytest.raises(LockTimeout):
            Relay(outbox, database.connect, deliver, locks).drain(timeout=0.01)
        lease.release()


def test_relay_reconnects(database: Database, key: str) -> None:
    """A relay whose connection breaks continues with another one."""
    outbox, got, made = Outbox(key), [], []

    def connect() -> Any:
        made.append(database.connect())
        return made[-1]

    def deliver(message: Message) -> None:
        got.append(message.payload)
        if len(got) == 1:
            made[-1].close()  # before it is marked

    with fencelock.connect("memory://hangs-up") as locks:
        with running(Relay(outbox, connect, deliver, locks, poll=0.01)):
            put(database, outbox, ("a", 1))
            eventually_blocking(lambda: got == [1, 1])
            put(database, outbox, ("a", 2))
            eventually_blocking(lambda: pending(database, outbox) == 0)
    assert got == [1, 1, 2]


@pytest.mark.parametrize("on", ["sqlite"])
def test_one_relay_of_several_delivers(database: Database, key: str) -> None:
    """Of several relays one delivers; when it is stopped, another one continues, and no message is lost or repeated."""
    outbox = Outbox(key)
    got: list[tuple[str, int]] = []
    with fencelock.connect("memory://several") as locks:

        def relay(me: str) -> Relay:
            return Relay(outbox, database.connect, lambda it: got.append((me, it.payload)), locks, poll=0.01)

        relays = [relay("one"), relay("other")]
        with running(relays[0]):
            put(database, outbox, ("a", 1))
            eventually_blocking(lambda: len(got) == 1)
            with running(relays[1]):
                put(database, outbox, ("a", 2))
                eventually_blocking(lambda: len(got) == 2)
                relays[0].stop()
                put(database, outbox, ("a", 3))
                eventually_blocking(lambda: len(got) == 3)
    assert [payload for _, payload in got] == [1, 2, 3]
    assert (got[0][0], got[-1][0]) == ("one", "other")


@pytest.mark.parametrize("on", ["sqlite"])
async def test_awaited(database: Database, on: str, key: str) -> None:
    """In asyncio a relay awaits its deliveries, is cancelled when it loses its lease, and continues with a new one."""
    outbox, got = Outbox(key), []
    put(database, outbox, ("a", 1), ("a", 2))
    interrupted = asyncio.Event()

    async with aio.connect("memory://awaited") as locks:

        async def deliver(message: Message) -> None:
            got.append(message.payload)
            if len(got) == 1:
                await locks.force_release(f"outbox:{key}", reason="a test")
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    interrupted.set()
                    raise

        async def connect() -> Any:
            import aiosqlite

            return await aiosqlite.connect(database.path())

        relay = aio_relay.Relay(aio_outbox.Outbox(key), connect, deliver, locks, poll=0.01, ttl=1)
        task = asyncio.create_task(relay.run())
        await interrupted.wait()
        await asyncio.to_thread(eventually_blocking, lambda: pending(database, outbox) == 0)
        relay.stop()
        await task
    assert (got[:2], got[-1]) == ([1, 1], 2)


@pytest.mark.parametrize("on", ["sqlite"])
def test_invalid_configuration_is_raised(database: Database, key: str, tmp_path: Path) -> None:
    """A connection in autocommit mode, missing tables and invalid names are errors, also in a running relay."""
    import sqlite3

    auto = sqlite3.connect(database.path(), isolation_level=None)
    with pytest.raises(FencelockError, match="commits each statement"):
        Outbox(key).append(auto, "a", 1)
    auto.close()
    with fencelock.connect("memory://setup") as locks:
        bare = Relay(Outbox(key), lambda: sqlite3.connect(tmp_path / "empty.db"), print, locks)
        with pytest.raises(FencelockError, match="fencelock schema"):
            bare.run()
        with pytest.raises(TypeError, match=r"fencelock\.aio"):
            Relay(Outbox(key), lambda: asyncio.sleep(0), print, locks).run()
    with pytest.raises(ValueError, match="255 bytes"):
        Outbox("k" * 256)
    with database.connected() as connection:
        with pytest.raises(ValueError, match="must not be empty"):
            Outbox(key).append(connection, "", 1)
        with pytest.raises(TypeError):
            Outbox(key).append(connection, "a", object())


@pytest.mark.engine("mariadb")
@pytest.mark.parametrize("on", ["mariadb"])
def test_idle_keys_are_pruned(database: Database, key: str) -> None:
    """On MariaDB `prune` removes the rows of unused keys, and keeps those of other outboxes."""
    outbox, other = Outbox(key), Outbox(f"{key} other")
    put(database, outbox, ("old", 1), ("new", 2))
    put(database, other, ("old", 1))
    database.ask("UPDATE fencelock_outbox_key SET used = 1 WHERE name = ?", b"old")
    with database.transaction() as connection:
        assert outbox.prune(connection) == 1
    for each, names in ((outbox, [(b"new",)]), (other, [(b"old",)])):
        rows = database.ask("SELECT name FROM fencelock_outbox_key WHERE outbox = ?", each.name.encode())
        assert rows == names
    assert pending(database, outbox) == 2


@pytest.mark.parametrize("on", ["sqlite"])
def test_idle_relay_stops_at_once(database: Database, key: str) -> None:
    """A relay without messages stops at once, also with a long poll interval."""
    with fencelock.connect("memory://stop") as locks:
        started = time.monotonic()
        with running(Relay(Outbox(key), database.connect, print, locks, poll=600)):
            eventually_blocking(lambda: bool(list(locks.names())))
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("on", [pytest.param("postgresql", marks=pytest.mark.engine("postgres"))])
@pytest.mark.parametrize("how", ["connection", "getconn"])
def test_relay_returns_connections_to_their_pool(database: Database, key: str, how: str) -> None:
    """A relay takes connections from a pool and gives them back."""
    from psycopg_pool import ConnectionPool

    with (
        ConnectionPool(database.url, min_size=1, max_size=1, timeout=30) as pool,
        fencelock.connect("memory://outbox-pool") as locks,
    ):
        relay = Relay(
            Outbox(key), pool.connection if how == "connection" else pool.getconn, lambda message: None, locks
        )
        for n in range(3):
            put(database, Outbox(key), ("a", n))
            assert relay.drain() == 1


def test_relay_needs_a_function_that_connects() -> None:
    """A relay refuses an invalid `connect` when it is made."""
    with fencelock.connect("memory://outbox-none") as locks, pytest.raises(TypeError, match="a function that opens"):
        Relay(Outbox(), "postgresql://localhost/shop", lambda message: None, locks)  # type: ignore[arg-type]
