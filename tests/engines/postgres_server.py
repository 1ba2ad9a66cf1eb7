"""What the tests of PostgreSQL's engines share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.servers.postgres import Postgres

OURS = "application_name LIKE 'fencelock%'"


@contextmanager
def connected(server: Postgres) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the test's own."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


def ask(server: Postgres, sql: str, *words: Any) -> list[tuple[Any, ...]]:
    """Run a statement; the rows, if it has any."""
    with connected(server) as connection:
        cursor = connection.execute(sql.encode(), words or None)
        return cursor.fetchall() if cursor.description else []


def empty(server: Postgres) -> Postgres:
    """The server with nobody of an earlier test connected, and no schema."""
    ask(server, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {OURS}")
    ask(server, "DROP SCHEMA IF EXISTS fencelock CASCADE")
    return server


def sessions(server: Postgres) -> set[int]:
    """The process ids of all sessions of ours."""
    return {pid for (pid,) in ask(server, f"SELECT pid FROM pg_stat_activity WHERE {OURS}")}


def kill_sessions(server: Postgres, where: str = "true") -> int:
    """End sessions of ours, as an administrator would; return how many."""
    return len(ask(server, f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {OURS} AND {where}"))


def fill(server: Postgres) -> list[psycopg.Connection[Any]]:
    """Take all connections that are left: what is refused once may still be freed, by a session that is ending."""
    held: list[psycopg.Connection[Any]] = []
    refused = 0
    while refused < 5:
        try:
            held.append(psycopg.connect(server.url))
            refused = 0
        except psycopg.OperationalError as error:
            if "too many clients" not in str(error):
                raise
            refused += 1
            time.sleep(0.05)
    return held


def any_alive(pids: Iterable[int]) -> bool:
    """Whether the server still has one of these processes: a connection counts until its process has ended."""
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


def advisory(server: Any) -> str:
    """The URL of the other engine."""
    return str(server.url).replace("postgresql", "postgresql+advisory", 1)
