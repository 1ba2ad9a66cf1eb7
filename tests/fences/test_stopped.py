"""Real processes on real resources: a holder is stopped, another one writes, the first goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fencelock
from tests.fences.stocks import STOCKS, SqliteStock, close, open_stock

ROOT = Path(__file__).parents[2]
TTL = 3.0
"""Of the one that is stopped: it has to be kept until then, also on a busy machine."""


class Process:
    """A program that is told what to do, line by line."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-m", *argv]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.first = self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def ask(self, word: str) -> str:
        self.tell(word)
        return self.answer()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts programs, and ends them."""
    with ExitStack() as stack:

        def start(*argv: str) -> Process:
            process = Process(*argv)
            stack.callback(process.close)
            return process

        yield start


@contextmanager
def object_store() -> Iterator[str]:
    """An S3 that obeys If-Match and If-None-Match, with a bucket."""
    import boto3

    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if "Running on" in line)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket="shop")
        yield address
    finally:
        process.kill()
        process.communicate()


def empty(kind: str, engines: Any, folder: Path, stack: ExitStack) -> str:
    """Return the address of an empty stock of this kind."""
    if kind in ("sqlite", "file"):
        address = str(folder / "stock")
    elif kind == "object":
        address = stack.enter_context(object_store())
    elif kind == "http":
        web = Process("tests.fences.web", str(folder))
        stack.callback(web.close)
        address = f"http://127.0.0.1:{web.first}"
    else:
        engine = engines.get(kind)
        address = {"postgres": engine.url, "redis": f"redis://{engine.address}/9997"}.get(kind, engine.address)
    stock = open_stock(kind, address, fenced=False)
    if kind in ("postgres", "mariadb", "sqlite"):
        type(stock).prepare(stock.connection)
        stock.connection.close()
    elif kind == "redis":
        stock.client.flushdb()
        stock.client.close()
    elif kind == "etcd":
        stock.client.delete("stock")
        stock.client.delete_prefix("fencelock-fence/")
    elif kind == "zookeeper":
        for path in ("/stock", "/fencelock-fence"):
            stock.client.delete(path, recursive=True)
        close(stock)
    else:
        close(stock)
    return address


def kinds(*names: str) -> list[Any]:
    servers = {"postgres", "mariadb", "redis", "etcd", "zookeeper"}
    return [pytest.param(name, marks=[pytest.mark.engine(name)] if name in servers else []) for name in names]


@pytest.fixture
def address(kind: str, engines: Any, tmp_path: Path) -> Iterator[str]:
    """Where an empty stock of the kind is."""
    with ExitStack() as stack:
        yield empty(kind, engines, tmp_path, stack)


@pytest.mark.parametrize("kind", kinds(*STOCKS))
def test_stopped_between_read_and_write(kind: str, address: str, start: Callable[..., Process], tmp_path: Path) -> None:
    """The first one's write is refused by the fence; without it, the second one's write is lost."""
    url = f"sqlite://{tmp_path}/locks.db"
    holder = start("tests.fences.holder", kind, address, url, str(TTL))
    with fencelock.connect(url, ttl=30) as locks, ExitStack() as stack:
        for fenced in (True, False):
            stock = open_stock(kind, address, fenced=fenced)
            stack.callback(close, stock)
            if not fenced:
                holder.ask("bare")
            assert int(holder.ask("acquire")) > 0
            saw = int(holder.ask("read"))
            holder.stop()
            lease = locks.lock("stock").acquire(timeout=60)
            assert stock.read(lease) == saw
            stock.write(lease, saw, saw + 1)
            holder.go_on()
            assert holder.ask("write") == ("StaleToken" if fenced else "written")
            newest = stock.accepted()[-2:]
            assert newest[-1][:2] == (lease.token, saw) if fenced else newest[0][1] == newest[1][1] == saw
            lease.release()


@pytest.mark.parametrize("kind", kinds("postgres", "mariadb"))
def test_stopped_inside_its_transaction(kind: str, address: str, start: Callable[..., Process], tmp_path: Path) -> None:
    """The server ends the transaction of the one that is stopped, the second writes, and the first cannot commit."""
    url = f"sqlite://{tmp_path}/locks.db"
    holder = start("tests.fences.holder", kind, address, url, str(TTL))
    stock = open_stock(kind, address)
    with fencelock.connect(url, ttl=30) as locks:
        holder.ask("acquire")
        assert holder.ask("begin") == "0"
        holder.stop()
        with locks.lock("stock").acquire(timeout=60) as lease:
            stock.write(lease, stock.read(lease), 1)
            holder.go_on()
            assert holder.ask("commit") not in ("committed", "0")
            assert stock.accepted() == [(lease.token, 0, 1)]
            assert stock.read(lease) == 1
    close(stock)


def test_stopped_inside_its_transaction_on_sqlite(start: Callable[..., Process], tmp_path: Path) -> None:
    """SQLite cannot end it: the second waits for the first, and then goes on from what that has written."""
    url, address = f"sqlite://{tmp_path}/locks.db", str(tmp_path / "stock")
    stock = SqliteStock.open(address, fenced=True)
    SqliteStock.prepare(stock.connection)
    holder = start("tests.fences.holder", "sqlite", address, url, str(TTL))
    with fencelock.connect(url, ttl=30) as locks:
        holder.ask("acquire")
        assert holder.ask("begin") == "0"
        holder.stop()
        with locks.lock("stock").acquire(timeout=60) as lease:
            stock.connection.execute("PRAGMA busy_timeout = 300")
            with pytest.raises(Exception, match="database is locked"):
                stock.read(lease)
            stock.connection.execute("PRAGMA busy_timeout = 60000")
            holder.go_on()
            assert holder.ask("commit") == "committed"
            assert stock.read(lease) == 1
            assert holder.ask("begin") == "StaleToken"
    close(stock)


@pytest.mark.parametrize("kind", kinds("postgres", "mariadb"))
def test_stopped_inside_its_transaction_without_a_fence(
    kind: str, address: str, start: Callable[..., Process], tmp_path: Path
) -> None:
    """Without the fence the first one commits over the second one's write, and that is lost."""
    holder = start("tests.fences.holder", kind, address, f"sqlite://{tmp_path}/locks.db", "1")
    stock = open_stock(kind, address, fenced=False)
    holder.ask("bare")
    holder.ask("acquire")
    assert holder.ask("begin") == "0"
    holder.stop()
    stock.write(SimpleNamespace(token=34, id="second"), 0, 10)
    holder.go_on()
    assert holder.ask("commit") == "committed"
    assert stock.read(SimpleNamespace(token=34, id="second")) == 1
    close(stock)
