"""The contestants on etcd: each package's lock, made from a URL, and bare gRPC with the same requests.

All have a time to live of 30 seconds, as ours has, and otherwise their defaults. python-etcd3 is missing: its generated
code does not load with the maintained versions of protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from typing import Any

from bench.harness import Run
from fencelock.engines.etcd import messages as m
from tests.servers import Etcd

TTL = 30
LEASE = 12345
PAUSE = 0.005
"""Seconds between two attempts on etcd3gw's lock."""


def ours(url: str) -> AbstractContextManager[Any]:
    import fencelock

    return fencelock.connect(url).lock("fencelock")


def etcd3gw(url: str) -> AbstractContextManager[Any]:
    import etcd3gw

    host, _, port = url.removeprefix("etcd://").partition(":")
    lock: AbstractContextManager[Any] = etcd3gw.client(host=host, port=int(port)).lock("etcd3gw", ttl=TTL)
    return lock


class Insistent:
    """etcd3gw's lock with repeated attempts: its own `with` block runs even if another process holds the lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        while not self._lock.acquire():
            time.sleep(PAUSE)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def etcd3gw_insistent(url: str) -> AbstractContextManager[Any]:
    return Insistent(etcd3gw(url))


def tooz(url: str) -> AbstractContextManager[Any]:
    from tooz.coordination import get_coordinator

    coordinator = get_coordinator(f"etcd3+http://{url.removeprefix('etcd://')}", b"bench", lock_timeout=str(TTL))
    coordinator.start()
    return coordinator.get_lock(b"tooz")


def _pair() -> tuple[bytes, bytes]:
    """Return the two requests that fencelock sends for a pair: create if absent and read the queue; delete."""
    prefix = b"/bare/claims/x/"
    key = prefix + b"0" * 32
    compares = [m.is_absent(key), m.is_absent(b"/bare/tombs/" + b"0" * 32), m.is_absent(b"/bare/about")]
    queue = m.get_prefix(prefix, order=m.DESCENDING, limit=2, keys_only=True)
    then = [m.do_put(key, b"x somebody:123", LEASE), m.do_range(queue)]
    return m.txn(compares, then, [m.do_range(m.get_key(key))]), m.get_key(key)


def bare(server: Etcd) -> Run:
    """Return a transaction and a deletion over grpcio, with raw bytes, so that no protobuf library takes part."""
    import grpc

    channel = grpc.insecure_channel(server.address)
    method_of: Callable[..., Any] = channel.unary_unary
    txn, delete, grant = (method_of(method, None, None) for method in (m.TXN, m.DELETE, m.GRANT))
    _once(lambda: grant(m.grant_lease(LEASE, 3600)))
    acquire, release = _pair()

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            if not m.read_txn(txn(acquire)).succeeded:
                raise RuntimeError("the bare lock is taken")
            delete(release)

    return run


def _once(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        if "already exists" not in str(error):
            raise


class Aio:
    """The contestants for asyncio, on one event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._open = AsyncExitStack()

    def ours(self, url: str) -> AbstractAsyncContextManager[Any]:
        import fencelock.aio

        async def make() -> AbstractAsyncContextManager[Any]:
            locks = await self._open.enter_async_context(fencelock.aio.connect(url))
            return locks.lock("fencelock-aio")

        return self.loop.run_until_complete(make())

    def bare(self, server: Etcd) -> Run:
        import grpc.aio

        async def make() -> tuple[Any, Any]:
            channel = await self._open.enter_async_context(grpc.aio.insecure_channel(server.address))
            return channel.unary_unary(m.TXN, None, None), channel.unary_unary(m.DELETE, None, None)

        txn, delete = self.loop.run_until_complete(make())
        acquire, release = _pair()

        async def pairs(repetitions: int) -> None:
            for _ in range(repetitions):
                if not m.read_txn(await txn(acquire)).succeeded:
                    raise RuntimeError("the bare lock is taken")
                await delete(release)

        return lambda repetitions: self.loop.run_until_complete(pairs(repetitions))

    def close(self) -> None:
        self.loop.run_until_complete(self._open.aclose())
        self.loop.close()
