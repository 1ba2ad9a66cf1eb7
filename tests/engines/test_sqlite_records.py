"""Records in a SQLite database: what another start of the machine, a power cut and time do to them."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import fencelock
from fencelock.engines.sqlite.engine import SqliteEngine
from fencelock.runtime.blocking import run_sync


def backend_of(locks: fencelock.Locks) -> SqliteEngine:
    engine = locks._client.engine
    assert isinstance(engine, SqliteEngine)
    return engine


def test_records_outlive_a_power_cut(tmp_path: Path) -> None:
    """What was written is on the disk at once, and still there after another start of the machine."""
    (tmp_path / "synced").mkdir()
    with fencelock.connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        written = run_sync(backend_of(locks).records.write("job", b"done", token=7, ttl=3600))
        assert written.done
        for suffix in ("", "-wal"):
            shutil.copy(f"{tmp_path}/locks.db{suffix}", tmp_path / "synced")
    with fencelock.connect(f"sqlite:///{tmp_path}/synced/locks.db") as locks:
        backend_of(locks)._database.boot = "another boot"
        with locks.lock("x"):
            found = run_sync(backend_of(locks).records.read("job"))
    assert found is not None
    assert written.record is not None
    assert (found.value, found.token, found.version) == (b"done", 7, written.record.version)


def test_records_that_ran_out_are_cleared_away(tmp_path: Path) -> None:
    """A record whose time is over takes no space for ever."""
    path = f"{tmp_path}/locks.db"
    with fencelock.connect(f"sqlite:///{path}") as locks:
        engine = backend_of(locks)
        run_sync(engine.records.write("short", b"x" * 1000, token=1, ttl=0.1))
        run_sync(engine.records.write("long", b"y", token=1, ttl=3600))
    connection = sqlite3.connect(path)
    try:
        connection.execute("UPDATE record SET ends = 1 WHERE key = 'short'")
        connection.execute("UPDATE counter SET reserved = token")  # as if the minutes that were reserved are over
        connection.commit()
        with fencelock.connect(f"sqlite:///{path}") as locks, locks.lock("x"):
            pass
        assert connection.execute("SELECT key FROM record").fetchall() == [("long",)]
    finally:
        connection.close()
