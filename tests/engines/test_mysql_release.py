"""Releases that fail with an error of the server, and connections of expired leases."""

from __future__ import annotations

import time
from typing import Any, cast

import fencelock
from tests.contract.steps import take
from tests.engines.conftest import Clients
from tests.engines.mysql_server import holder_of, own_database
from tests.servers.mariadb import MariaDB


async def test_error_after_the_lock_was_released(mariadb: MariaDB, clients: Clients) -> None:
    """A release that fails after the server has released the lock (a KILL QUERY) is not reported as a loss."""
    url = own_database(mariadb)
    database = url.rpartition("/")[2]
    lost: list[object] = []
    locks = clients.connect(url, on_lost=lambda lease, reason: lost.append(reason))
    await take(locks, "x")
    mariadb.query(
        f"CREATE TRIGGER {database}.broken AFTER DELETE ON {database}.fencelock_holders FOR EACH ROW "
        "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317, MESSAGE_TEXT = 'Query execution was interrupted'"
    )
    lease = await locks.lock("x", ttl=30).acquire()
    await lease.release()
    assert lease.reason is None
    assert not lost
    assert holder_of(mariadb, url, "x") is None
    mariadb.query(f"DROP TRIGGER {database}.broken")
    assert await take(locks, "x") > lease.token


def test_expired_leases_leave_no_connections(mariadb: MariaDB) -> None:
    """The client closes the connections of expired leases whose sessions the server has ended."""
    with fencelock.connect(own_database(mariadb)) as locks:
        pool = cast(Any, locks._client.engine)._pool
        leases: list[fencelock.Lease] = []
        for turn in range(2):
            leases += [locks.lock(f"{turn} {number}", ttl=1, renew=False).acquire() for number in range(70)]
            time.sleep(3)
        assert all(lease.is_lost() for lease in leases)
        assert len(pool._all) < 100
