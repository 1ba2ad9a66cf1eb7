"""Runs coroutine tests, and limits the time of every test: a test that hangs fails with a traceback."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.servers.plugin"]

HERE = Path(__file__).parent
TEST_SECONDS = 100.0
"""Below pytest-timeout's limit, so that a coroutine that hangs is cancelled and its traceback shown."""


SLOW_SERVERS = ("etcd1", "mariadb", "zookeeper1")
"""Servers whose shortest ttl is long: their tests spend most of the time waiting."""
RUNTIMES = ("blocking", "aio")
CPU_BOUND = ("redlock", "sim", "torture")
"""Folders of tests that use a whole core."""

MARKS = (
    "runtime_name(name): is about one runtime only",
    "long: takes long, and changes with our own tools only; `make torture` runs it",
    # In the contract suite, to leave out engines:
    "client_side: is about what the client does by itself, so for one engine without a server and one with",
    "server: needs an engine with a server, whose network a test can stop",
    "processes: needs a second process, so for engines that others can reach",
    "fair: is about the order of service, so for engines that promise one",
    "shared: is about readers, so for engines that have them",
    "limit: is about permits, so for engines that have them",
    "records: is about what is remembered beside locks, so for engines that keep it",
)


def pytest_configure(config: pytest.Config) -> None:
    """Restore signals that a shell or nohup ignores for its background jobs: all child processes would inherit that."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist keeps the order of `_start_rank`
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each process of pytest-xdist import its share first: in a fresh clone each file is then compiled once."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # it would take a sixth of the collection and find almost no garbage
    selected = [Path(argument.partition("::")[0]).absolute() for argument in session.config.args]
    files = [path for path in sorted(HERE.rglob("test_*.py")) if any(path.is_relative_to(part) for part in selected)]
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.fail.Exception):  # the collection raises it again and reports it
            import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long groups that wait for ttls together with the tests that need the CPU, so that both are busy."""
    items.sort(key=_start_rank)


def _start_rank(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    name = group.args[0] if group is not None else ""
    if name.startswith(SLOW_SERVERS) and name.endswith(RUNTIMES):
        return 0
    if item.path.parent.name in CPU_BOUND:
        return 1
    return 2 if name else 3


def pytest_collection_finish() -> None:
    """Freeze the imported objects: a full garbage collection would stop all threads for longer than a short ttl."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test in its own event loop; there, call `finish` of every fixture that has it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(_run(pyfuncitem.obj, given, list(pyfuncitem.funcargs.values())))
    return True


async def _run(test: Any, given: dict[str, Any], fixtures: list[Any]) -> None:
    try:
        async with asyncio.timeout(TEST_SECONDS):
            await test(**given)
    finally:
        for value in fixtures:
            if hasattr(value, "finish"):
                await value.finish()
