"""No descriptor is left: what cannot be had is done without, or refused in the library's own words."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fencelock
from fencelock.core import wakeup
from fencelock.engines.sqlite import database, opening


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[fencelock.Locks]:
    """A client."""
    with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        yield locks


def exhausted(*_: Any, **__: Any) -> NoReturn:
    """Stand in for whatever opens something."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_no_descriptor_for_a_wakeup(locks: fencelock.Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter without a wake-up socket polls, and still gets the lock."""
    monkeypatch.setattr(wakeup, "open_socket", exhausted)
    lease = locks.lock("x").acquire()
    threading.Timer(0.1, lease.release).start()
    assert locks.lock("x").acquire(timeout=15).release()


def test_no_descriptor_to_send_a_wakeup(locks: fencelock.Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release succeeds although it cannot wake the next waiter."""
    lease = locks.lock("x").acquire()
    leases: list[fencelock.Lease] = []
    waiter = threading.Thread(target=lambda: leases.append(locks.lock("x").acquire(timeout=15)))
    waiter.start()
    while not locks.inspect("x").waiters:
        pass
    monkeypatch.setattr(socket, "socket", exhausted)
    assert lease.release()
    waiter.join()
    assert leases[0].release()


def test_no_descriptor_to_create_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system while the database is opened comes out as EngineUnavailable, and the next try works."""
    with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        with monkeypatch.context() as patch, pytest.raises(fencelock.EngineUnavailable, match="Too many open files"):
            patch.setattr(opening, "_sync_folder", exhausted)
            locks.lock("x").acquire()
        assert locks.lock("x").acquire().release()


def test_failed_attempts_keep_no_wakeup(locks: fencelock.Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first attempt that fails when it is committed keeps no wake-up socket."""
    lease = locks.lock("x").acquire()
    with monkeypatch.context() as patch:
        patch.setattr(database.Database, "_transact", _refusing(database.Database._transact))
        for _ in range(5):
            with pytest.raises(fencelock.EngineUnavailable):
                locks.lock("x").acquire()
    assert locks._client.engine._wakeups == {}  # type: ignore[attr-defined]
    lease.release()


def _refusing(transact: Any) -> Any:
    def refuse(self: Any, timeout: float, step: Any, *args: Any) -> NoReturn:
        def failing(cursor: Any, *args: Any) -> NoReturn:
            step(cursor, *args)
            raise fencelock.EngineUnavailable("the disk is full")

        transact(self, timeout, failing, *args)
        raise AssertionError("not reached")

    return refuse
