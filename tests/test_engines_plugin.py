"""What the plugin promises to a test run, seen from outside of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers.lifeline import descendants
from tests.servers.packages import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [pytest.mark.long, pytest.mark.engine("redis", own=True)]


def command(folder: Path, *options: str) -> list[str]:
    plugin = ("-p", "tests.servers.plugin", "-p", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", *plugin, "-c", os.devnull, "--rootdir", str(folder), str(folder), *options]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "FENCELOCK_KEEP_ENGINES": ""}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a file of tests in a pytest of its own, whose engines' folders are made in a place of our own."""
    tests, temporary = tmp_path / "tests", tmp_path / "temporary"
    tests.mkdir()
    temporary.mkdir()

    def go(code: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tests / "test_it.py").write_text(code)
        done = subprocess.run(
            command(tests, *options),
            cwd=tests,
            env=environment(temporary),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100.0,
        )
        assert not list(temporary.glob("fencelock-*"))
        return done

    return go


def test_starts_only_what_the_selected_tests_need(run: Run) -> None:
    """Engines of tests that are not selected, and of none, are not started."""
    code = """
def test_redis(redis_node): assert redis_node.answers()
def test_etcd(etcd1): assert etcd1.answers()
def test_none(): pass
"""
    done = run(code, "-k", "redis")
    assert done.returncode == 0, done.stdout
    assert "engines: starting Redis …" in done.stdout
    assert "engines: Redis: ready in " in done.stdout
    assert "etcd" not in done.stdout
    assert "engines" not in run(code, "-k", "none").stdout.replace("tests.servers", "")


def test_failed_start_fails_its_tests_with_the_log(run: Run) -> None:
    """A test whose engine does not start fails with the log's last lines, while other tests go on."""
    code = """
from tests.servers import Redis, shared
broken = shared.Kind("redis", "Redis", lambda: Redis(settings={"maxmemory-policy": "nonsense"}))
shared.KINDS["redis"] = broken
def test_first(redis_node): pass
def test_second(redis_node): pass
def test_other(): pass
"""
    done = run(code)
    assert done.returncode == 1
    assert "1 passed, 2 errors" in done.stdout
    assert "FATAL CONFIG FILE ERROR" in done.stdout
    assert "skipped" not in done.stdout


def test_missing_engine_says_what_to_install(run: Run) -> None:
    """Where a program is missing and cannot be brought, the failure names the package and the way to leave it out."""
    code = """
from tests.servers import packages
packages.FAMILIES["redis"]["no-such-program"] = "no-such-package"
packages.shutil.which = lambda name: None
def test_it(redis_node): pass
"""
    done = run(code)
    assert done.returncode == 1
    assert "apt-get install --no-install-recommends no-such-package" in done.stdout
    assert "--without-engine redis" in done.stdout


def test_leaves_out_what_the_caller_does_not_want(run: Run) -> None:
    """`--without-engine` deselects the tests of that engine, however they ask for it, and says so."""
    code = """
import pytest
def test_shared(redis_nodes): pass
def test_own(own_redis): pass
@pytest.mark.engine("redis")
def test_marked(): pass
@pytest.mark.engine("redis", own=True)
def test_starts_it_by_itself(): pass
def test_other(): pass
"""
    done = run(code, "--without-engine", "redis")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 4 deselected" in done.stdout
    assert "left out by --without-engine redis: 4 of the tests" in done.stdout
    wrong = run(code, "--without-engine", "oracle")
    assert wrong.returncode == 4
    assert "oracle" in wrong.stdout


@pytest.mark.engine("etcd", own=True)
def test_broken_shared_engine_is_whole_for_the_next_test(run: Run) -> None:
    """Whatever a test did to a shared engine, the next one finds it running and answering on the same port."""
    code = """
import pytest
from tests.servers import Redis
port = []
def test_kills(redis_node: Redis):
    port.append(redis_node.port)
    redis_node.kill()
def test_pauses(redis_node):
    assert redis_node.answers() and redis_node.port == port[0]
    redis_node.pause()
def test_stops(redis_node):
    assert redis_node.answers()
    redis_node.stop()
@pytest.mark.engine("redis", "etcd3")
def test_by_name(engines):
    assert engines.get("redis").answers()
    engines.get("etcd3").members[0].kill()
    engines.get("etcd3").members[1].pause()
def test_cluster(etcd3, redis_nodes):
    assert etcd3.answers()
    assert len(redis_nodes(3)) == 3
    redis_nodes(5)[4].kill()
def test_nodes(redis_nodes):
    assert all(node.answers() for node in redis_nodes(5))
    with pytest.raises(ValueError, match="own_redis_nodes"):
        redis_nodes(6)
"""
    done = run(code)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_keeps_folders_when_asked(tmp_path: Path) -> None:
    """With `--keep-engines` the folders and logs stay, and the summary names them."""
    (tmp_path / "test_it.py").write_text("def test_it(redis_node): pass\n")
    done = subprocess.run(
        command(tmp_path, "--keep-engines"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stdout
    (folder,) = tmp_path.glob("fencelock-redis-*")
    assert (folder / "log").stat().st_size > 0
    assert f"engines: kept {folder}" in done.stdout


@pytest.mark.engine("etcd", "zookeeper", "postgres", "mariadb", own=True)
def test_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """When pytest is killed -9, every server and proxy it started is gone soon after, and their folders too."""
    (tmp_path / "test_it.py").write_text("""
import time
def test_it(redis_node, etcd3, zookeeper1, postgres, mariadb, own_postgres, proxy):
    own = own_postgres()
    proxy(own)
    postgres.pause()
    open("ready", "w").close()
    time.sleep(600)
""")
    tests = subprocess.Popen(
        command(tmp_path), cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    with tests:
        try:
            until = time.monotonic() + 100.0
            while not (tmp_path / "ready").exists():
                assert tests.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            pids = descendants(tests.pid)
        finally:
            tests.send_signal(signal.SIGKILL)
    assert len(pids) > 20
    until = time.monotonic() + 60.0
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    while folders := list(tmp_path.glob("fencelock-*")):
        assert time.monotonic() < until, folders
        time.sleep(0.05)
