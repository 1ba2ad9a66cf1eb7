"""`fencelock run` on engines with a server: what holds on SQLite holds there, too."""

from __future__ import annotations

import signal

import pytest

from tests.cli.conftest import Cli, eventually, session_members
from tests.engines.redis import Redis


@pytest.mark.parametrize("engine", ["redis", "redlock"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_waiting(cli: Cli, redis_node: Redis, engine: str, number: signal.Signals) -> None:
    """A signal ends the wait for a lock on a server, and takes the claim back."""
    cli.env["FENCELOCK_URL"] = f"{engine}://{redis_node.address}/9"
    name = f"{engine} {number}"  # of its own: a holder that is killed at the end keeps it for a ttl
    holder = cli.hold(name)
    waiter = cli.start("run", name, "--", "touch", "ran")
    eventually(lambda: cli.waiters(name))
    waiter.send_signal(number)
    assert waiter.wait(10) == 128 + number
    assert cli.json("show", name)["waiters"] == []
    assert session_members(waiter.pid) == []
    assert holder.poll() is None
    assert not cli.file("ran").exists()
