"""Runs coroutine tests, and gives every test a bounded time: a hang is a failure that says where it hung."""

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
    """Take back that signals are ignored, as for the background jobs of a shell, or under nohup: all would inherit it."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each process of pytest-xdist import its share first: in a fresh clone each file is then compiled once."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    gc.disable()  # a sixth of the collection would go into looking for garbage, of which there is next to none
    asked = [Path(argument.partition("::")[0]).absolute() for argument in session.config.args]
    files = [path for path in sorted(HERE.rglob("test_*.py")) if any(path.is_relative_to(place) for place in asked)]
    for path in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.fail.Exception):  # it comes again, where it is reported
            import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes a minute begin before what takes a moment, so that no core is idle at the end."""
    items.sort(key=lambda item: item.path.parent.name not in ("redlock", "sim", "torture"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what is there for good: else it stops all threads, for longer than a short ttl."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests in an event loop of their own; whatever fixture has `finish` is finished there."""
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
