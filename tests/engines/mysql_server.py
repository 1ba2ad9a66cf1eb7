"""What the tests of MySQL ask the server itself, past fencelock: sessions, locks, rights."""

from __future__ import annotations

import itertools
import os

from fencelock.engines.mysql.statements import Names
from tests.servers.mariadb import MariaDB, unpacked

_numbers = itertools.count()


def own_database(server: MariaDB, url: str | None = None) -> str:
    """Return a URL with a database that nobody else uses."""
    name = f"own_{os.getpid()}_{next(_numbers)}"
    server.query(f"CREATE DATABASE {name}")
    return (url or server.url).removesuffix("/fencelock") + f"/{name}"


def key_of(url: str, name: str) -> str:
    """Return what GET_LOCK knows a name as."""
    return Names(url.partition("?")[0].rpartition("/")[2], "fencelock").key(name)


def holder_of(server: MariaDB, url: str, name: str) -> str | None:
    """Return the session that holds a name."""
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
    """End a session, or only what it is doing."""
    assert session is not None
    server.query(f"KILL {what} {session}")
