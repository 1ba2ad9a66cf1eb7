"""A server that hangs and goes on: whoever has little time is told in time, and what was asked meanwhile is undone."""

from __future__ import annotations

import socket

import pytest

from fencelock import EngineUnavailable
from fencelock.backends.postgres.link import Halfway, dial
from fencelock.backends.postgres.place import parse
from fencelock.core.clock import Deadline
from fencelock.worlds.blocking import BlockingWorld, drive
from tests.backends.conftest import Clients
from tests.backends.hung import hurried
from tests.backends.postgres_server import advisory, empty
from tests.contract.subject import take
from tests.engines.postgres import Postgres


@pytest.mark.parametrize("engine", ["rows", "advisory"])
async def test_timeout_while_the_server_hangs(postgres: Postgres, clients: Clients, engine: str) -> None:
    """Whoever has little time is told after little more than that, and leaves nothing behind."""
    server = empty(postgres)
    await hurried(server, server.url if engine == "rows" else advisory(server), clients)


async def test_hurried_past_a_host_that_hangs(postgres: Postgres, clients: Clients) -> None:
    """Of several hosts the first may hang: whoever has little time has some left for the next."""
    server = empty(postgres)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{server.address}"
        url = server.url.replace(server.address, hosts)
        await take(clients.connect(f"{url}?connect_timeout=20"), "x", 6)


def test_connection_left_halfway(postgres: Postgres) -> None:
    """What somebody had no time to wait for is there for the next, as connecting may always take longer than that."""
    world, place, left = BlockingWorld(), parse(f"{postgres.url}?connect_timeout=20"), list[Halfway]()
    postgres.pause()
    try:
        with pytest.raises(EngineUnavailable, match="no connection within"):
            drive(dial(world, place, left, Deadline(world.now, 0.1)))
    finally:
        postgres.resume()
    (halfway,) = left
    descriptor = halfway.fileno()
    link = drive(dial(world, place, left))
    assert link.fileno() == descriptor
    assert not left
    link.close()
