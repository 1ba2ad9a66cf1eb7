"""What the tests of engines with servers share: both runtimes, and clients that are closed at the end of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from fencelock.runtime.blocking import run_sync
from tests.contract.factory import MakeClient
from tests.contract.runtimes import RUNTIMES, LocksView
from tests.engines.redis_server import connections, tell
from tests.servers.redis import Redis, RedisTls
from tests.support.waiting import eventually_blocking

R = TypeVar("R", bound=Redis)
T = TypeVar("T")


class Clients:
    """Makes clients of one runtime for any URL, and closes them at the end of the test."""

    def __init__(self, runtime_name: str) -> None:
        self.runtime_name = runtime_name
        self._factories: list[MakeClient] = []

    def on(self, url: str) -> MakeClient:
        """Return a factory for clients, engines and workers of this URL."""
        self._factories.append(MakeClient(url, self.runtime_name))
        return self._factories[-1]

    def connect(self, url: str, **options: Any) -> LocksView:
        """Return a client."""
        return self.on(url).connect(**options)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of an engine: a blocking one in a thread, so that the event loop of the test goes on."""
        return await (work if self.runtime_name == "aio" else asyncio.to_thread(run_sync, work))

    async def finish(self) -> None:
        """Close all clients."""
        for factory in self._factories:
            await factory.finish()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test in both runtimes, or in the one that its mark names."""
    if "runtime_name" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("runtime_name")
        metafunc.parametrize("runtime_name", mark.args if mark else RUNTIMES)


def _swept(server: R) -> R:
    """Return a server that earlier tests used, empty and without connections."""
    eventually_blocking(lambda: not connections(server), "the connections of earlier tests are closed")
    tell(server, "FLUSHALL")
    tell(server, "CONFIG", "RESETSTAT")
    return server


@pytest.fixture
def server(redis_node: Redis) -> Redis:
    """The Redis that all tests share."""
    return _swept(redis_node)


@pytest.fixture(scope="session")
def shared_tls(redis_node: Redis) -> Iterator[RedisTls]:
    """A Redis with TLS, for all tests of this folder."""
    with RedisTls() as server:
        yield server


@pytest.fixture
def redis_tls(shared_tls: RedisTls) -> RedisTls:
    """The Redis with TLS."""
    return _swept(shared_tls)


@pytest.fixture
def clients(runtime_name: str) -> Clients:
    """Clients of either runtime."""
    return Clients(runtime_name)
