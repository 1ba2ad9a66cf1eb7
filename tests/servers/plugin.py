"""The pytest plugin for the engines: `pytest_plugins = ["tests.servers.plugin"]` in tests/conftest.py.

The fixtures `redis_node`, `redis_nodes`, `etcd1`, `etcd3`, `zookeeper1`, `zookeeper3`, `postgres` and `mariadb` are
shared by the whole run; `own_redis()` and its like make one for a single test to break. `engines.get("redis")` with
`@pytest.mark.engine("redis")` is for tests that have the engine's name as a parameter; with `own=True` the mark only
says that the test starts such an engine by itself.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tests.servers.etcd import Etcd, EtcdCluster
from tests.servers.mariadb import MariaDB, sql_server
from tests.servers.packages import FAMILIES
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgres import Postgres
from tests.servers.proxy import Proxies, Proxy
from tests.servers.redis import Redis, Redis62, RedisNodes, Sentinel
from tests.servers.server import KEEP
from tests.servers.shared import ALIASES, KINDS, REDIS_NODES, Engine, Engines
from tests.servers.zookeeper import ZooKeeper, ZooKeeperCluster

# Fixtures that need a shared engine, and fixtures that only need its programs.
SHARED = {"redis_node": "redis", **{name: name for name in KINDS if name != "redis"}}
OWN = {
    **{f"own_{family}": family for family in FAMILIES},
    **dict.fromkeys(("own_redis_nodes", "own_sentinel"), "redis"),
}
LIGHT = {"redis"}
"""Shared engines that start fast and need little memory, so that every process of pytest-xdist has its own."""


class Session:
    """The state of the plugin during one run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.without = {ALIASES.get(name, name) for name in config.getoption("--without-engine")}
        self.without |= {name for name in KINDS if KINDS[name].family in config.getoption("--without-engine")}
        self.left_out: Counter[str] = Counter()
        self.kept: list[str] = []
        self.engines = Engines(self.report)
        self._messages: list[str] = []
        self._main = threading.main_thread()

    def report(self, line: str) -> None:
        """Print a message; one from a background thread is printed by the main thread later."""
        self._messages.append(line)
        if threading.current_thread() is self._main:
            self.print_messages()

    def print_messages(self) -> None:
        """Print the messages that have not been printed yet."""
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if reporter is None or not self._messages:
            return
        with ExitStack() as stack:
            if capture is not None:
                stack.enter_context(capture.global_and_fixture_disabled())
            reporter.ensure_newline()
            if reporter.verbosity < 0:
                # With -q pytest writes dots without a file's name, and does not know that the line has not ended.
                reporter.write_line("")
            while self._messages:
                reporter.write_line(f"engines: {self._messages.pop(0)}")

    def get(self, name: str) -> Engine:
        """Return a shared engine for a test."""
        if name in self.without:
            raise pytest.fail.Exception(
                f"{name} was left out by --without-engine, but this test asks for it while it runs: "
                f'mark the test with @pytest.mark.engine("{name}") so that it can be left out too'
            )
        try:
            return self.engines.get(name)
        finally:
            self.print_messages()


SESSION = pytest.StashKey[Session]()


def needs(item: pytest.Item) -> tuple[set[str], set[str]]:
    """Return the shared engines that a test needs, and the families of these and of the engines that it starts itself."""
    fixtures = getattr(item, "fixturenames", ())
    names = {SHARED[name] for name in fixtures if name in SHARED}
    families = {OWN[name] for name in fixtures if name in OWN}
    for marker in item.iter_markers("engine"):
        for word in marker.args:
            name = ALIASES.get(word, word)
            if name not in KINDS:
                raise pytest.UsageError(f"{item.nodeid}: no engine is called {word!r}; there are {', '.join(KINDS)}")
            families.add(KINDS[name].family)
            if not marker.kwargs.get("own"):
                names.add(name)
    return names, families | {KINDS[name].family for name in names}


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--without-engine` and `--keep-engines`."""
    group = parser.getgroup("engines")
    choices = sorted({*KINDS, *FAMILIES})
    group.addoption(
        "--without-engine",
        action="append",
        default=[],
        choices=choices,
        metavar="NAME",
        help=f"leave out the tests that need this engine (may be repeated): {', '.join(choices)}",
    )
    group.addoption("--keep-engines", action="store_true", help=f"keep the engines' folders and logs ({KEEP}=1 too)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "engine(*names, own=False): this test needs these engines, shared or its own")
    if config.getoption("--keep-engines"):
        os.environ[KEEP] = "1"
    config.stash[SESSION] = Session(config)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of engines that --without-engine names."""
    session = config.stash[SESSION]
    unwanted = config.getoption("--without-engine")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        names, families = needs(item)
        refused = [name for name in unwanted if ALIASES.get(name, name) in names or name in families]
        (left_out if refused else kept).append(item)
        session.left_out.update(refused[:1])
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    if config.pluginmanager.hasplugin("xdist"):
        _assign_groups(items)


def _assign_groups(items: list[pytest.Item]) -> None:
    """Keep the tests that share a heavy server in one process of pytest-xdist, so that not every process starts it.

    The two runtimes of an engine run at the same time. pytest-xdist gives each process one test at a time of the rest.
    """
    for item in items:
        names = "+".join(sorted(needs(item)[0] - LIGHT))
        if names:
            callspec = getattr(item, "callspec", None)
            runtime_name = callspec.params.get("runtime_name", "") if callspec is not None else ""
            item.add_marker(pytest.mark.xdist_group(f"{names} {runtime_name}".strip()))


def _check_groups(session: pytest.Session) -> None:
    """Refuse a pytest-xdist that overlooks groups, as 3.8 does with pytest 9.2: every process would start every server."""
    if session.config.getoption("loadgroup", False):  # in pytest-xdist's processes only
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid.rpartition("]")[2]:
                raise RuntimeError(f"{item.nodeid} has a group that pytest-xdist ignores")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Install what the selected tests need, and begin to start it."""
    if session.config.getoption("collectonly"):
        return
    _check_groups(session)
    names: set[str] = set()
    families: set[str] = set()
    for item in session.items:
        item_names, item_families = needs(item)
        names |= item_names
        families |= item_families
    mine = session.config.stash[SESSION]
    # Before the first test: an installation may take longer than the time limit of a test.
    mine.engines.install(families)
    if names and not hasattr(session.config, "workerinput"):  # otherwise other processes run most of these tests
        mine.report(f"starting {', '.join(KINDS[name].title for name in sorted(names))} …")
        mine.engines.begin(names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """After a test, the shared engines that it used must be as healthy as before."""
    session = item.config.stash[SESSION]
    try:
        return (yield)
    finally:
        session.engines.heal(needs(item)[0])
        session.print_messages()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End everything that was started."""
    mine = session.config.stash[SESSION]
    mine.kept = mine.engines.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was left out and what was kept."""
    session = config.stash[SESSION]
    for name, count in sorted(session.left_out.items()):
        terminalreporter.write_line(f"engines: left out by --without-engine {name}: {count} of the tests")
    for folder in session.kept:
        terminalreporter.write_line(f"engines: kept {folder}")


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Session:
    """`engines.get(name)` for tests that are marked with the engine's name."""
    return request.config.stash[SESSION]


def _shared(name: str, kind: type[Any]) -> Any:
    def give(engines: Session) -> Any:
        engine = engines.get(SHARED[name])
        assert isinstance(engine, kind)
        return engine

    give.__doc__ = f"The {KINDS[SHARED[name]].title} that all tests share."
    return pytest.fixture(scope="session", name=name)(give)


def _own(name: str, make: Callable[..., Any]) -> Any:
    def give() -> Iterator[Callable[..., Any]]:
        with ExitStack() as stack:
            yield lambda *args, **options: stack.enter_context(make(*args, **options))

    give.__doc__ = f"Makes a {name.removeprefix('own_')} for this test only, which may break it."
    return pytest.fixture(name=name)(give)


shared_redis = _shared("redis_node", Redis)
shared_etcd1 = _shared("etcd1", Etcd)
shared_etcd3 = _shared("etcd3", EtcdCluster)
shared_zookeeper1 = _shared("zookeeper1", ZooKeeper)
shared_zookeeper3 = _shared("zookeeper3", ZooKeeperCluster)
shared_postgres = _shared("postgres", Postgres)
shared_mariadb = _shared("mariadb", MariaDB)


@pytest.fixture(scope="session")
def redis_nodes(engines: Session) -> Callable[[int], Sequence[Redis]]:
    """Returns the first n of the independent Redis nodes that all tests share."""
    nodes = engines.get("redis_nodes")
    assert isinstance(nodes, RedisNodes)

    def give(count: int) -> Sequence[Redis]:
        if count > REDIS_NODES:
            raise ValueError(f"there are {REDIS_NODES} shared nodes; own_redis_nodes({count}) makes more")
        return nodes.members[:count]

    return give


own_redis = _own("own_redis", Redis)
own_redis62 = _own("own_redis62", Redis62)
own_redis_nodes = _own("own_redis_nodes", RedisNodes)
own_sentinel = _own("own_sentinel", Sentinel)
own_postgres = _own("own_postgres", Postgres)
own_pgbouncer = _own("own_pgbouncer", PgBouncer)
own_mariadb = _own("own_mariadb", sql_server)


def _etcd(members: int = 1, **options: Any) -> Etcd | EtcdCluster:
    return Etcd(**options) if members == 1 else EtcdCluster(members, **options)


def _zookeeper(members: int = 1, **options: Any) -> ZooKeeper | ZooKeeperCluster:
    return ZooKeeper(**options) if members == 1 else ZooKeeperCluster(members, **options)


own_etcd = _own("own_etcd", _etcd)
own_zookeeper = _own("own_zookeeper", _zookeeper)
proxy = _own("proxy", Proxy)
proxies = _own("proxies", Proxies)
