"""One value on each kind of resource, read and written back by holders of a lock, with its fence or without.

`read` enters, where the fence has that, and returns the value; `write` replaces it, and in the same atomic step, where the
resource can, notes what was seen and what was written. Programs of the tests say which by a word and an address.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from fencelock.fences import Fenced

ANYBODY = SimpleNamespace(token=0, id="anybody")


class Counter(Protocol):
    """A value that holders change."""

    def read(self, lease: Fenced) -> int: ...
    def write(self, lease: Fenced, saw: int, value: int) -> None: ...
    def accepted(self) -> list[tuple[int, int, int]]:
        """Return (token, saw, value) of each write, in the order in which the resource accepted them."""
        ...


class SqlCounter:
    """A row and a log, each change of both in one transaction."""

    placeholder = "%s"

    def __init__(self, connection: Any, fenced: bool) -> None:
        from fencelock.fences.sql import SqlFence

        self.connection = connection
        # Short, so that a holder that is stopped inside its transaction does not hold up a test for 30 s.
        self.fence = SqlFence(idle_timeout=1) if fenced else None

    @classmethod
    def prepare(cls, connection: Any) -> None:
        """Create empty tables."""
        from fencelock.fences.sql import SqlFence

        cursor = connection.cursor()
        for table in ("stock", "log", "fencelock_fence"):
            cursor.execute(f"DROP TABLE IF EXISTS {table}")
        cursor.execute("CREATE TABLE stock (value INTEGER NOT NULL)")
        cursor.execute(f"CREATE TABLE log (n {cls.serial}, token BIGINT, saw INTEGER, value INTEGER)")  # type: ignore[attr-defined]
        cursor.execute("INSERT INTO stock VALUES (0)")
        SqlFence().create(connection)
        connection.commit()
        cursor.close()

    def check(self, lease: Fenced) -> None:
        """Begin the transaction with the check."""
        if self.fence is not None:
            self.fence.check(self.connection, lease, "stock")

    def read(self, lease: Fenced) -> int:
        try:
            self.check(lease)
            return int(self._run("SELECT value FROM stock")[0][0])
        finally:
            self.connection.rollback() if self.fence is None else self.connection.commit()

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        try:
            self.check(lease)
            self._run("UPDATE stock SET value = ?", value)
            self._run("INSERT INTO log (token, saw, value) VALUES (?, ?, ?)", lease.token, saw, value)
            self.connection.commit()
        except BaseException:
            self.connection.rollback()
            raise

    def accepted(self) -> list[tuple[int, int, int]]:
        rows = self._run("SELECT token, saw, value FROM log ORDER BY n")
        self.connection.rollback()
        return [(int(token), int(saw), int(value)) for token, saw, value in rows]

    def _run(self, sql: str, *args: Any) -> list[Any]:
        cursor = self.connection.cursor()
        try:
            cursor.execute(sql.replace("?", self.placeholder), args)
            return [] if cursor.description is None else list(cursor.fetchall())
        finally:
            cursor.close()


class PostgresCounter(SqlCounter):
    serial = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    @classmethod
    def open(cls, address: str, fenced: bool) -> PostgresCounter:
        import psycopg

        return cls(psycopg.connect(address), fenced)


class MariaCounter(SqlCounter):
    serial = "BIGINT AUTO_INCREMENT PRIMARY KEY"

    @classmethod
    def open(cls, address: str, fenced: bool) -> MariaCounter:
        import pymysql

        host, _, port = address.partition(":")
        where = {"host": host, "port": int(port), "database": "fencelock"}
        return cls(pymysql.connect(user="root", ssl_disabled=True, **where), fenced)


class SqliteCounter(SqlCounter):
    serial = "INTEGER PRIMARY KEY"
    placeholder = "?"

    @classmethod
    def open(cls, address: str, fenced: bool) -> SqliteCounter:
        return cls(sqlite3.connect(address, timeout=60, isolation_level="IMMEDIATE"), fenced)


class RedisCounter:
    """A key and a list, changed by one script."""

    WRITE = "redis.call('SET', KEYS[1], ARGV[3]) redis.call('RPUSH', KEYS[2], table.concat(ARGV, ' ')) return 1"

    def __init__(self, address: str, fenced: bool) -> None:
        import redis

        from fencelock.fences.redis import RedisFence

        self.client = redis.Redis.from_url(address)
        self.fence = RedisFence(self.client) if fenced else None

    def read(self, lease: Fenced) -> int:
        if self.fence is not None:
            self.fence.enter(lease, "stock")
        value: Any = self.client.get("stock")
        return int(value or 0)

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        keys, args = ["stock", "log"], [lease.token, saw, value]
        if self.fence is not None:
            self.fence.run(lease, self.WRITE, keys, args, resource="stock")
        else:
            self.client.eval(self.WRITE, 2, *keys, *args)

    def accepted(self) -> list[tuple[int, int, int]]:
        lines: Any = self.client.lrange("log", 0, -1)
        return [_entry(line.decode()) for line in lines]


class Document:
    """A value and its log in one text, for resources that store one text."""

    @staticmethod
    def value(text: str | bytes | None) -> int:
        return int(json.loads(text)["value"]) if text else 0

    @staticmethod
    def log(text: str | bytes | None) -> list[tuple[int, int, int]]:
        return [tuple(entry) for entry in json.loads(text)["log"]] if text else []

    @classmethod
    def changed(cls, text: str | bytes | None, lease: Fenced, saw: int, value: int) -> str:
        return json.dumps({"value": value, "log": [*cls.log(text), (lease.token, saw, value)]})


class FileCounter:
    """A file, replaced as a whole."""

    def __init__(self, address: str, fenced: bool) -> None:
        from fencelock.fences.file import FileFence

        self.path = Path(address)
        self.fence = FileFence() if fenced else None

    def _text(self) -> str | None:
        return self.path.read_text("utf-8") if self.path.exists() else None

    def read(self, lease: Fenced) -> int:
        if self.fence is not None:
            self.fence.enter(lease, self.path)
        return Document.value(self._text())

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        text = Document.changed(self._text(), lease, saw, value).encode()
        if self.fence is not None:
            self.fence.write(lease, self.path, text)
        else:
            self.path.write_bytes(text)

    def accepted(self) -> list[tuple[int, int, int]]:
        return Document.log(self._text())


class EtcdCounter:
    """A key in etcd."""

    def __init__(self, address: str, fenced: bool) -> None:
        import etcd3gw

        from fencelock.fences.etcd import EtcdFence

        host, _, port = address.partition(":")
        self.client = etcd3gw.client(host=host, port=int(port), api_path="/v3/")
        self.fence = EtcdFence(self.client) if fenced else None

    def _text(self) -> bytes | None:
        found: Any = self.client.get("stock")
        return found[0] if found else None

    def read(self, lease: Fenced) -> int:
        if self.fence is not None:
            self.fence.enter(lease, "stock")
        return Document.value(self._text())

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        from fencelock.fences.etcd import coded

        text = Document.changed(self._text(), lease, saw, value)
        if self.fence is not None:
            put = {"request_put": {"key": coded("stock"), "value": coded(text)}}
            self.fence.transaction(lease, {"success": [put]}, "stock")
        else:
            self.client.put("stock", text)

    def accepted(self) -> list[tuple[int, int, int]]:
        return Document.log(self._text())


class ZooKeeperCounter:
    """A node in ZooKeeper."""

    def __init__(self, address: str, fenced: bool) -> None:
        from kazoo.client import KazooClient

        from fencelock.fences.zookeeper import ZooKeeperFence

        self.client = KazooClient(address)
        self.client.start(timeout=30)
        self.client.ensure_path("/stock")
        self.fence = ZooKeeperFence(self.client) if fenced else None

    def read(self, lease: Fenced) -> int:
        if self.fence is not None:
            self.fence.enter(lease, "stock")
        return Document.value(self.client.get("/stock")[0])

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        text = Document.changed(self.client.get("/stock")[0], lease, saw, value).encode()
        if self.fence is not None:
            transaction = self.client.transaction()
            transaction.set_data("/stock", text)
            self.fence.commit(lease, transaction, "stock")
        else:
            self.client.set("/stock", text)

    def accepted(self) -> list[tuple[int, int, int]]:
        return Document.log(self.client.get("/stock")[0])


class ObjectCounter:
    """An object in a bucket."""

    def __init__(self, address: str, fenced: bool) -> None:
        import boto3

        from fencelock.fences.objects import ObjectFence

        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=address, **keys)
        self.fence = ObjectFence(self.client, "shop") if fenced else None
        self.seen: Any = None

    def _text(self) -> bytes | None:
        try:
            body: bytes = self.client.get_object(Bucket="shop", Key="stock")["Body"].read()
            return body
        except self.client.exceptions.NoSuchKey:
            return None

    def read(self, lease: Fenced) -> int:
        if self.fence is None:
            return Document.value(self._text())
        self.seen = self.fence.read(lease, "stock")
        return Document.value(self.seen.body)

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        if self.fence is None:
            text = Document.changed(self._text(), lease, saw, value)
            self.client.put_object(Bucket="shop", Key="stock", Body=text.encode())
        else:
            text = Document.changed(self.seen.body, lease, saw, value)
            assert self.fence.write(lease, "stock", text.encode(), self.seen)

    def accepted(self) -> list[tuple[int, int, int]]:
        return Document.log(self._text())


class HttpCounter:
    """A resource behind the middleware of `tests.fences.wsgi_app`."""

    def __init__(self, address: str, fenced: bool) -> None:
        import httpx

        self.client = httpx.Client(base_url=address, trust_env=False)
        self.place = "/fenced" if fenced else "/bare"

    def read(self, lease: Fenced) -> int:
        return Document.value(self._send("POST", lease).text)

    def write(self, lease: Fenced, saw: int, value: int) -> None:
        self._send("PUT", lease, saw=saw, value=value)

    def _send(self, method: str, lease: Fenced, **fields: int) -> Any:
        from fencelock.fences.http import FencingTokenAuth, raise_for_stale

        answer = self.client.request(method, self.place, json=fields, auth=FencingTokenAuth(lease))
        raise_for_stale(answer)
        return answer.raise_for_status()

    def accepted(self) -> list[tuple[int, int, int]]:
        return Document.log(self.client.get(self.place).text)


def _entry(line: str) -> tuple[int, int, int]:
    token, saw, value = map(int, line.split())
    return token, saw, value


COUNTERS: dict[str, Any] = {
    "postgres": PostgresCounter.open,
    "mariadb": MariaCounter.open,
    "sqlite": SqliteCounter.open,
    "redis": RedisCounter,
    "file": FileCounter,
    "etcd": EtcdCounter,
    "zookeeper": ZooKeeperCounter,
    "object": ObjectCounter,
    "http": HttpCounter,
}


def open_counter(kind: str, address: str, *, fenced: bool = True) -> Any:
    """Return the counter of a kind at an address."""
    return COUNTERS[kind](address, fenced)


def close(stock: Any) -> None:
    """Close the connection or client of a counter."""
    for name in ("connection", "client"):
        one: Any = getattr(stock, name, None)
        if hasattr(one, "stop"):
            one.stop()
        if hasattr(one, "close"):
            one.close()
