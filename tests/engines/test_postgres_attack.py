"""Attacks that broke the engines of PostgreSQL once: cancelled renewals, shared sessions, lost answers, dead connections."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, cast

import pytest

import fencelock
import fencelock.aio
from fencelock import EngineUnavailable, LeaseLost, LockTimeout
from fencelock.core.clock import NO_DEADLINE, Deadline
from fencelock.engines.postgres.connection import PostgresConnection
from fencelock.model import Claim, Renewal
from fencelock.runtime.blocking import run_sync
from tests.contract.runtimes import client_of
from tests.contract.steps import background
from tests.engines.conftest import Clients
from tests.engines.forwarder import forwarding
from tests.engines.postgres_server import advisory, ask, empty, sessions
from tests.servers.postgres import Postgres
from tests.servers.proxy import Proxy
from tests.support.waiting import SOON, eventually


@pytest.fixture
def url(postgres: Postgres) -> str:
    """The shared PostgreSQL, empty."""
    return advisory(empty(postgres))


async def somebody_waits(locks: fencelock.aio.Locks) -> None:
    """Wait until there is a waiter for x."""

    async def is_so() -> bool:
        return bool((await locks.inspect("x")).waiters)

    await eventually(is_so, "somebody waits")


async def test_renewal_cancelled(url: str) -> None:
    """The answer to a renewal that was cancelled does not pass for that of the next, which the server never heard of."""
    async with fencelock.aio.connect(url) as locks, fencelock.aio.connect(url) as others:
        lease = await locks.lock("x", ttl=3, renew=False).acquire()
        task = asyncio.ensure_future(lease.renew())
        (session,) = cast(Any, locks._client.engine)._sessions.values()
        while not session.connection.pending:  # noqa: ASYNC110 - at the first moment in which it is under way
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(2)
        with suppress(LeaseLost):
            await lease.renew()
        successor = asyncio.ensure_future(others.lock("x", ttl=3).acquire(SOON))
        await asyncio.wait([successor], timeout=2)
        assert not successor.done() or lease.is_lost()
        await lease.release()
        await (await successor).release()


@pytest.mark.parametrize("cancelled", [1, 2, 3, 4])
async def test_lease_is_released_after_cancelled_downgrades(
    url: str, cancelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downgrades that are cancelled before their replies come leave a session that renews and releases."""
    sent: list[Any] = []
    send = PostgresConnection._send

    def record(connection: PostgresConnection, *args: Any, **words: Any) -> None:
        sent.append(args)
        send(connection, *args, **words)

    async with fencelock.aio.connect(url) as locks:
        lease = await locks.rwlock("x", renew=False).write().acquire()
        monkeypatch.setattr(PostgresConnection, "_send", record)
        for number in range(cancelled):
            task = asyncio.ensure_future(cast(Any, locks._client.engine).downgrade(lease._grant))
            while len(sent) <= number:  # noqa: ASYNC110 - at the first moment in which it is under way
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if cancelled % 2:
            await lease.renew()
        assert await lease.release() is True


def test_renewals_beside_releases(url: str) -> None:
    """While threads take and release, a batch of renewals never speaks on a session that is somebody else's by now."""
    troubles: list[BaseException] = []
    current: dict[int, fencelock.Lease] = {}
    done = threading.Event()

    def churn(number: int) -> None:
        try:
            while not done.is_set():
                lease = current[number] = locks.lock(f"{number}", ttl=60).acquire(timeout=SOON)
                assert lease.release() is True
        except BaseException as error:
            troubles.append(error)
            done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with fencelock.connect(url) as locks:
            held = [locks.lock(f"held {number}", ttl=60).acquire() for number in range(60)]
            threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            until = time.monotonic() + 5
            while time.monotonic() < until and not done.is_set():
                grants = [lease._grant for lease in [*held, *current.values()]]
                assert Renewal.LOST not in run_sync(locks._client.engine.renew(grants))[: len(held)]
            done.set()
            for thread in threads:
                thread.join()
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert not troubles


@pytest.mark.parametrize("engine", ["rows", "advisory"])
async def test_force_release_is_not_repeated(postgres: Postgres, engine: str) -> None:
    """A forced release whose reply was lost is not repeated: it would remove the next holder."""
    empty(postgres)
    with Proxy(postgres) as proxy:
        near, far = (postgres.url, proxy.url) if engine == "rows" else (advisory(postgres), advisory(proxy))
        async with fencelock.aio.connect(near) as locks, fencelock.aio.connect(far) as admin:
            dropped = await locks.lock("x", ttl=60).acquire()
            await admin.inspect("x")
            successor = asyncio.ensure_future(locks.lock("x", ttl=60).acquire(SOON))
            await somebody_waits(locks)
            proxy.cut("to_client")
            forced = asyncio.ensure_future(admin.force_release("x", reason="a test"))
            lease = await asyncio.wait_for(successor, SOON)
            proxy.disconnect()
            proxy.heal()
            await asyncio.wait([forced], timeout=SOON)
            await lease.renew()
            assert isinstance(forced.exception(), EngineUnavailable)
            await lease.release()
            await dropped.release()


async def test_abandoned_claims_do_not_fill_the_table(postgres: Postgres) -> None:
    """A client that stays connected and abandons many claims does not fill the table of abandoned claims."""
    async with fencelock.aio.connect(empty(postgres).url) as locks, locks.lock("x", ttl=60):

        async def give_up(times: int) -> None:
            for _ in range(times):
                with pytest.raises((LockTimeout, EngineUnavailable)):  # where the server is too slow for so short a ttl
                    await locks.lock("x", ttl=0.1).acquire(timeout=0.005)

        await asyncio.create_task(give_up(150))  # this task may not wait for its own lock
        await asyncio.sleep(1.2)
        ((long_ago,),) = ask(postgres, "SELECT clock_timestamp() - interval '1s'")
        await asyncio.create_task(give_up(100))
        ((left,),) = ask(postgres, "SELECT count(*) FROM fencelock.abandoned WHERE until < %s", long_ago)
        assert left == 0


async def test_frozen_waiter(postgres: Postgres) -> None:
    """A waiter whose connection went dead finds its queue entry gone, and enqueues again."""
    empty(postgres)
    async with forwarding(postgres) as path, fencelock.aio.connect(advisory(postgres)) as locks:
        far = fencelock.aio.connect(advisory(path))
        holder = await locks.lock("x", ttl=60).acquire()
        waiter = asyncio.ensure_future(far.lock("x", ttl=3).acquire())
        await somebody_waits(locks)
        path.freeze()
        await holder.release()  # the server lets a session in that nobody hears of, until it was silent for its ttl
        lease = await asyncio.wait_for(waiter, 2 * SOON)
        assert lease.token > holder.token
        await lease.release()
        await far.close()


def test_listener_whose_connection_breaks_right_after_listen_is_replaced(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that ends immediately leaves no channel behind, and the next waiter starts another one."""
    with fencelock.connect(empty(postgres).url) as locks:
        listener = cast(Any, locks._client.engine)._listener
        runtime = locks._client.runtime
        spawn = runtime.spawn

        def spawn_after_a_break(work: Any, name: str) -> None:
            """Terminate the session before the listener starts, and wait until the listener has ended."""
            if name != "fencelock-listener":
                spawn(work, name)
                return
            monkeypatch.undo()
            ask(postgres, "SELECT pg_terminate_backend(%s, 5000)", listener._connection.pid)
            ended = listener._ended
            spawn(work, name)
            assert run_sync(ended.wait(SOON))

        monkeypatch.setattr(runtime, "spawn", spawn_after_a_break)
        run_sync(listener.open(SOON, NO_DEADLINE))
        assert listener.channel is None
        run_sync(listener.open(SOON, NO_DEADLINE))
        assert listener.channel is not None
        assert listener._connection.open


async def test_malformed_notifications_are_ignored(postgres: Postgres, clients: Clients) -> None:
    """A malformed notification on a waiter's channel neither ends the listener nor wakes a waiter; a valid one does."""
    empty(postgres)
    locks, other = clients.connect(postgres.url), clients.connect(postgres.url)
    holder = await locks.lock("x", ttl=600).acquire()
    async with background(other.lock("x", ttl=600).acquire(2 * SOON)) as (task,):

        async def can_be_called() -> bool:
            return bool(ask(postgres, "SELECT 1 FROM fencelock.claim WHERE token IS NULL AND channel <> ''"))

        await eventually(can_be_called, "the waiter listens")
        ((channel, id),) = ask(
            postgres, "SELECT split_part(channel, ':', 1), id FROM fencelock.claim WHERE token IS NULL"
        )
        listener = cast(Any, client_of(other).engine)._listener
        connection = listener._connection
        for call in ("", "nonsense", ":", "::", f"{id}:1", f"{id}:one:two", f"{id}:1:2:3", f"{id}::1", "ü" * 1000):
            ask(postgres, "SELECT pg_notify(%s, %s)", channel, call)
        await holder.release()
        lease = await asyncio.wait_for(task, SOON)
        assert lease.token > holder.token
        assert listener._connection is connection
        assert connection.open
        await lease.release()


def test_hanging_up_spares_a_descriptor_that_the_process_has_reused(postgres: Postgres) -> None:
    """A connection whose descriptor's number belongs to another socket by now does not shut that one down."""
    with fencelock.connect(empty(postgres).url) as locks:
        pool = cast(Any, locks._client.engine)._pool
        connection = run_sync(pool.connect())
        own, number = os.dup(connection.fileno()), connection.fileno()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.dup2(ours.fileno(), number)  # as if libpq had closed it, and somebody else got the number
            connection.hang_up()
            theirs.sendall(b"still open")
            assert ours.recv(100) == b"still open"
            os.dup2(own, number)
            os.close(own)
        assert connection.is_alive()
        connection.hang_up()
        assert not connection.is_alive()
        pool.drop(connection)


async def test_lost_renewal_finds_a_session_that_the_server_has_ended(postgres: Postgres, clients: Clients) -> None:
    """After a renewal without a reply another connection tells whether the session still has its lock."""
    empty(postgres)
    async with forwarding(postgres) as path:
        engine: Any = clients.on(advisory(path)).engine()
        claims = [Claim("kept", 60), Claim("ended", 3)]
        grants = [await clients.run(engine.attempt(claim, enqueue=False, deadline=NO_DEADLINE)) for claim in claims]
        kept, ended = (engine._sessions[claim.id].connection for claim in claims)
        path.freeze()
        ask(postgres, "SELECT pg_terminate_backend(%s, 5000)", ended.pid)
        assert await clients.run(engine.renew(grants)) == [Renewal.UNKNOWN, Renewal.UNKNOWN]

        async def lost() -> bool:
            (answer,) = await clients.run(engine.renew(grants[1:]))
            return bool(answer is Renewal.LOST)

        await eventually(lost, "the lookup finds that the session has ended")
        assert await clients.run(engine.release(grants[1])) is False
        assert kept.open
        assert (kept.pid,) in ask(postgres, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")


async def test_listener_replaces_a_frozen_connection(postgres: Postgres) -> None:
    """A client whose listening connection stops delivering notices, and is notified over another one."""
    empty(postgres)
    async with forwarding(postgres) as path, fencelock.aio.connect(postgres.url) as locks:
        far = fencelock.aio.connect(path.url)
        holder = await locks.lock("x", ttl=600).acquire()
        waiter = asyncio.ensure_future(far.lock("x", ttl=600).acquire())
        await somebody_waits(locks)

        async def listening() -> bool:
            listener = cast(Any, far._client.engine)._listener
            return any(queued.attempt_no > 1 for queued in listener.queued.values())

        await eventually(listening, "its attempt stored the channel")
        path.freeze()
        await holder.release()
        lease = await asyncio.wait_for(waiter, 2 * SOON)  # by itself it would ask again after a third of the ttl
        await lease.release()
        await far.close()


async def test_connection_of_a_caller_that_is_cancelled_when_it_is_ready_stays_in_the_pool(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled in the loop step in which its connect ends leaves the connection to the next caller."""
    async with fencelock.aio.connect(empty(postgres).url) as locks:
        pool = cast(Any, locks._client.engine)._pool
        connect, made = pool._connect, []

        async def connect_and_cancel(*args: Any) -> PostgresConnection:
            made.append(await connect(*args))
            task.cancel()
            return cast(PostgresConnection, made[0])

        with monkeypatch.context() as patched:
            patched.setattr(pool, "_connect", connect_and_cancel)
            task = asyncio.ensure_future(pool.connect())
            with pytest.raises(asyncio.CancelledError):
                await task
        connection = await pool.borrow()
        pool.keep(connection)
        assert made == [connection]
        assert len(sessions(postgres)) == 1


async def test_connection_that_is_ready_just_after_a_timeout_is_the_next_callers(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller without time leaves its connect to the next caller, and does not take the connection as well."""
    async with fencelock.aio.connect(url.replace("+advisory", "")) as locks:
        pool = cast(Any, locks._client.engine)._pool
        others = object()

        class Mutex:
            """Another thread takes over the connect that was left, and gets its connection, before anything else happens."""

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None:
                while pool._unclaimed:
                    connecting = pool._unclaimed.pop()
                    connecting.connection = others
                    connecting.done.set()

        with monkeypatch.context() as patched:
            patched.setattr(pool, "_connect", lambda _: asyncio.sleep(SOON))
            patched.setattr(pool, "_mutex", Mutex())
            with pytest.raises(EngineUnavailable, match="no connection within"):
                await pool.connect(Deadline(locks._client.runtime.now, 0.05))
