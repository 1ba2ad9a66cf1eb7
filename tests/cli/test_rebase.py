"""`fencelock rebase`: moves the fences of an application's database or Redis, and logs the reason."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from fencelock import StaleToken
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import SqlFence
from tests.cli.conftest import Cli
from tests.servers.redis import Redis

REASON = ("--reason", "the locks moved to etcd")


def test_all_fences_of_a_database(cli: Cli, tmp_path: Path) -> None:
    """All fences move to the token, and the log has the reason; the new engine's lower tokens are accepted."""
    with sqlite3.connect(tmp_path / "app.db") as database:
        for resource in ("a", "b"):
            SqlFence().check(database, SimpleNamespace(token=1000, id="old"), resource)
    done = cli("rebase", "--url", f"sqlite:///{tmp_path}/app.db", "--token", "500", *REASON)
    assert (done.returncode, done.stdout) == (0, "moved 2 fences to token 500\n")
    assert "the fences of 2 resources were moved to token 500: the locks moved to etcd" in done.stderr
    with database:
        SqlFence().check(database, SimpleNamespace(token=501, id="new"), "a")
    with pytest.raises(StaleToken), database:
        SqlFence().check(database, SimpleNamespace(token=499, id="older"), "b")
    database.close()


def test_one_fence_of_a_database(cli: Cli, tmp_path: Path) -> None:
    """With --resource only that fence moves."""
    with sqlite3.connect(tmp_path / "app.db") as database:
        for resource in ("a", "b"):
            SqlFence().check(database, SimpleNamespace(token=1000, id="old"), resource)
    done = cli("rebase", "--url", f"sqlite:///{tmp_path}/app.db", "--token", "5", "--resource", "a", *REASON)
    assert (done.returncode, done.stdout) == (0, "moved 1 fence to token 5\n")
    assert [SqlFence().token(database, resource) for resource in ("a", "b")] == [5, 1000]
    database.close()


def test_fences_in_redis(cli: Cli, redis_node: Redis) -> None:
    """The fences of a RedisFence move, too, by the key of its marks."""
    with redis.Redis.from_url(redis_node.url) as client:
        fence = RedisFence(client, key="test:rebase")
        fence.enter(SimpleNamespace(token=1000, id="old"), "a")
        done = cli("rebase", "--url", redis_node.url, "--key", "test:rebase", "--token", "5", *REASON)
        assert (done.returncode, done.stdout) == (0, "moved 1 fence to token 5\n")
        assert fence.token("a") == 5
        client.delete("test:rebase")


def test_wrong_arguments(cli: Cli) -> None:
    """Without a reason, with an empty one, or with a URL of no database, nothing moves."""
    assert cli("rebase", "--url", "sqlite:x.db", "--token", "5").returncode == 64
    missing = cli("rebase", "--url", "sqlite:x.db", "--token", "5", *REASON)
    assert (missing.returncode, "there is no database at" in missing.stderr) == (69, True)
    assert not cli.file("x.db").exists()
    cli.file("x.db").touch()
    assert cli("rebase", "--url", "sqlite:x.db", "--token", "5", "--reason", " ").returncode == 64
    assert cli("rebase", "--url", "etcd://localhost", "--token", "5", *REASON).returncode == 64
