"""The databases and counters of the fences' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from tests.fences.connection_kinds import Databases, mysql_options, postgres_url
from tests.fences.counter_servers import empty
from tests.fences.sql_helpers import FENCE, SERVERS, Connect, run
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import Postgres


@pytest.fixture
def where(postgres: Postgres, mariadb: MariaDB, tmp_path: Path) -> Databases:
    """The servers that all tests share, and a folder for SQLite."""
    return Databases(postgres, mariadb, tmp_path)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    """A database server by its name."""
    return str(request.param)


@pytest.fixture
def connect(server: str, where: Databases) -> Iterator[Connect]:
    """Opens connections to an empty fence and a stock of 100."""
    with ExitStack() as stack:

        def connect(**options: Any) -> Any:
            if server == "postgres":
                connection: Any = psycopg.connect(postgres_url(where))
            else:
                connection = pymysql.connect(**mysql_options(where), **options)
            stack.callback(connection.close)
            return connection

        first = connect()
        run(first, "DROP TABLE IF EXISTS fencelock_fence")
        run(first, "DROP TABLE IF EXISTS stock")
        text = "VARCHAR(255)" if server == "postgres" else "VARBINARY(255)"
        run(first, f"CREATE TABLE stock (n INT NOT NULL, fence BIGINT DEFAULT 0, fence_id {text} DEFAULT '')")
        run(first, "INSERT INTO stock (n) VALUES (100)")
        FENCE.create(first)
        first.commit()
        yield connect
        stack.close()  # whatever they hold
        last = connect()
        run(last, "DROP TABLE IF EXISTS fencelock_fence")  # a min_token would refuse the tokens of other tests
        last.commit()


@pytest.fixture
def address(kind: str, engines: Any, tmp_path: Path) -> Iterator[str]:
    """The address of an empty counter of the kind."""
    with ExitStack() as stack:
        yield empty(kind, engines, tmp_path, stack)
