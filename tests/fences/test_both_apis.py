"""The two APIs of fences and lock-free tools: the same names and signatures; read leases and permits are refused."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import fencelock.aio.fences
import fencelock.aio.lockfree
import fencelock.fences
import fencelock.lockfree
from fencelock import InvalidArgument, InvalidType
from fencelock.fences.etcd import EtcdFence
from fencelock.fences.file import FileFence
from fencelock.fences.http import FencingTokenAuth, WsgiFencingMiddleware, header, path_of
from fencelock.fences.memory import MemoryFence
from fencelock.fences.redis import RedisFence
from fencelock.fences.sql import FenceColumn, SqlFence, StandaloneSqlFence
from fencelock.lockfree.optimistic import RecordKey
from tests.core.test_api import TWINS, plain

ONLY_IN_ONE_API = {"WsgiFencingMiddleware", "FencingMiddleware", "IdempotencyMiddleware"}
MODULES = sorted(
    f"{package}.{module.name}"
    for package, path in [("fences", fencelock.aio.fences.__path__), ("lockfree", fencelock.aio.lockfree.__path__)]
    for module in pkgutil.iter_modules(path)
    if module.name != "asgi"
)


def public(module: Any) -> dict[str, Any]:
    """Return the public classes and functions of a module."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").endswith(module.__name__) and not name.startswith(("_", "Base"))
    ]
    return {name: getattr(module, name) for name in names if name not in ONLY_IN_ONE_API}


def signature(function: Any) -> list[tuple[str, Any, str, str]]:
    """Return the parameters of a function, without what differs between the APIs."""
    parameters = list(inspect.signature(function).parameters.values())
    texts = [plain(it.annotation) for it in parameters]
    texts = [text.replace("AsyncConnection", "C").replace("BlockingConnection", "C") for text in texts]
    texts = [text.replace("Awaitable[object]", "object") for text in texts]
    return [(it.name, it.kind, repr(it.default), text) for it, text in zip(parameters, texts, strict=True)]


def methods(kind: type) -> dict[str, Any]:
    """Return the public methods of a class, the constructor among them."""
    found = dict(inspect.getmembers(kind, inspect.isfunction))
    special = {"__init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__call__"}
    if len(inspect.signature(kind).parameters) == 0:
        special.remove("__init__")
    return {name: method for name, method in found.items() if not name.startswith("_") or name in special}


@pytest.mark.parametrize("name", MODULES)
def test_both_apis_have_the_same_signatures(name: str) -> None:
    """Each module has the same names in both APIs, with the same parameters; only the awaiting differs."""
    blocking, awaited = (public(importlib.import_module(f"{api}.{name}")) for api in ("fencelock", "fencelock.aio"))
    helpers = {"check_redis_client"}
    assert {it for it in blocking if it not in helpers} - set(awaited) == set()
    for key in blocking.keys() & awaited.keys():
        one, other = blocking[key], awaited[key]
        if one is other or not callable(one):
            continue
        if not isinstance(one, type):
            assert signature(one) == signature(other), key
            continue
        ours, theirs = methods(one), methods(other)
        assert {TWINS.get(method, method) for method in ours} == set(theirs), key
        for method, function in ours.items():
            assert signature(function) == signature(theirs[TWINS.get(method, method)]), f"{key}.{method}"


class WrappedAsyncClient:
    """A client of asyncio that is neither of redis.asyncio nor has coroutine functions."""

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> None: ...

        return lambda *args: call(*args)


class WrappedAsyncFence:
    """A fence of asyncio whose `enter` is not a coroutine function."""

    enter = WrappedAsyncClient().enter


@pytest.mark.parametrize(
    "use",
    [
        lambda lease: RedisFence(WrappedAsyncClient()).enter(lease, "x"),
        lambda lease: EtcdFence(WrappedAsyncClient()).enter(lease, "x"),
        lambda lease: WsgiFencingMiddleware(pytest.fail, WrappedAsyncFence(), resource=path_of)(
            {"REQUEST_METHOD": "POST", "PATH_INFO": "/x", "HTTP_FENCING_TOKEN": header(lease)}, pytest.fail
        ),
    ],
)
def test_awaitable_result_in_the_blocking_api_is_an_error(use: Callable[[Any], object]) -> None:
    """A client that looks blocking but returns awaitables is refused: its check would do nothing."""
    with pytest.raises(InvalidType, match=r"fencelock\.aio"):
        use(SimpleNamespace(token=34, id="a"))


def test_fences_and_lockfree_are_attributes() -> None:
    """`import fencelock` is enough for `fencelock.fences` and `fencelock.aio.fences`, and imports none of them."""
    program = (
        "import sys, fencelock\n"
        "assert not any(name.startswith(('fencelock.fences', 'fencelock.lockfree')) for name in sys.modules)\n"
        "fencelock.fences.from_environ, fencelock.lockfree, fencelock.aio.fences.TokenPair, fencelock.aio.lockfree\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def sqlite_check(lease: Any) -> None:
    """Check on a connection that would report every statement."""
    database = sqlite3.connect(":memory:")
    statements: list[str] = []
    database.set_trace_callback(statements.append)
    try:
        SqlFence().check(database, lease, "x")
    finally:
        database.close()
        assert statements == []


CHECKS: dict[str, Callable[[Any], object]] = {
    "sql": sqlite_check,
    "standalone": lambda lease: StandaloneSqlFence(lambda: pytest.fail("a connection was opened")).enter(lease, "x"),
    "column": lambda lease: FenceColumn(paramstyle="qmark").clause(lease),
    "memory": lambda lease: MemoryFence().enter(lease, "x"),
    "file": lambda lease: FileFence().write(lease, "/no/such/folder/file", b""),
    "header": header,
    "auth": FencingTokenAuth,
}


@pytest.mark.parametrize(("mode", "word"), [("shared", "read"), ("permit", "permit")])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_read_leases_and_permits_are_refused(check: Callable[[Any], object], mode: str, word: str) -> None:
    """A fence refuses a lease that does not exclude others before its first statement, and says why."""
    with pytest.raises(InvalidArgument, match=rf"needs an exclusive lease: a {word}"):
        check(SimpleNamespace(token=34, id="a", mode=mode))


def test_record_refuses_a_read_lease() -> None:
    """A record is fenced by a token, so it refuses a read lease, too."""
    with fencelock.connect("memory://read-lease") as locks, pytest.raises(InvalidArgument, match="read lease"):
        RecordKey(locks, "x", lease=SimpleNamespace(token=34, id="a", mode="shared"))


def test_leases_of_a_rwlock_and_a_semaphore() -> None:
    """A fence refuses real read leases, permits and downgraded leases, and accepts a write lease."""
    fence = MemoryFence()
    with fencelock.connect("memory://modes") as locks:
        with locks.rwlock("x").read() as lease, pytest.raises(InvalidArgument, match="a read lease"):
            fence.enter(lease)
        with locks.semaphore("y", 3) as permit, pytest.raises(InvalidArgument, match="a permit"):
            fence.enter(permit)
        with locks.rwlock("z").write() as writer:
            fence.enter(writer)
            writer.downgrade()
            with pytest.raises(InvalidArgument, match="a read lease"):
                fence.enter(writer)


def test_exclusive_leases_are_accepted() -> None:
    """A lease with the mode "exclusive", and one without a mode, are accepted."""
    fence = MemoryFence()
    fence.enter(SimpleNamespace(token=34, id="a", mode="exclusive"), "x")
    fence.enter(SimpleNamespace(token=35, id="a"), "x")
