"""A session is killed at every step of an acquire, a renewal and a release, before and after the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from fencelock.engines.mysql.connection import MySQLConnection, Reply
from fencelock.errors import EngineUnavailable, FencelockError, LeaseLost
from tests.contract.runtimes import client_of
from tests.contract.steps import background, take, wait_until_unclaimed, waiting
from tests.engines.conftest import Clients
from tests.engines.mysql_server import kill, own_database, sessions_in
from tests.servers.mariadb import MariaDB
from tests.support.waiting import SOON

STEPS = {
    "prepare": "SET SESSION",
    "try": "REPLACE INTO fencelock_holders (connection",
    "enqueue": "SELECT GET_LOCK",
    "reserve": "UPDATE fencelock_layout",
    "renew": "SELECT IS_USED_LOCK",
    "release": "DELETE FROM fencelock_holders WHERE connection = ",
}


@pytest.mark.parametrize("what", ["CONNECTION", "QUERY"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_killed(
    step: str, after: bool, what: str, mariadb: MariaDB, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs, no token repeats, a release that returns True has released, and nothing is left on the server."""
    url = own_database(mariadb)
    other = clients.connect(url)
    tokens = [await take(other, "x")]
    database = url.rpartition("/")[2]
    mariadb.query(f"UPDATE {database}.fencelock_layout SET reserved = 0")
    victim = clients.connect(url)
    runtime = client_of(victim).runtime
    send, fired = MySQLConnection.send, 0

    def send_and_kill(connection: MySQLConnection, statements: Sequence[str]) -> list[Reply]:
        nonlocal fired
        hit = not fired and connection._runtime is runtime and any(line.startswith(STEPS[step]) for line in statements)
        fired += hit
        replies = send(connection, statements) if after or not hit else []
        if hit:
            if after:
                time.sleep(0.05)  # the server has executed it, or does so now
            with suppress(RuntimeError):  # the session has ended
                kill(mariadb, str(connection.id) if connection.id else sessions_in(mariadb, url)[-1], what)
        return replies or send(connection, statements)

    monkeypatch.setattr(MySQLConnection, "send", send_and_kill)
    for _ in range(2):
        with suppress(EngineUnavailable, LeaseLost):  # the session was killed while it held the lock
            tokens.append(await take(victim, "free"))
        holder = await other.lock("x", ttl=60).acquire(SOON)
        tokens.append(holder.token)
        async with background(victim.lock("x", ttl=30).acquire(60)) as (task,):
            with suppress(AssertionError):  # the kill prevented the wait
                await waiting(other, "x")
            assert await holder.release() is True
            try:
                lease = await task
            except EngineUnavailable:
                continue
            tokens.append(lease.token)
            with suppress(FencelockError):
                await lease.renew()
                if await lease.release():
                    tokens.append(await take(other, "x"))
    assert fired == 1
    await wait_until_unclaimed(other, "x")
    await wait_until_unclaimed(other, "free")
    tokens += [await take(victim, "x"), await take(other, "x")]
    assert tokens == sorted(set(tokens))
