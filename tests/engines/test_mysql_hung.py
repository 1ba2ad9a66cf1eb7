"""A server that hangs and goes on: whoever has little time is told in time, and what was asked meanwhile is undone."""

from __future__ import annotations

from tests.engines.conftest import Clients
from tests.engines.hung import hurried
from tests.engines.mysql_server import own_database
from tests.servers.mariadb import MariaDB


async def test_timeout_while_the_server_hangs(mariadb: MariaDB, clients: Clients) -> None:
    """Whoever has little time is told after little more than that, and leaves nothing behind."""
    await hurried(mariadb, own_database(mariadb), clients)
