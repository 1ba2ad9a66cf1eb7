"""The contestants on PostgreSQL: fencelock, the bare statements, and the locks of other packages."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import fencelock
from bench.harness import Run

NAME = "bench"
KEY = 4711


def advisory_url(url: str) -> str:
    return url.replace("postgresql", "postgresql+advisory", 1)


def rows(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(url).lock(NAME)


def advisory(url: str) -> AbstractContextManager[Any]:
    return fencelock.connect(advisory_url(url)).lock(NAME)


def _connection(url: str) -> Any:
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    connection.prepare_threshold = 0
    return connection


class BareAdvisory:
    """The fewest statements of an advisory lock with a token: two prepared ones, on psycopg's own connection."""

    TAKE = "SELECT pg_advisory_lock(%s), nextval('bare_token')"

    def __init__(self, url: str) -> None:
        self._connection = _connection(url)
        self._connection.execute("CREATE SEQUENCE IF NOT EXISTS bare_token")

    def __enter__(self) -> None:
        self._connection.execute(self.TAKE, (KEY,)).fetchone()

    def __exit__(self, *_: object) -> None:
        self._connection.execute("SELECT pg_advisory_unlock(%s)", (KEY,)).fetchone()


class BareRow:
    """The fewest statements of a lock in a row: an upsert acquires it if it is free, and an update releases it."""

    def __init__(self, url: str) -> None:
        self._connection = _connection(url)
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS bare (name text PRIMARY KEY, owner text, token bigint, expires timestamptz)"
        )
        self._owners = itertools.count(1)
        self._owner = ""

    def __enter__(self) -> None:
        self._owner = f"owner {next(self._owners)}"
        row = self._connection.execute(
            "INSERT INTO bare VALUES (%s, %s, 1, clock_timestamp() + interval '30 s') ON CONFLICT (name) DO UPDATE SET "
            "owner = excluded.owner, token = bare.token + 1, expires = excluded.expires "
            "WHERE bare.expires < clock_timestamp() RETURNING token",
            (NAME, self._owner),
        ).fetchone()
        if row is None:
            raise RuntimeError("the bare lock is taken")

    def __exit__(self, *_: object) -> None:
        self._connection.execute(
            "UPDATE bare SET expires = '-infinity' WHERE name = %s AND owner = %s", (NAME, self._owner)
        )


def sqlalchemy_dlock(url: str) -> Run:
    from sqlalchemy import create_engine
    from sqlalchemy_dlock.factory import create_sadlock

    connection = create_engine(url.replace("postgresql", "postgresql+psycopg", 1)).connect()

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            with create_sadlock(connection, NAME):
                pass

    return run


def pals(url: str) -> Run:
    import pals as package

    locker = package.Locker("bench", url.replace("postgresql", "postgresql+psycopg2", 1))

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            with locker.lock(NAME):
                pass

    return run


def tooz(url: str) -> AbstractContextManager[Any]:
    from tooz import coordination

    coordinator = coordination.get_coordinator(url, b"bench")
    coordinator.start()
    lock: AbstractContextManager[Any] = coordinator.get_lock(NAME.encode())
    return lock
