"""What the tests of MySQL read from the server itself, without fencelock: sessions and locks."""

from __future__ import annotations

import itertools
import os

from fencelock.engines.mysql.statements import Names
from tests.servers.mariadb import MariaDB, unpacked

_numbers = itertools.count()


def own_database(server: MariaDB, url: str | None = None) -> str:
    """Create a database for one test and return its URL."""
    name = f"own_{os.getpid()}_{next(_numbers)}"
    server.query(f"CREATE DATABASE {name}")
    return (url or server.url).removesuffix("/fencelock") + f"/{name}"


def key_of(url: str, name: str) -> str:
    """Return the name of the user-level lock for a lock name."""
    return Names(url.partition("?")[0].rpartition("/")[2], "fencelock").key(name)


def holder_of(server: MariaDB, url: str, name: str) -> str | None:
    """Return the id of the session that holds a name."""
    found = server.query(f"SELECT IS_USED_LOCK('{key_of(url, name)}')")
    return None if found == "NULL" else found


def waiters_of(server: MariaDB, url: str, name: str) -> list[str]:
    """Return the sessions that wait for a name, oldest first."""
    like = f"SELECT GET_LOCK(''{key_of(url, name)}%"
    found = server.query(
        f"SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE '{like}' "
        f"ORDER BY {'TIME DESC, ID' if unpacked() else 'QUERY_ID'}"
    )
    return found.split()


def sessions_in(server: MariaDB, url: str) -> list[str]:
    """Return all sessions that use a database."""
    database = url.partition("?")[0].rpartition("/")[2]
    return server.query(f"SELECT ID FROM information_schema.PROCESSLIST WHERE DB = '{database}' ORDER BY ID").split()


def kill(server: MariaDB, session: str | None, what: str = "CONNECTION") -> None:
    """Kill a session, or only its current statement."""
    assert session is not None
    server.query(f"KILL {what} {session}")
