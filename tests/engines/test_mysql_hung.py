"""A server that hangs and continues: short timeouts are kept, and requests sent in the meantime are undone."""

from __future__ import annotations

from tests.engines.conftest import Clients
from tests.engines.hung import hurried
from tests.engines.mysql_server import own_database
from tests.servers.mariadb import MariaDB


async def test_timeout_while_the_server_hangs(mariadb: MariaDB, clients: Clients) -> None:
    """An acquire with a short timeout ends shortly after it, and leaves nothing behind."""
    await hurried(mariadb, own_database(mariadb), clients)
