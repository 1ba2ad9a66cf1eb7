"""A server that hangs and then continues: callers get their error in time, and their claims are removed afterwards."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import fencelock
from fencelock import ClientClosed, EngineUnavailable
from fencelock.core.clock import Deadline
from fencelock.engines.postgres.pool import PostgresPool
from fencelock.engines.postgres.url import parse
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from tests.contract.steps import is_free, renewed, take
from tests.engines.conftest import Clients
from tests.engines.postgres_server import empty
from tests.servers.postgres import Postgres
from tests.support.waiting import eventually


async def test_short_timeout_reaches_the_host_after_one_that_hangs(postgres: Postgres, clients: Clients) -> None:
    """If the first of several hosts hangs, a caller with a short timeout still reaches the next one."""
    server = empty(postgres)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{server.address}"
        url = server.url.replace(server.address, hosts)
        await take(clients.connect(f"{url}?connect_timeout=20"), "x", 6)


def test_background_connect_serves_the_next_caller(postgres: Postgres) -> None:
    """The connection that a caller had no time to wait for goes to the next one; callers in a hurry start only one."""
    runtime = BlockingRuntime()
    pool = PostgresPool(runtime, parse(f"{postgres.url}?connect_timeout=20"))
    before = connections(postgres.port)
    postgres.pause()
    try:
        for _ in range(3):
            with pytest.raises(EngineUnavailable, match="no connection within"):
                run_sync(pool.borrow(Deadline(runtime.now, 0.1)))
        assert connections(postgres.port) == before + 1
    finally:
        postgres.resume()
    connection = run_sync(pool.borrow())
    assert connections(postgres.port) == before + 1
    assert connection.is_alive()
    pool.keep(connection)
    pool.close()


def test_fork_during_a_background_connect(postgres: Postgres) -> None:
    """A forked child gives up the connection that its parent is making, and the parent completes it."""
    runtime = BlockingRuntime()
    pool = PostgresPool(runtime, parse(f"{postgres.url}?connect_timeout=20"))
    before = connections(postgres.port)
    postgres.pause()
    try:
        with pytest.raises(EngineUnavailable, match="no connection within"):
            run_sync(pool.borrow(Deadline(runtime.now, 0.2)))
        child = os.fork()
        if not child:
            pool.detach_after_fork()
            os._exit(connections(postgres.port) - before)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        postgres.resume()
    connection = run_sync(pool.borrow())
    assert connections(postgres.port) == before + 1
    pool.keep(connection)
    pool.close()


async def test_leftover_is_abandoned_after_a_renewal(postgres: Postgres, clients: Clients) -> None:
    """A claim that a hung server could not abandon is removed soon after a lease of the same client is renewed."""
    server = empty(postgres)
    locks, other = clients.connect(server.url), clients.connect(server.url)
    kept = await locks.lock("kept", ttl=9).acquire()
    for _ in range(3):  # once it is prepared, a statement is sent without waiting for anything
        await take(locks, "x")
    server.pause()
    try:
        with pytest.raises(EngineUnavailable):
            await locks.lock("x", ttl=60, timeout=0).acquire()
    finally:
        server.resume()
    await renewed(kept)

    async def free() -> bool:
        return await is_free(other, "x")

    await eventually(free, "the lock is free for others")
    assert await kept.release()


def connections(port: int) -> int:
    """Return how many connections this process has to a port."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            same = socket.socket(fileno=int(number))
            try:
                found += same.getpeername()[1:2] == (port,)
            finally:
                same.detach()
    return found


def test_closed_while_it_connects(postgres: Postgres) -> None:
    """A client that is closed while callers connect to a hung server leaves no connection open."""
    locks = fencelock.connect(empty(postgres).url)
    before = connections(postgres.port)
    postgres.pause()
    try:
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(locks.lock("x", timeout=0).acquire) for _ in range(3)]
            time.sleep(0.3)
            locks.close()
            assert all(isinstance(each.exception(), EngineUnavailable | ClientClosed) for each in asked)
        until = time.monotonic() + 2  # the background threads close what close() has shut down
        while connections(postgres.port) != before and time.monotonic() < until:
            time.sleep(0.01)
        assert connections(postgres.port) == before
    finally:
        postgres.resume()
    locks.close()
