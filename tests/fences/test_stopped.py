"""Real processes on real resources: a holder is stopped, another one writes, the first continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

import fencelock
from tests.fences.counter_servers import counter_kinds
from tests.fences.counters import COUNTERS, SqliteCounter, close, open_counter
from tests.support.processes import Child

TTL = 3.0
"""The ttl of the holder that is stopped, long enough that it does not lose its lease before that on a busy machine."""


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts a process with a holder (`tests/fences/holder.py`), and kills it at the end of the test."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Child:
            holder = stack.enter_context(Child.of_module("tests.fences.holder", *arguments))
            assert holder.read_line() == "ready"
            return holder

        yield start


@pytest.mark.parametrize("kind", counter_kinds(*COUNTERS))
def test_stopped_between_read_and_write(kind: str, address: str, start: Callable[..., Child], tmp_path: Path) -> None:
    """The fence refuses the write of the stopped holder, by its clock and by its token; without it, a write is lost."""
    url = f"sqlite:///{tmp_path}/locks.db"
    holder = start(kind, address, url, str(TTL))
    with fencelock.connect(url, ttl=30) as locks, ExitStack() as stack:
        for fenced in (True, False):
            stock = open_counter(kind, address, fenced=fenced)
            stack.callback(close, stock)
            if not fenced:
                holder.request("bare")
            assert int(holder.request("acquire")) > 0
            saw = int(holder.request("read"))
            holder.stop()
            lease = locks.lock("stock").acquire(timeout=60)
            assert stock.read(lease) == saw
            stock.write(lease, saw, saw + 1)
            holder.resume()
            if fenced:
                assert holder.request("write_with_clock") == "LeaseLost"
            assert holder.request("write") == ("StaleToken" if fenced else "written")
            newest = stock.accepted()[-2:]
            assert newest[-1][:2] == (lease.token, saw) if fenced else newest[0][1] == newest[1][1] == saw
            lease.release()


@pytest.mark.parametrize("kind", counter_kinds("postgres", "mariadb"))
def test_stopped_inside_its_transaction(kind: str, address: str, start: Callable[..., Child], tmp_path: Path) -> None:
    """The server ends the transaction of a stopped holder; the next holder writes, and the stopped one cannot commit."""
    url = f"sqlite:///{tmp_path}/locks.db"
    holder = start(kind, address, url, str(TTL))
    stock = open_counter(kind, address)
    with fencelock.connect(url, ttl=30) as locks:
        holder.request("acquire")
        assert holder.request("begin") == "0"
        holder.stop()
        with locks.lock("stock").acquire(timeout=60) as lease:
            stock.write(lease, stock.read(lease), 1)
            holder.resume()
            assert holder.request("commit") not in ("committed", "0")
            assert stock.accepted() == [(lease.token, 0, 1)]
            assert stock.read(lease) == 1
    close(stock)


def test_stopped_inside_its_transaction_on_sqlite(start: Callable[..., Child], tmp_path: Path) -> None:
    """SQLite cannot end the transaction of a stopped holder: the next holder waits, and then reads what it has written."""
    url, address = f"sqlite:///{tmp_path}/locks.db", str(tmp_path / "stock")
    stock = SqliteCounter.open(address, fenced=True)
    SqliteCounter.prepare(stock.connection)
    holder = start("sqlite", address, url, str(TTL))
    with fencelock.connect(url, ttl=30) as locks:
        holder.request("acquire")
        assert holder.request("begin") == "0"
        holder.stop()
        with locks.lock("stock").acquire(timeout=60) as lease:
            stock.connection.execute("PRAGMA busy_timeout = 300")
            with pytest.raises(Exception, match="database is locked"):
                stock.read(lease)
            stock.connection.execute("PRAGMA busy_timeout = 60000")
            holder.resume()
            assert holder.request("commit") == "committed"
            assert stock.read(lease) == 1
            assert holder.request("begin") == "StaleToken"
    close(stock)


@pytest.mark.parametrize("kind", counter_kinds("postgres", "mariadb"))
def test_stopped_inside_its_transaction_without_a_fence(
    kind: str, address: str, start: Callable[..., Child], tmp_path: Path
) -> None:
    """Without the fence the stopped holder commits over the next holder's write, which is lost."""
    holder = start(kind, address, f"sqlite:///{tmp_path}/locks.db", "1")
    stock = open_counter(kind, address, fenced=False)
    holder.request("bare")
    holder.request("acquire")
    assert holder.request("begin") == "0"
    holder.stop()
    stock.write(SimpleNamespace(token=34, id="second"), 0, 10)
    holder.resume()
    assert holder.request("commit") == "committed"
    assert stock.read(SimpleNamespace(token=34, id="second")) == 1
    close(stock)
