"""Optimistic versions: many writers change the same value, and no change is lost."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest
import requests

import fencelock
from fencelock import FencelockError, GuaranteeUnavailable, StaleToken, VersionConflict, aio
from fencelock.aio.lockfree import optimistic as aio_optimistic
from fencelock.fences import TokenPair
from fencelock.lockfree.optimistic import (
    EtcdKey,
    HttpResource,
    RecordKey,
    RedisKey,
    SqlRow,
    Versioned,
    VersionedValue,
    check_if_match,
    etag,
)
from tests.lockfree.apis import api_of, resolve
from tests.lockfree.databases import KINDS, Database
from tests.servers.etcd import Etcd
from tests.servers.redis import Redis
from tests.support.processes import Child

TABLE = "CREATE TABLE IF NOT EXISTS account (id varchar(40) PRIMARY KEY, balance integer, version integer)"

SPEND = """
from fencelock.lockfree.optimistic import SqlRow
account = SqlRow(connection, "account", {"id": args[0]}, ["balance"])
for _ in range(20):
    account.update(lambda row: {"balance": row["balance"] - 1})
print(0, flush=True)
"""


@pytest.fixture
def account(database: Database, key: str) -> str:
    """The id of an account with 100 in it."""
    database.ask(TABLE)
    database.ask("INSERT INTO account VALUES (?, 100, 1)", key)
    return key


def balance(database: Database, account: str) -> tuple[Any, ...]:
    """Return the balance and the version."""
    return database.ask("SELECT balance, version FROM account WHERE id = ?", account)[0]


async def test_every_kind_of_connection(database: Database, on: str, kind: str, account: str) -> None:
    """On every kind of connection a row is updated, and a write with an old version is refused."""
    async with KINDS[on, kind](database) as connection:
        api = api_of(connection)
        row = api.optimistic.SqlRow(connection, "account", {"id": account}, ["balance"])
        assert await resolve(row.update(lambda now: {"balance": now["balance"] - 10})) == {"balance": 90}
        assert await resolve(row.update(lambda now: None)) is None
        await api.sql.begin()
        seen = await resolve(row.read())
        assert seen == ({"balance": 90}, 2)
        await resolve(row.write({"balance": 80}, seen.version))
        with pytest.raises(VersionConflict, match=f"account id={account}"):
            await resolve(row.write({"balance": 70}, seen.version))
        with pytest.raises(FencelockError, match="has an open one"):
            await resolve(row.update(lambda now: now))
        await api.sql.commit()
    assert balance(database, account) == (80, 3)


def test_sql_keywords_as_names(database: Database, key: str) -> None:
    """Names may be keywords of SQL, and upper case means the same as without quotes."""
    quote = '"' if database.name == "postgresql" else "`"
    columns = f"id varchar(40), {quote}order{quote} integer, {quote}check{quote} integer"
    database.ask(f"CREATE TABLE IF NOT EXISTS {quote}select{quote} ({columns})")
    database.ask(f"INSERT INTO {quote}select{quote} VALUES (?, 7, 1)", key)
    with database.connected() as connection:
        row = SqlRow(connection, "select", {"ID": key}, ["Order"], version="check")
        assert row.update(lambda now: {"Order": now["Order"] + 1}) == {"Order": 8}
        assert row.read() == ({"Order": 8}, 2)


def test_no_version(database: Database, account: str) -> None:
    """A row whose version is NULL is refused at once, and its error says what to do."""
    database.ask("UPDATE account SET version = NULL WHERE id = ?", account)
    with database.connected() as connection:
        row = SqlRow(connection, "account", {"id": account}, ["balance"])
        with pytest.raises(FencelockError, match=r"\(column version\) is NULL") as caught:
            row.update(lambda now: {"balance": 0})
        assert not isinstance(caught.value, VersionConflict)


def test_processes_lose_nothing(database: Database, account: str, child: Callable[..., Child]) -> None:
    """Several processes spend at the same time, and every amount is deducted exactly once."""
    for spender in [child(database, SPEND, account) for _ in range(3)]:
        assert spender.read_json() == 0
    assert balance(database, account) == (40, 61)


def test_change_between_read_and_write(database: Database, account: str) -> None:
    """After a concurrent change `update` starts again, in a new transaction that sees the change."""
    seen: list[int] = []

    def change(row: dict[str, int]) -> dict[str, int]:
        seen.append(row["balance"])
        if len(seen) == 1:
            database.ask("UPDATE account SET balance = 50, version = version + 1 WHERE id = ?", account)
        return {"balance": row["balance"] - 10}

    with database.connected() as connection:
        row = SqlRow(connection, "account", {"id": account}, ["balance"])
        assert row.update(change) == {"balance": 40}
    assert seen == [100, 50]
    assert balance(database, account) == (40, 3)


@pytest.mark.parametrize("on", ["sqlite"])
def test_update_gives_up(database: Database, account: str) -> None:
    """After so many attempts, or its timeout, `update` raises VersionConflict; an error of the function is raised at once."""

    def race(row: dict[str, int]) -> dict[str, int]:
        database.ask("UPDATE account SET version = version + 1 WHERE id = ?", account)
        return {"balance": 0}

    with database.connected() as connection:
        row = SqlRow(connection, "account", {"id": account}, ["balance"])
        with pytest.raises(VersionConflict, match="each of 3 attempts"):
            row.update(race, attempts=3)
        with pytest.raises(VersionConflict, match="others changed"):
            row.update(race, timeout=0.05)
        with pytest.raises(ZeroDivisionError):
            row.update(lambda now: {"balance": 1 // 0})
        assert not connection.in_transaction
    assert balance(database, account)[0] == 100


@pytest.mark.parametrize("on", ["sqlite"])
def test_invalid_rows(database: Database, account: str) -> None:
    """No row, unknown columns, and names that would be SQL are refused."""
    with database.connected() as connection:
        with pytest.raises(FencelockError, match="is 0 rows"):
            SqlRow(connection, "account", {"id": "nobody"}, ["balance"]).read()
        with pytest.raises(ValueError, match="without the column owner"):
            SqlRow(connection, "account", {"id": account}, ["balance"]).update(lambda row: {"owner": 1})
        with pytest.raises(ValueError, match="name the row"):
            SqlRow(connection, "account", {}, ["balance"])
        for wrong in ("account; DROP TABLE account", "1x", 'a"b', ""):
            with pytest.raises(ValueError, match="does not support"):
                SqlRow(connection, wrong, {"id": account}, ["balance"])


def plus_one(value: bytes | None) -> bytes:
    """Return the number plus one."""
    return b"%d" % (int(value or 0) + 1)


def test_redis(redis_node: Redis, key: str) -> None:
    """Threads count in a key of Redis and lose nothing; its time to live stays, or is set."""
    import redis

    with redis.Redis.from_url(redis_node.url) as client:

        def count(_: int) -> None:
            for _ in range(10):
                RedisKey(client, key).update(plus_one)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(count, range(4)))
        assert client.get(key) == b"40"
        assert client.ttl(key) == -1
        RedisKey(client, key, ttl=60).update(plus_one)
        RedisKey(client, key).update(plus_one)
        assert 0 < client.ttl(key) <= 60
        seen = RedisKey(client, key).read()
        assert seen.value == b"42"
        client.delete(key)
        with pytest.raises(VersionConflict):
            RedisKey(client, key).write(b"43", seen.version)
        RedisKey(client, key).write(b"", None)
        with pytest.raises(VersionConflict):
            RedisKey(client, key).write(b"x", None)
        RedisKey(client, key).write(bytes(range(256)), b"")
    with redis.Redis.from_url(redis_node.url, decode_responses=True) as client:
        client.set(key, "ünï")
        assert RedisKey(client, key).update(lambda value: (value or b"") + b"!") == "ünï!".encode()


async def test_redis_awaited(redis_node: Redis, key: str) -> None:
    """Tasks count in a key of Redis and lose nothing; the change may be a coroutine."""
    import redis.asyncio

    async def slowly(value: bytes | None) -> bytes:
        await asyncio.sleep(0)
        return plus_one(value)

    async with redis.asyncio.Redis.from_url(redis_node.url) as client:
        await asyncio.gather(*(aio_optimistic.RedisKey(client, key).update(slowly) for _ in range(10)))
        assert await client.get(key) == b"10"


def test_etcd(etcd1: Etcd, key: str) -> None:
    """A key of etcd is created and changed; a write with an older revision is refused."""
    import etcd3gw

    client = etcd3gw.client(host=etcd1.host, port=etcd1.port)
    value = EtcdKey(client, key)
    assert value.read() == (None, 0)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: EtcdKey(client, key).update(plus_one), range(6)))
    seen = value.read()
    assert seen.value == b"6"
    value.write(b"", seen.version)
    with pytest.raises(VersionConflict):
        value.write(b"stale", seen.version)
    with pytest.raises(VersionConflict):
        value.write(b"new", 0)
    assert value.read().value == b""
    client.session.close()


def test_records() -> None:
    """Threads count in a record and lose nothing; a lease's token excludes earlier holders of the lock."""
    with fencelock.connect("memory://optimistic") as locks:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: RecordKey(locks, "n").update(plus_one), range(20)))
        assert RecordKey(locks, "n").read().value == b"20"
        with locks.lock("n") as lease:
            old = TokenPair(lease.token, lease.id)
        with locks.lock("n") as lease:
            new = TokenPair(lease.token, lease.id)
            assert RecordKey(locks, "n", lease=lease).update(plus_one) == b"21"
        seen = RecordKey(locks, "n").read()
        with pytest.raises(VersionConflict):
            RecordKey(locks, "n", lease=new).write(b"not as it was read", seen.version - 1)
        stale = RecordKey(locks, "n", lease=old)
        uses: list[Callable[[], Any]] = [lambda: stale.write(b"x", seen.version), lambda: stale.update(plus_one)]
        for use in uses:
            with pytest.raises(StaleToken, match=f"token {new.token}, after token {old.token}") as caught:
                use()
            assert (caught.value.name, caught.value.token, caught.value.seen) == ("n", old.token, new.token)
        with pytest.raises(StaleToken, match="pass lease="):
            RecordKey(locks, "n").update(plus_one)
        assert RecordKey(locks, "n").read() == seen
        RecordKey(locks, "n", lease=new).write(None, seen.version)
        with pytest.raises(StaleToken, match="under a newer lease"):
            stale.update(lambda value: b"stale")
        assert RecordKey(locks, "n").read().value is None


async def test_records_awaited(etcd1: Etcd, key: str) -> None:
    """Tasks count in a record of etcd and lose nothing."""
    async with aio.connect(etcd1.url) as locks:
        await asyncio.gather(*(aio_optimistic.RecordKey(locks, key).update(plus_one) for _ in range(5)))
        assert (await aio_optimistic.RecordKey(locks, key).read()).value == b"5"


def test_engine_without_records() -> None:
    """An engine that keeps no records is refused when the value is made."""
    with fencelock.connect("redlock://localhost:1,localhost:2,localhost:3") as locks:
        with pytest.raises(GuaranteeUnavailable, match="keeps records"):
            RecordKey(locks, "n")


class Page(BaseHTTPRequestHandler):
    """A resource that obeys conditional requests (RFC 9110)."""

    protocol_version = "HTTP/1.1"
    body: ClassVar[bytes | None] = None
    mutex = threading.Lock()

    def do_GET(self) -> None:
        """Answer with the page and its ETag."""
        with self.mutex:
            self.answer(404 if Page.body is None else 200, Page.body or b"")

    def do_PUT(self) -> None:
        """Replace the page if the condition is met."""
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        with self.mutex:
            match, fresh = self.headers.get("If-Match"), self.headers.get("If-None-Match") == "*"
            now = None if Page.body is None else self.tag(Page.body)
            if (fresh and now is not None) or (not fresh and match != now):
                return self.answer(412, b"")
            Page.body = sent
        return self.answer(200, b"")

    @staticmethod
    def tag(body: bytes) -> str:
        """Return the ETag."""
        return etag(hashlib.sha256(body).hexdigest()[:16])

    def answer(self, status: int, body: bytes) -> None:
        """Send it."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.path != "/untagged":
            self.send_header("ETag", self.tag(body))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def page() -> Iterator[str]:
    """The URL of a page that is not there yet."""
    Page.body = None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/page"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_http(page: str) -> None:
    """A page behind HTTP is created and changed by httpx, blocking and asyncio, and by requests, and nothing is lost."""
    with httpx.Client() as client:
        assert HttpResource(client, page).update(plus_one) == b"1"
        seen = HttpResource(client, page).read()
    with requests.Session() as session:
        assert HttpResource(session, page, headers={"X-By": "me"}).update(plus_one) == b"2"
        with pytest.raises(VersionConflict):
            HttpResource(session, page).write(b"stale", seen.version)
        with pytest.raises(VersionConflict):
            HttpResource(session, page).write(b"new", None)
        with pytest.raises(fencelock.EngineUnavailable, match="no ETag"):
            HttpResource(session, page.replace("page", "untagged")).read()
    async with httpx.AsyncClient() as client:
        await asyncio.gather(*(aio_optimistic.HttpResource(client, page).update(plus_one) for _ in range(5)))
    assert Page.body == b"7"
    with pytest.raises(TypeError, match="not object"):
        HttpResource(object(), page)


def test_if_match() -> None:
    """If-Match may name several versions or any; a missing header is refused."""
    check_if_match('"a", "7"', 7)
    check_if_match("*", 7)
    for header, version in (('"7"', 8), ("7", 7), ('W/"7"', 7), ("*", None), (None, 7), ('"6", *', 7)):
        with pytest.raises(VersionConflict):
            check_if_match(header, version)
    for wrong in ('a"b', "a b", "a,b", "ä"):
        with pytest.raises(ValueError, match="cannot be an ETag"):
            etag(wrong)


def test_own_versioned_value() -> None:
    """Two methods make a versioned value of any store."""

    class Box(VersionedValue[int]):
        name = "box"
        value, version = 1, 1

        async def _load(self) -> Versioned[int]:
            return Versioned(self.value, self.version)

        async def _store(self, value: int, version: int) -> bool:
            if version != self.version:
                return False
            self.value, self.version = value, version + 1
            return True

    assert Box().update(lambda value: value + 1) == 2
