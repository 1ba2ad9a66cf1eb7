"""Concurrent callers share one connect, and its failure."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

import fencelock
from fencelock import aio
from fencelock.core.connect_once import ConnectOnce, unreachable_hint
from fencelock.errors import EngineUnavailable
from fencelock.runtime.asyncio import AsyncioRuntime


class Connector:
    """Connects or fails as configured, and counts."""

    def __init__(self, *failures: float) -> None:
        self.attempts: list[float] = []
        self.kept: list[str] = []
        self._failures = list(failures)
        self._connecting = ConnectOnce(AsyncioRuntime(), "the server", self._connect)

    async def link(self, timeout: float = inf) -> str:
        """Return the shared connection."""
        return await self._connecting.once(lambda: self.kept[-1] if self.kept else None, self.kept.append, timeout)

    async def _connect(self, timeout: float) -> str:
        self.attempts.append(timeout)
        if self._failures:
            await asyncio.sleep(self._failures.pop(0))
            raise EngineUnavailable(f"refused, call {len(self.attempts)}")
        await asyncio.sleep(0.01)
        return f"link {len(self.attempts)}"


async def test_concurrent_callers_share_one_connect() -> None:
    """A hundred concurrent callers get one connection, opened once."""
    connector = Connector()
    assert await asyncio.gather(*(connector.link() for _ in range(100))) == ["link 1"] * 100
    assert len(connector.attempts) == 1


async def test_failed_connect_is_shared() -> None:
    """Callers that waited for the shared connect get its error, without another attempt."""
    connector = Connector(0.01)
    errors = await asyncio.gather(*(connector.link() for _ in range(10)), return_exceptions=True)
    assert {str(error) for error in errors} == {"refused, call 1"}
    assert len(connector.attempts) == 1
    assert await connector.link() == "link 2"


async def test_connect_is_repeated_for_callers_with_more_time() -> None:
    """If the first caller has less time than the others, one of them connects again for all."""
    connector = Connector(0.01)
    first, *others = await asyncio.gather(
        connector.link(1), *(connector.link(60) for _ in range(9)), return_exceptions=True
    )
    assert isinstance(first, EngineUnavailable)
    assert others == ["link 2"] * 9
    assert connector.attempts[0] <= 1 < connector.attempts[1]


async def test_caller_with_a_short_timeout_does_not_wait_for_the_shared_connect() -> None:
    """A caller whose time is over does not wait for another caller's connect, which continues."""
    connector = Connector(5)
    first = asyncio.create_task(connector.link())
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match=r"cannot reach the server within 0\.05 s"):
        await connector.link(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await connector.link() == "link 2", "the cancelled one left the others waiting"


@pytest.mark.parametrize("scheme", ["redis", "etcd", "zookeeper", "mysql", "postgresql"])
async def test_closed_port_says_what_to_check(scheme: str) -> None:
    """The error for a closed port says what to look at, in both APIs."""
    url = f"{scheme}://127.0.0.1:1{'/db' if scheme in ('mysql', 'postgresql') else ''}"
    expected = r"(?i)is the server running"
    with fencelock.connect(url) as locks, pytest.raises(EngineUnavailable, match=expected) as blocking:
        await asyncio.to_thread(locks.lock("x", timeout=0).acquire)
    async with aio.connect(url) as aio_locks:
        with pytest.raises(EngineUnavailable, match=expected) as caught:
            await aio_locks.lock("x", timeout=0).acquire()
    assert ".;" not in f"{caught.value} {blocking.value}"


def test_unknown_host_gets_the_same_hint() -> None:
    """The error for an unknown host has the same hint; the error of a server that replied has none."""
    for words in ("[Errno -2] Name or service not known", "[Errno -3] Temporary failure in name resolution"):
        assert unreachable_hint(words) == "; is the server running there? Check host and port in the URL"
    for words in ("Is the server running on that host? Connection refused", "WRONGPASS", "[Errno 104] reset by peer"):
        assert unreachable_hint(words) == ""
