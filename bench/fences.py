"""Compare a fenced write with the same write without a fence: additional statements or round trips, and time."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import psycopg
import pymysql
import redis

from bench.harness import Goal, Run, Timing, interleaved, show
from fencelock.fences.etcd import EtcdFence, coded
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import SqlFence
from fencelock.sqlio import drivers
from tests.servers import Etcd, MariaDB, Postgres, Redis

BARE, FENCED = "without a fence", "fenced"


class FakeLease:
    """A lease without a lock."""

    token = 34
    id = "0123456789abcdef0123456789abcdef"
    remaining = 20.0


MINE = FakeLease()


def main(rounds: int) -> list[Goal]:
    goals: list[Goal] = []
    with ExitStack() as stack:
        postgres = stack.enter_context(Postgres())
        mariadb = stack.enter_context(MariaDB())
        server = stack.enter_context(Redis())
        etcd = stack.enter_context(Etcd())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options: Any = {"host": mariadb.host, "port": mariadb.port, "user": "root", "database": "fencelock"}
        for name, connection, placeholder in (
            ("PostgreSQL", psycopg.connect(postgres.url), "%s"),
            ("MariaDB", pymysql.connect(**options), "%s"),
            ("SQLite", sqlite3.connect(f"{folder}/app.db", isolation_level="IMMEDIATE"), "?"),
        ):
            stack.callback(connection.close)
            goals += sql(name, connection, placeholder, rounds)
        goals += on_redis(server, rounds)
        goals += on_etcd(etcd, rounds)
    return goals


def sql(name: str, connection: Any, placeholder: str, rounds: int) -> list[Goal]:
    """Read, change and write back one row, in a transaction."""
    fence = SqlFence()
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE stock (sku INTEGER PRIMARY KEY, n INTEGER)")
    cursor.execute("INSERT INTO stock VALUES (1, 0)")
    fence.create(connection)
    connection.commit()

    def transaction(check: Callable[[], None] | None) -> None:
        if check is not None:
            check()
        cursor.execute("SELECT n FROM stock WHERE sku = 1")
        n = cursor.fetchone()[0]
        cursor.execute(f"UPDATE stock SET n = {placeholder} WHERE sku = 1", (n + 1,))
        connection.commit()

    def check() -> None:
        fence.check(connection, MINE, "stock")

    transaction(check)
    with counted() as statements:
        transaction(check)
    timings = interleaved(
        {BARE: repeat(lambda: transaction(None)), FENCED: repeat(lambda: transaction(check))}, rounds, 50
    )
    show(f"{name}: a transaction that reads and writes one row", timings, base=BARE)
    return [
        Goal(f"{name}: statements that a fence adds to a transaction", len(statements), 1),
        Goal(f"{name}: fenced transaction ÷ the same without", ratio(timings), 2.0),
    ]


def on_redis(server: Redis, rounds: int) -> list[Goal]:
    client = redis.Redis.from_url(server.url)
    fence = RedisFence(client)

    def bare() -> None:
        client.set("stock", 95)

    def fenced() -> None:
        fence.set(MINE, "stock", 95, resource="stock")

    fenced()
    before = client.info("stats")["total_commands_processed"]
    fenced()
    # The server also counts the commands inside the script: EVALSHA, GET, SET, and then INFO. A second round trip adds one.
    commands = client.info("stats")["total_commands_processed"] - before - 1
    timings = interleaved({BARE: repeat(bare), FENCED: repeat(fenced)}, rounds, 200)
    show("Redis: SET", timings, base=BARE)
    client.close()
    return [
        Goal("Redis: commands of a fenced SET, those inside its script included", commands, 3),
        Goal("Redis: fenced SET ÷ SET", ratio(timings), 2.0),
    ]


def on_etcd(server: Etcd, rounds: int) -> list[Goal]:
    class Client:
        requests = 0

        def transaction(self, request: dict[str, Any]) -> Any:
            self.requests += 1
            return server.call("/v3/kv/txn", request)

    client = Client()
    fence = EtcdFence(client)
    request = {"success": [{"request_put": {"key": coded("stock"), "value": coded("95")}}]}
    fence.enter(MINE, "stock")
    client.requests = 0
    fence.transaction(MINE, request, "stock")
    requests = client.requests
    contestants = {
        BARE: repeat(lambda: client.transaction(request)),
        FENCED: repeat(lambda: fence.transaction(MINE, request, "stock")),
    }
    timings = interleaved(contestants, rounds, 20)
    show("etcd: a transaction with a put", timings, base=BARE)
    return [
        Goal("etcd: round trips of a fenced transaction", requests, 1),
        Goal("etcd: fenced transaction ÷ the same without", ratio(timings), 1.3),
    ]


def repeat(once: Callable[[], object]) -> Run:
    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            once()

    return run


@contextmanager
def counted() -> Any:
    """Collect the statements that a fence sends."""
    statements: list[str] = []
    execute = drivers.DbapiAdapter.execute

    async def counting(self: Any, sql: str, args: Any = drivers.NO_ARGS) -> Any:
        statements.append(sql)
        return await execute(self, sql, args)

    with patch.object(drivers.DbapiAdapter, "execute", counting):
        yield statements


def ratio(timings: dict[str, Timing]) -> float:
    return timings[FENCED].over(timings[BARE])
