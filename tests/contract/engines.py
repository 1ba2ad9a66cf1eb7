"""The engines that the contract suite runs on. A new engine joins by adding one line to ENGINE_CASES."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from fencelock.engines.mysql.statements import schema
from fencelock.engines.postgres.schema import LAYOUT

_databases = itertools.count(1000)  # other tests use the databases below, and leave data there
_spare: dict[str, list[str]] = defaultdict(list)
_TABLES = ("rate", "claim", "abandoned", "name", "session", "record")
_OURS = "FROM pg_stat_activity WHERE application_name LIKE 'fencelock%'"


def _redis(server: Any, _: Path) -> str:
    """Return a database of its own on a shared server."""
    return str(server.url).removesuffix("/0") + f"/{next(_databases)}"


def _etcd(server: Any, _: Path) -> str:
    """Return a prefix of its own on a shared server."""
    return f"{server.url}/contract-{os.getpid()}-{next(_databases)}"


def _zookeeper(server: Any, folder: Path) -> str:
    """Return a chroot of its own on a shared server."""
    return f"{server.url}/{folder.parent.name}-{folder.name}"


def _postgres(scheme: str) -> Callable[[Any, Path], str]:
    """Return a function that empties the schema of a shared server and closes the connections of earlier tests."""

    def url(server: Any, _: Path) -> str:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"SELECT pg_terminate_backend(pid, 5000) {_OURS}")
            if connection.execute("SELECT to_regclass('fencelock.layout')").fetchone() != (None,):
                if connection.execute("SELECT max(version) FROM fencelock.layout").fetchone() != (LAYOUT,):
                    connection.execute("DROP SCHEMA fencelock CASCADE")  # a test of unknown layouts has changed it
                else:
                    # Not TRUNCATE: it creates new files for each table and index.
                    connection.execute("; ".join(f"DELETE FROM fencelock.{table}" for table in _TABLES))
        return str(server.url).replace("postgresql", scheme, 1)

    return url


def _mysql(server: Any, _: Path) -> str:
    """Return a new database on a shared server. Fifty are created at a time, as each time starts a client process."""
    spare = _spare[server.url]
    if not spare:
        spare += [f"contract_{os.getpid()}_{next(_databases)}" for _ in range(50)]
        server.query("; ".join(f"CREATE DATABASE {name}" for name in spare))
    return str(server.url).removesuffix("/fencelock") + f"/{spare.pop()}"


def _mysql_innodb(server: Any, folder: Path) -> str:
    """Return a database without MEMORY tables, as if an administrator did not allow them: a grant waits for the disk."""
    url = _mysql(server, folder)
    server.query(f"USE {url.rpartition('/')[2]};" + ";".join(schema()).replace("ENGINE=MEMORY", "ENGINE=InnoDB"))
    return url


@dataclass(frozen=True)
class EngineCase:
    """How the suite connects to an engine, and what it expects of it."""

    id: str
    url: Callable[[Any, Path], str]
    """Returns the URL of an engine that no other test uses, given its server and the test's own folder."""
    server: str | None = None
    """The shared server that it runs on (tests/servers), if it needs one."""
    processes: bool = True
    """Whether other processes can reach it; the tests that need a second process are for those engines only."""
    fair: bool = True
    """Whether it serves in order. A test compares this and the next with the engine's traits."""
    shared: bool = True
    """Whether it has readers."""
    limit: bool = True
    """Whether it has permits."""
    records: bool = False
    """Whether it keeps records."""
    ttl_scale: float = 1.0
    """The factor for every ttl, and for every wait that depends on one (`ttl_scale.py`)."""
    ends_with_process: bool = False
    """Whether a lock ends with its holder's process, so that waiters need not wait for the rest of its ttl."""
    slack: float = 0.0
    """Seconds after the ttl within which the engine notices that a claim has expired."""


_MYSQL = EngineCase(
    "mysql",
    _mysql,
    "mariadb",
    shared=False,
    limit=False,
    records=True,
    ttl_scale=4.0,
    slack=0.5,
    ends_with_process=True,
)

ENGINE_CASES = [
    EngineCase(
        "memory", lambda _, folder: f"memory://{folder.parent.name}-{folder.name}", processes=False, records=True
    ),
    EngineCase("sqlite", lambda _, folder: f"sqlite:///{folder}/locks.db", records=True),
    EngineCase("redis", _redis, server="redis", records=True),
    EngineCase("zookeeper", _zookeeper, server="zookeeper1", records=True, ttl_scale=4.0, slack=0.5),
    EngineCase("redlock", _redis, server="redis_nodes", fair=False, shared=False, limit=False),
    # Whole seconds; the server removes expired leases twice a second.
    EngineCase("etcd", _etcd, server="etcd1", ttl_scale=4.0, slack=1.5, records=True),
    EngineCase("postgres", _postgres("postgresql"), server="postgres", records=True),
    EngineCase(
        "advisory",
        _postgres("postgresql+advisory"),
        server="postgres",
        limit=False,
        ends_with_process=True,
        records=True,
    ),
    # Whole seconds; a lock ends with its connection.
    _MYSQL,
]

if os.environ.get("FENCELOCK_VARIANTS"):  # `make torture`
    ENGINE_CASES.append(replace(_MYSQL, id="mysql_innodb", url=_mysql_innodb))
    ENGINE_CASES.append(EngineCase("oldest_redis", _redis, server="redis62", records=True))
