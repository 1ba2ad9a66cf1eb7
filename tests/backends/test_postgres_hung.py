"""A server that hangs and goes on: whoever has little time is told in time, and what was asked meanwhile is undone."""

from __future__ import annotations

import pytest

from tests.backends.conftest import Clients
from tests.backends.hung import hurried
from tests.backends.postgres_server import advisory, empty
from tests.engines.postgres import Postgres


@pytest.mark.parametrize("engine", ["rows", "advisory"])
async def test_timeout_while_the_server_hangs(postgres: Postgres, clients: Clients, engine: str) -> None:
    """Whoever has little time is told after little more than that, and leaves nothing behind."""
    server = empty(postgres)
    await hurried(server, server.url if engine == "rows" else advisory(server), clients)
