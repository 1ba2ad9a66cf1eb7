"""How long a server lives: no longer than the tests, and never because of a copy in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers import Etcd, MariaDB, Postgres, Redis, Server, ZooKeeper
from tests.servers.lifeline import descendants
from tests.servers.packages import ROOT
from tests.servers.waiting import eventually, is_running, parent

pytestmark = pytest.mark.long
EVERY_ENGINE = pytest.mark.parametrize(
    "make",
    [
        pytest.param(kind, marks=pytest.mark.engine(kind.family, own=True))
        for kind in (Redis, Etcd, ZooKeeper, Postgres, MariaDB)
    ],
)


@EVERY_ENGINE
def test_closed_server_leaves_nothing(make: Callable[[], Server]) -> None:
    """After close, even of a paused server, its processes, its leash and its folder are gone."""
    with make() as server:
        leash = parent(server.pid)
        pids = [leash, *descendants(leash)]
        assert server.pid in pids
        folder = server.folder
        server.pause()
    assert not [pid for pid in pids if is_running(pid)]
    assert not folder.exists()


@pytest.mark.engine("redis", own=True)
def test_forked_child_cannot_end_its_parents_server() -> None:
    """A child that a test forks has a copy of the server object, and closing that does nothing."""
    with Redis() as server:
        child = os.fork()
        if child == 0:
            try:
                server.kill()
                server.pause()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert server.answers()


@EVERY_ENGINE
def test_server_dies_with_the_tests(make: type[Server]) -> None:
    """When the process that started a server is killed -9, the server goes too, even a paused one, with its folder."""
    code = f"""
import time
from tests.servers import {make.__name__}
server = {make.__name__}()
server.start()
server.pause()
print(server.pid, server.folder, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        pid, folder = tests.stdout.readline().split()
        pids = [int(pid), *descendants(int(pid))]
        tests.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(is_running(pid) for pid in pids))
    assert eventually(lambda: not Path(folder).exists())


@pytest.mark.engine("redis", own=True)
def test_server_dies_with_its_leash() -> None:
    """Should the leash itself be killed, the kernel ends the server."""
    with Redis() as server:
        pid = server.pid
        os.kill(parent(pid), signal.SIGKILL)
        assert eventually(lambda: not is_running(pid))
        assert eventually(lambda: not server.is_alive)
        server.start()
        assert server.answers()


@pytest.mark.engine("postgres", own=True)
def test_killed_postgres_leaves_no_shared_memory() -> None:
    """The memory segment that PostgreSQL has outside its folder is gone after kill -9 and a wipe or a close."""

    def segment() -> str:
        return (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]

    def segments() -> set[str]:
        return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}

    with Postgres() as server:
        first = segment()
        assert first in segments()
        server.kill()
        server.wipe()
        assert first not in segments()
        server.start()
        second = segment()
        assert second in segments()
    assert second not in segments()
