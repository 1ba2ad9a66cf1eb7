"""Logins, layouts, forks, logs, and how clients end."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fencelock
from fencelock import EngineUnavailable
from fencelock.engines.zookeeper.engine import ZooKeeperEngine
from tests.contract.steps import take
from tests.engines.conftest import Clients
from tests.engines.zookeeper_server import bare, chroot, engine_of, session_of
from tests.servers.proxy import Proxy
from tests.servers.zookeeper import ZooKeeper
from tests.support.processes import Child
from tests.support.waiting import SOON, eventually


def with_login(url: str, login: str) -> str:
    """Return the URL with a login."""
    return url.replace("://", f"://{login}@")


async def test_login_keeps_others_out(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """What was made with a login is nobody else's: others are told that they lack the rights, not what is there."""
    url = chroot(zookeeper1)
    mine = clients.connect(with_login(url, "app:s3cr3t"))
    async with mine.lock("x") as lease:
        for other in (url, with_login(url, "app:wr0ng")):
            locks = clients.connect(other)
            for ask in (locks.lock("x").try_acquire, lambda locks=locks: locks.inspect("x")):
                with pytest.raises(EngineUnavailable, match="no rights") as caught:
                    await ask()
                assert "wr0ng" not in str(caught.value)
        again = clients.connect(with_login(url, "app:s3cr3t"))
        assert [holder.token for holder in (await again.inspect("x")).holders] == [lease.token]


async def test_password_is_nowhere(zookeeper1: ZooKeeper, clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    """The password of a URL is in no log and in no repr, also after a reconnect."""
    with caplog.at_level(1):
        locks = clients.connect(with_login(chroot(zookeeper1), "app:s3cr3t"))
        await take(locks, "x")
        session = session_of(locks)
        session.reconnect()
        await take(locks, "x")
    for text in (caplog.text, repr(locks), repr(engine_of(locks)), repr(session._url)):
        assert "s3cr3t" not in text


async def test_reconnect_logs_nothing(
    zookeeper1: ZooKeeper, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that breaks and is replaced in time is not worth a line in the log."""
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "x")
    session_of(locks).reconnect()
    assert await take(locks, "x")
    assert not caplog.records


async def test_layout_of_another_release(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A namespace that another release has laid out differently is refused."""
    locks = clients.connect(chroot(zookeeper1))
    path = engine_of(locks)._namespace.paths.layout
    with bare(zookeeper1) as kazoo:
        kazoo.create(path, b"99 5", makepath=True)
    with pytest.raises(EngineUnavailable, match="'99'"):
        await locks.lock("x").acquire()
    with pytest.raises(EngineUnavailable, match="'99'"):
        await locks.inspect("x")


async def test_server_that_is_not_there(clients: Clients) -> None:
    """A host that does not listen is reported in time, by name, and nothing hangs."""
    locks = clients.connect("zookeeper://127.0.0.1:1/x")
    begun = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1"):
        await locks.lock("x").acquire()
    assert time.monotonic() - begun < SOON


async def test_server_that_says_nothing(zookeeper1: ZooKeeper, proxy: Callable[..., Proxy], clients: Clients) -> None:
    """A host that accepts connections and never answers is reported in time."""
    between = proxy(zookeeper1)
    between.cut("both")
    locks = clients.connect(f"{between.url}/x")
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(locks.lock("x").acquire(), SOON)


async def test_close_ends_the_sessions(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A closed client leaves no session on the server, and no thread here."""
    before = set(threading.enumerate())
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "x")
    async with locks.lock("y", ttl=60):
        pass
    sessions = [f"{session.id:#x}" for session in engine_of(locks)._sessions._open.values()]
    assert len(sessions) == 2
    await locks.close()

    async def gone() -> bool:
        known = await asyncio.to_thread(zookeeper1.ask, "dump")
        mine = [thread for thread in set(threading.enumerate()) - before if "test" not in thread.name]
        return not any(session in known for session in sessions) and not [
            thread for thread in mine if "asyncio" not in thread.name
        ]

    await eventually(gone, "sessions and threads are gone")


async def test_idle_session_is_given_back(
    zookeeper1: ZooKeeper, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that nobody has used for a while is ended; the next claim gets a new one."""
    monkeypatch.setattr("fencelock.engines.zookeeper.session_pool.IDLE_SECONDS", 0.3)
    locks = clients.connect(chroot(zookeeper1), ttl=2)
    before = await take(locks, "x")
    sessions = engine_of(locks)._sessions

    async def ended() -> bool:
        return not sessions._open

    await eventually(ended, "the session is given back")
    assert await take(locks, "x") > before


async def test_node_without_content(zookeeper1: ZooKeeper, clients: Clients) -> None:
    """A node made by hand blocks like any other claim; `inspect` shows it, and `force_release` removes it."""
    locks = clients.connect(chroot(zookeeper1))
    await take(locks, "x")
    with bare(zookeeper1) as kazoo:
        kazoo.create(f"{engine_of(locks)._namespace.paths.of('x')}/x-abc-0000000009", b"")
        (holder,) = (await locks.inspect("x")).holders
        assert (holder.owner, holder.expires_in) == ("", 0)
        assert await locks.force_release("x", reason="test") == 1


EXIT = """
import sys, threading, fencelock
locks = fencelock.connect(sys.argv[1])
lease = locks.lock('x', ttl=60).acquire()
waiter = threading.Thread(target=locks.lock('x', ttl=60).acquire, daemon=True)
waiter.start()
while not locks.inspect('x').waiters: pass
print('ready', flush=True)
1 / 0
"""


def test_program_that_ends_with_an_exception(zookeeper1: ZooKeeper) -> None:
    """A program that holds a lock and waits for it in a thread ends at once, and leaves no claim."""
    url = chroot(zookeeper1)
    program = Child.of_source(EXIT, url, stderr=subprocess.PIPE)
    assert program.read_line() == "ready"
    _, errors = program.process.communicate("", timeout=2 * SOON)
    assert "Fatal" not in errors
    with fencelock.connect(url) as locks, locks.lock("x", timeout=SOON):
        pass


def test_import_without_kazoo() -> None:
    """Without kazoo, the error names the extra to install."""
    program = (
        "import sys; sys.modules['kazoo'] = None\n"
        "import fencelock\n"
        "try: fencelock.connect('zookeeper://h')\n"
        "except fencelock.MissingDependency as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "fencelock[zookeeper]" in done.stdout


def test_backend_is_what_the_url_names() -> None:
    """All four schemes name the engine; nothing is connected before it is used."""
    for scheme in ("zookeeper", "zookeepers", "zk", "zks"):
        with fencelock.connect(f"{scheme}://127.0.0.1:1") as locks:
            assert isinstance(locks._client.engine, ZooKeeperEngine)
            assert locks.traits.engine == "zookeeper"


def test_example_of_the_docs_page(zookeeper1: ZooKeeper) -> None:
    """The example on the page of this engine runs."""
    page = (Path(__file__).parents[2] / "docs/engines/zookeeper.md").read_text("utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    program = example.replace("zookeeper://localhost:2181", chroot(zookeeper1))
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.endswith(" 20.0\n")
