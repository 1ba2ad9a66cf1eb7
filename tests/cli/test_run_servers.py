"""`fencelock run` on engines with a server: what holds on SQLite holds there, too."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

import fencelock
from fencelock.cli.codes import NOT_ACQUIRED
from tests.cli.conftest import Cli, session_members
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgresTls
from tests.servers.redis import Redis
from tests.support.waiting import LONG, eventually_blocking


@pytest.mark.parametrize("engine", ["redis", "redlock"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_waiting(cli: Cli, redis_node: Redis, engine: str, number: signal.Signals) -> None:
    """A signal ends the wait for a lock on a server, and takes the claim back."""
    cli.env["FENCELOCK_URL"] = f"{engine}://{redis_node.address}/9"
    name = f"{engine} {number}"  # of its own: a holder that is killed at the end keeps it for a ttl
    holder = cli.hold(name)
    waiter = cli.start("run", name, "--", "touch", "ran")
    eventually_blocking(lambda: cli.waiters(name))
    waiter.send_signal(number)
    assert waiter.wait(LONG) == 128 + number
    assert cli.json("show", name)["waiters"] == []
    assert session_members(waiter.pid) == []
    assert holder.poll() is None
    assert not cli.file("ran").exists()


@pytest.mark.engine("postgres", own=True)
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+advisory"])
def test_run_closes_its_postgres_connections(cli: Cli, scheme: str) -> None:
    """A finished run and one that timed out leave no message about a broken connection in the server's log."""
    with PostgresTls() as server:
        url = server.tls_url.replace("postgresql", scheme, 1)
        assert cli("run", "x", "--url", url, "--", "true").returncode == 0
        with fencelock.connect(url) as locks, locks.lock("x"):
            assert cli("run", "x", "--url", url, "--timeout", "0.3", "--", "true").returncode == NOT_ACQUIRED
        server.stop()
        log = server.log_tail(200)
        assert "reset by peer" not in log
        assert "could not receive" not in log


@pytest.mark.engine("mariadb", own=True)
def test_run_closes_its_mariadb_connection(cli: Cli, own_mariadb: Callable[..., MariaDB]) -> None:
    """A finished run leaves no aborted connection in the server's statistics."""
    server = own_mariadb()
    assert cli("run", "x", "--url", server.url, "--", "true").returncode == 0
    assert server.query("SHOW STATUS LIKE 'Aborted_clients'").split()[-1] == "0"
