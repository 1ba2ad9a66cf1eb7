"""Bad arguments: every one raises a FencelockError that is also a ValueError, before anything is locked."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fencelock
from fencelock import InvalidArgument, InvalidType, aio
from fencelock.fences import sql
from fencelock.lockfree.crdt import GCounter
from fencelock.lockfree.idempotency import IdempotencyKey

CONNECTS: list[dict[str, Any]] = [
    {"url": 5},
    {"url": b"memory://x"},
    {"url": "nosuch://x"},
    {"namespace": ""},
    {"namespace": None},
    {"namespace": "a\nb"},
    {"ttl": 0},
    {"ttl": "30"},
    {"ttl": None},
    {"owner": ""},
    {"owner": 5},
    {"on_lost": 5},
    {"on_lost": asyncio.sleep},
]

CALLS: dict[str, Callable[[Any], Any]] = {
    "a name that is no str": lambda locks: locks.lock(5),
    "an empty name": lambda locks: locks.lock(""),
    "a ttl that is a str": lambda locks: locks.lock("x", ttl="30"),
    "a ttl that is NaN": lambda locks: locks.lock("x", ttl=math.nan),
    "a ttl that is too long": lambda locks: locks.lock("x", ttl=1e9),
    "a negative timeout": lambda locks: locks.lock("x", timeout=-1),
    "a timeout that is a str": lambda locks: locks.lock("x", timeout="5"),
    "a timeout that is True": lambda locks: locks.lock("x", timeout=True),
    "a timeout that is NaN": lambda locks: locks.lock("x").acquire(timeout=math.nan),
    "a max_hold of 0": lambda locks: locks.lock("x", max_hold=0),
    "a purpose that does not exist": lambda locks: locks.lock("x", purpose="safety"),
    "a purpose that is None": lambda locks: locks.lock("x", purpose=None),
    "a decorator without a name": lambda locks: locks.locked(print),
    "a decorator's name that is no str": lambda locks: locks.locked(5),
    "a look at a name that is no str": lambda locks: locks.inspect(5),
    "a prefix that is None": lambda locks: locks.names(None),
    "a prefix that is no str": lambda locks: locks.names(5),
    "a forced release of an empty name": lambda locks: locks.force_release("", reason="test"),
    "a forced release for no reason": lambda locks: locks.force_release("x", reason=" "),
    "a forced release whose reason is None": lambda locks: locks.force_release("x", reason=None),
}


@pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("options", CONNECTS)
def test_connect_refuses_bad_arguments(connect: Callable[..., Any], options: dict[str, Any]) -> None:
    """`connect` refuses bad arguments."""
    with pytest.raises(InvalidArgument):
        connect(**{"url": "memory://arguments", **options})


@pytest.mark.parametrize("case", CALLS)
def test_client_methods_refuse_bad_arguments(case: str) -> None:
    """Every method of a client and of its locks refuses bad arguments, and the error names the lock."""
    with fencelock.connect("memory://arguments") as locks, pytest.raises(InvalidArgument) as caught:
        CALLS[case](locks)
    assert caught.value.name in (None, "x")

    async def main() -> None:
        async with aio.connect("memory://arguments") as locks:
            with pytest.raises(InvalidArgument):
                awaitable = CALLS[case](locks)
                if inspect.isawaitable(awaitable):
                    await awaitable

    asyncio.run(main())


def test_lost_wait_refuses_bad_timeouts() -> None:
    """`lease.lost.wait` checks its timeout as `acquire` does."""
    with fencelock.connect("memory://arguments") as locks, locks.lock("x") as lease:
        for bad in (-1, "5", math.nan):
            with pytest.raises(InvalidArgument, match=r"^'x': timeout must be"):
                lease.lost.wait(bad)  # type: ignore[arg-type]


def test_fences_and_lock_free_tools_refuse_bad_arguments() -> None:
    """Fences and lock-free tools refuse bad arguments in the same way; a wrong type is a TypeError, too."""
    fence: Any = sql.SqlFence()
    with sqlite3.connect(":memory:") as connection:
        with pytest.raises(InvalidArgument):
            fence.rebase(connection, "", 34, reason="test")
        with pytest.raises(InvalidArgument):
            fence.rebase(connection, "r", -1, reason="test")
        with pytest.raises(InvalidArgument):
            fence.rebase(connection, "r", 34, reason=None)
        with pytest.raises(InvalidType):
            fence.rebase(connection, 5, 34, reason="test")
    with pytest.raises(InvalidType, match="a connection or a cursor is needed"):
        fence.create(object())
    with pytest.raises(InvalidArgument):
        GCounter().add("", 1)
    with pytest.raises(InvalidType), IdempotencyKey(object(), "key"):
        pass
    assert issubclass(InvalidType, ValueError)


def test_no_bare_errors_in_the_source() -> None:
    """No public function raises a bare ValueError or TypeError, except `__reduce__`: pickle expects a TypeError."""
    root = Path(fencelock.__file__).parent
    bare = re.compile(r"raise (ValueError|TypeError)\((?!.a fencelock (lease|group|lock|client) cannot be sent)")
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("core", "primitives", "api", "fences", "lockfree", "sqlio")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert found == []
