"""The engines that a whole test run shares: started once, all at the same time, in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.servers import packages
from tests.servers.cluster import Cluster
from tests.servers.etcd import Etcd, EtcdCluster
from tests.servers.mariadb import sql_server
from tests.servers.postgres import Postgres
from tests.servers.redis import Redis, Redis62, RedisNodes
from tests.servers.server import KEEP, Server
from tests.servers.zookeeper import ZooKeeper, ZooKeeperCluster

Engine = Server | Cluster[Any]
REDIS_NODES = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine that tests may share."""

    family: str
    title: str
    make: Callable[[], Engine]


KINDS: dict[str, Kind] = {
    "redis": Kind("redis", "Redis", Redis),
    "redis62": Kind("redis62", "Redis 6.2", Redis62),
    "redis_nodes": Kind("redis", f"Redis×{REDIS_NODES}", lambda: RedisNodes(REDIS_NODES)),
    "etcd1": Kind("etcd", "etcd", Etcd),
    "etcd3": Kind("etcd", "etcd×3", EtcdCluster),
    "zookeeper1": Kind("zookeeper", "ZooKeeper", ZooKeeper),
    "zookeeper3": Kind("zookeeper", "ZooKeeper×3", ZooKeeperCluster),
    "postgres": Kind("postgres", "PostgreSQL", Postgres),
    "mariadb": Kind("mariadb", "MariaDB", sql_server),
}
ALIASES = {"etcd": "etcd1", "zookeeper": "zookeeper1", "mysql": "mariadb", "postgresql": "postgres"}


class Engines:
    """The shared engines. Each is started once; if that fails, all tests that need it fail."""

    def __init__(self, report: packages.Report) -> None:
        self._report = report
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="engine")
        self._starts: dict[str, Future[Engine]] = {}
        self._made: dict[str, Engine] = {}
        self._unavailable: dict[str, packages.EngineMissing] = {}
        self._lock = threading.Lock()

    def install(self, families: Iterable[str]) -> None:
        """Install missing programs. A program that cannot be installed fails later, in the tests that need it."""
        wanted = sorted(set(families))
        try:
            packages.ensure(wanted, self._report)
        except packages.EngineMissing:
            for family in wanted:
                try:
                    packages.ensure([family], self._report)
                except packages.EngineMissing as error:
                    self._unavailable[family] = error

    def begin(self, names: Iterable[str]) -> None:
        """Start these engines in the background, all at the same time."""
        for name in sorted(set(names)):
            self._begin(name)

    def get(self, name: str) -> Engine:
        """Return the engine of this name once it serves; raise the error of its start."""
        return self._begin(ALIASES.get(name, name)).result()

    def heal(self, names: Iterable[str]) -> None:
        """Restore the engines that a test has used."""
        for name in names:
            start = self._starts.get(name)
            if start is not None and start.done() and start.exception() is None:
                start.result().ensure_healthy()

    def close(self) -> list[str]:
        """Stop every engine; return the folders that were kept."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        kept = []
        for engine in self._made.values():
            members = engine.members if isinstance(engine, Cluster) else [engine]
            if os.environ.get(KEEP):
                kept += [str(member.folder) for member in members]
            engine.close()
        return kept

    def _begin(self, name: str) -> Future[Engine]:
        with self._lock:
            if name not in self._starts:
                self._starts[name] = self._pool.submit(self._start, name)
            return self._starts[name]

    def _start(self, name: str) -> Engine:
        kind = KINDS[name]
        if kind.family in self._unavailable:
            raise self._unavailable[kind.family]
        began = time.monotonic()
        engine = self._made[name] = kind.make()
        try:
            engine.start()
        except BaseException:
            self._report(f"{kind.title}: did not start")
            raise
        self._report(f"{kind.title}: ready in {time.monotonic() - began:.1f} s")
        return engine
