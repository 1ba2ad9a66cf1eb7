"""The test servers: a run leaves no process behind, a failed start is reported, and the proxy breaks the network as asked.

All other tests show that servers start, pause, stop and restart. Only what these could not notice is tested here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers import Proxy, Redis
from tests.servers.lifeline import descendants
from tests.servers.packages import ROOT
from tests.support.waiting import eventually_blocking


def command(folder: Path, *options: str) -> list[str]:
    """Return a command that runs the tests of a folder with the plugin of the servers."""
    plugin = ("-p", "tests.servers.plugin", "-p", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", *plugin, "-c", os.devnull, "--rootdir", str(folder), str(folder), *options]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the servers' folders are created in this folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "FENCELOCK_KEEP_ENGINES": ""}


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a file of tests in another pytest, and assert that it leaves no folder of a server."""
    tests, temporary = folder / "tests", folder / "temporary"
    tests.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    (tests / "test_it.py").write_text(code)
    done = subprocess.run(
        command(tests, *options), cwd=tests, env=environment(temporary), capture_output=True, text=True, timeout=100
    )
    assert not list(temporary.glob("fencelock-*"))
    return done


@pytest.mark.long
@pytest.mark.engine("redis", own=True)
def test_failed_start_fails_its_tests_with_the_log(tmp_path: Path) -> None:
    """A test whose server does not start fails with the last lines of its log, and the other tests run."""
    code = """
from tests.servers import Redis, shared
broken = shared.Kind("redis", "Redis", lambda: Redis(settings={"maxmemory-policy": "nonsense"}))
shared.KINDS["redis"] = broken
def test_first(redis_node): pass
def test_second(redis_node): pass
def test_other(): pass
"""
    done = run(tmp_path, code)
    assert done.returncode == 1
    assert "1 passed, 2 errors" in done.stdout
    assert "FATAL CONFIG FILE ERROR" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.long
@pytest.mark.engine("redis", own=True)
def test_without_engine_reports_the_deselected_tests(tmp_path: Path) -> None:
    """`--without-engine` deselects the tests that use the engine, and the summary says how many."""
    code = """
import pytest
def test_shared(redis_nodes): pass
def test_own(own_redis): pass
@pytest.mark.engine("redis")
def test_marked(): pass
def test_none(): pass
"""
    done = run(tmp_path, code, "--without-engine", "redis")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 deselected" in done.stdout
    assert "left out by --without-engine redis: 3 of the tests" in done.stdout


@pytest.mark.long
@pytest.mark.engine("redis", "etcd", "zookeeper", "postgres", "mariadb", own=True)
def test_killed_run_leaves_no_processes_and_folders(tmp_path: Path) -> None:
    """When pytest is killed -9, its servers (also a paused one), its proxies and their folders are soon gone."""
    (tmp_path / "test_it.py").write_text("""
import time
def test_it(redis_node, etcd3, zookeeper1, postgres, mariadb, own_postgres, proxy):
    own = own_postgres()
    proxy(own)
    postgres.pause()
    open("ready", "w").close()
    time.sleep(600)
""")
    argv, null = command(tmp_path), subprocess.DEVNULL
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path), stdout=null, stderr=null) as tests:
        try:
            eventually_blocking(lambda: (tmp_path / "ready").exists() or tests.poll() is not None, timeout=100)
            assert tests.poll() is None
            pids = descendants(tests.pid)
        finally:
            tests.send_signal(signal.SIGKILL)
    assert pids
    eventually_blocking(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "the processes are gone")
    eventually_blocking(lambda: not list(tmp_path.glob("fencelock-*")), "the folders are gone")


@contextmanager
def connected(proxy: Proxy) -> Iterator[socket.socket]:
    """Connect to a proxy in front of Redis, and assert that it works."""
    with socket.create_connection((proxy.host, proxy.port), 30) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100) == b"+PONG\r\n"
        yield connection


def receives_nothing(connection: socket.socket) -> bool:
    """Return whether nothing arrives for a while."""
    connection.settimeout(0.3)
    try:
        connection.recv(100)
    except TimeoutError:
        return True
    else:
        return False
    finally:
        connection.settimeout(30)


@pytest.fixture
def redis_proxy(redis_node: Redis, proxy: Callable[[Redis], Proxy]) -> Proxy:
    """A proxy in front of the shared Redis."""
    redis_node.command("DEL", "key")
    return proxy(redis_node)


def test_cut_to_the_server_delays_requests(redis_proxy: Proxy, redis_node: Redis) -> None:
    """A request takes effect only after the network is healed."""
    with connected(redis_proxy) as connection:
        redis_proxy.cut("to_server")
        connection.sendall(b"SET key yes\r\n")
        assert receives_nothing(connection)
        assert redis_node.command("GET", "key") == b"$-1"
        redis_proxy.heal()
        assert connection.recv(100) == b"+OK\r\n"
    assert redis_node.command("GET", "key") == b"yes"


def test_cut_to_the_client_delays_replies(redis_proxy: Proxy, redis_node: Redis) -> None:
    """A request takes effect at once, and its reply arrives after the network is healed."""
    with connected(redis_proxy) as connection:
        redis_proxy.cut("to_client")
        connection.sendall(b"SET key yes\r\n")
        eventually_blocking(lambda: redis_node.command("GET", "key") == b"yes")
        assert receives_nothing(connection)
        redis_proxy.heal()
        assert connection.recv(100) == b"+OK\r\n"


def test_dropped_reply_is_lost(redis_proxy: Proxy, redis_node: Redis) -> None:
    """A request takes effect, its reply never arrives, and the connection is reset when the network is healed."""
    with connected(redis_proxy) as connection:
        redis_proxy.drop("to_client")
        connection.sendall(b"SET key yes\r\n")
        eventually_blocking(lambda: redis_node.command("GET", "key") == b"yes")
        assert receives_nothing(connection)
        redis_proxy.heal()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


def test_dropped_request_is_lost(redis_proxy: Proxy, redis_node: Redis) -> None:
    """A request has no effect, not even after the network is healed."""
    with connected(redis_proxy) as connection:
        redis_proxy.drop("to_server")
        connection.sendall(b"SET key yes\r\n")
        assert receives_nothing(connection)
        redis_proxy.heal()
    assert redis_node.command("GET", "key") == b"$-1"
