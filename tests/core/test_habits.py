"""Habits from redis-py's Lock and `threading.Lock`: each gets an error that says what to write here."""

from __future__ import annotations

from typing import Any

import pytest

import fencelock
from fencelock import InvalidType, aio

CONNECT = pytest.mark.parametrize("connect", [fencelock.connect, aio.connect], ids=["blocking", "asyncio"])


@CONNECT
@pytest.mark.parametrize(
    ("attribute", "advice"),
    [
        ("release", r"lease\.release\(\)"),
        ("locked", r"locks\.inspect\(name\)\.holders"),
        ("owned", r"lease\.lost"),
        ("extend", r"lease\.renew\(\)"),
        ("reacquire", r"lease\.renew\(\)"),
    ],
)
def test_methods_that_a_lock_does_not_have(connect: Any, attribute: str, advice: str) -> None:
    """A lock holds nothing: what redis-py's has for that is the lease's, or the client's."""
    lock = connect("memory://habits").lock("x")
    assert not hasattr(lock, attribute)
    with pytest.raises(AttributeError, match=rf"^a fencelock Lock has no attribute '{attribute}': .*{advice}"):
        getattr(lock, attribute)
    with pytest.raises(AttributeError, match=r"^a fencelock Lock has no attribute 'nosuch'$"):
        _ = lock.nosuch


@CONNECT
async def test_arguments_of_redis_py(connect: Any) -> None:
    """`blocking_timeout` and `blocking` are refused with the argument that does the same here."""
    locks = connect("memory://habits")
    with pytest.raises(
        InvalidType, match=r"^lock\(\) has no argument 'blocking_timeout': timeout= is how long to wait"
    ):
        locks.lock("x", timeout=10, blocking_timeout=5)
    with pytest.raises(InvalidType, match=r"^lock\(\) has no argument 'nosuch'$"):
        locks.lock("x", nosuch=1)
    for keywords, words in (
        ({"blocking_timeout": 5}, r"'blocking_timeout': timeout="),
        ({"blocking": False}, r"'blocking': use try_acquire\(\)"),
    ):
        with pytest.raises(InvalidType, match=rf"^acquire\(\) has no argument {words}"):
            await locks.lock("x").acquire(**keywords)
