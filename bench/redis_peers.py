"""The contestants on Redis: each package's lock, made from a URL, and the bare scripts on connections that stay open.

All have a time to live of 30 seconds, as ours has, and otherwise their defaults. Each function imports its own package, so
that a worker process loads only the one that it measures.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.harness import Run
from tests.servers import Redis

TTL = 30
# The server writes nothing to disk: the benchmark measures the locks, not the disk.
SETTINGS = {"appendonly": "no"}
ACQUIRE, RELEASE = (Path(__file__).with_name(f"bare_{what}.lua").read_text() for what in ("acquire", "release"))
ID = "0" * 32


def ours(url: str) -> AbstractContextManager[Any]:
    import fencelock

    return fencelock.connect(url).lock("fencelock")


def redis_py(url: str) -> AbstractContextManager[Any]:
    import redis

    lock: AbstractContextManager[Any] = redis.Redis.from_url(url).lock("redis-py", timeout=TTL)
    return lock


def python_redis_lock(url: str) -> AbstractContextManager[Any]:
    import redis
    import redis_lock

    lock: AbstractContextManager[Any] = redis_lock.Lock(redis.Redis.from_url(url), "python-redis-lock", expire=TTL)
    return lock


def pottery(*urls: str) -> AbstractContextManager[Any]:
    import redis
    from pottery import Redlock

    masters = {redis.Redis.from_url(url) for url in urls}
    return Redlock(key=f"pottery-{len(urls)}", masters=masters, auto_release_time=TTL)


def tooz(url: str) -> AbstractContextManager[Any]:
    from tooz.coordination import get_coordinator

    coordinator = get_coordinator(f"{url}?lock_timeout={TTL}", b"bench")
    coordinator.start()
    return coordinator.get_lock(b"tooz")


def bare(*nodes: Redis) -> Run:
    """Return a run of the bare scripts: it sends each to all nodes, then reads all replies."""
    import redis

    connection_class: Any = redis.Connection  # its signatures have no types
    connections = [connection_class(host=node.host, port=node.port) for node in nodes]
    acquire = release = b""
    for connection in connections:
        acquire, release = (request(connection, "SCRIPT", "LOAD", script) for script in (ACQUIRE, RELEASE))

    def run(repetitions: int) -> None:
        for _ in range(repetitions):
            for connection in connections:
                connection.send_command("EVALSHA", acquire, 2, "bare", "bare-counter", ID, TTL * 1000)
            for connection in connections:
                if not connection.read_response():
                    raise RuntimeError("the bare lock is taken")
            for connection in connections:
                connection.send_command("EVALSHA", release, 1, "bare", ID)
            for connection in connections:
                connection.read_response()

    return run


def request(connection: Any, *command: str | int) -> Any:
    connection.send_command(*command)
    return connection.read_response()


class BareList:
    """The fewest commands of a first come, first served lock: BLPOP takes the one element of a list, RPUSH returns it.

    If a holder dies, the lock is lost for ever.
    """

    def __init__(self, url: str) -> None:
        import redis

        kwargs = redis.Redis.from_url(url).connection_pool.connection_kwargs
        connection_class: Any = redis.Connection
        self._connection = connection_class(host=kwargs["host"], port=kwargs["port"], socket_timeout=None)
        if request(self._connection, "SET", "bare-list-made", 1, "NX"):
            request(self._connection, "RPUSH", "bare-list", 1)

    def __enter__(self) -> None:
        request(self._connection, "BLPOP", "bare-list", 0)

    def __exit__(self, *_: object) -> None:
        request(self._connection, "RPUSH", "bare-list", 1)


class Bare:
    """fencelock's own scripts over a raw socket: the difference to fencelock is the library's cost. It ignores errors."""

    def __init__(self, url: str) -> None:
        from fencelock.engines.redis.engine import ATTEMPT, RELEASE
        from fencelock.engines.redis.scripts import packed

        self._sock = bare_socket(url)
        self._channel = f"bare/{os.urandom(12).hex()}"
        commands: list[tuple[str | int, ...]] = [("HELLO", 3), ("SUBSCRIBE", self._channel)]
        commands += [("SCRIPT", "LOAD", script.text) for script in (ATTEMPT, RELEASE)]
        for command in commands:
            self._sock.sendall(b"*%d\r\n%b" % (len(command), packed(*command)))
            self._sock.recv(65536)
        keys = ("bare:{0}",)
        self._attempt = ATTEMPT.call(keys, ("bare", TTL * 1000, "x", "bench", ID, f"{self._channel}:1"))
        self._release = RELEASE.call(keys, ("bare", ID))
        self._id = ID.encode()

    def __enter__(self) -> None:
        self._id = os.urandom(16).hex().encode()
        self._sock.sendall(self._attempt.replace(ID.encode(), self._id))
        reply = self._sock.recv(4096)
        if reply.startswith(b":-") and b">" not in reply:
            self._sock.recv(4096)  # the wake-up, when the lock is handed over

    def __exit__(self, *_: object) -> None:
        self._sock.sendall(self._release.replace(ID.encode(), self._id))
        self._sock.recv(4096)


def bare_socket(url: str) -> socket.socket:
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "", parts.port or 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def pings(url: str) -> Run:
    """Return a run of two PINGs: the round trips of a pair, without the work of a lock."""
    sock = bare_socket(url)

    def run(repetitions: int) -> None:
        for _ in range(2 * repetitions):
            sock.sendall(b"*1\r\n$4\r\nPING\r\n")
            sock.recv(4096)

    return run


class Aio:
    """The contestants for asyncio, on one event loop; `close` closes them and the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()

    def close(self) -> None:
        self.loop.run_until_complete(self._stack.aclose())
        self.loop.close()

    def ours(self, url: str) -> AbstractAsyncContextManager[Any]:
        from fencelock import aio

        locks = aio.connect(url)
        self._stack.push_async_callback(locks.close)
        return locks.lock("fencelock-aio")

    def client(self, url: str, **options: Any) -> Any:
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(url, **options)
        self._stack.push_async_callback(client.aclose)
        return client

    def redis_py(self, url: str) -> AbstractAsyncContextManager[Any]:
        lock: AbstractAsyncContextManager[Any] = self.client(url).lock("redis-py-aio", timeout=TTL)
        return lock

    def pottery(self, *urls: str) -> AbstractAsyncContextManager[Any]:
        from pottery import AIORedlock

        masters = {self.client(url) for url in urls}
        return AIORedlock(key=f"pottery-aio-{len(urls)}", masters=masters, auto_release_time=TTL)

    def bare(self, *nodes: Redis) -> Run:
        connections, shas = self.loop.run_until_complete(self._connect(nodes))
        acquire, release = shas

        async def pairs(repetitions: int) -> None:
            for _ in range(repetitions):
                for connection in connections:
                    await connection.send_command("EVALSHA", acquire, 2, "bare-aio", "bare-aio-counter", ID, TTL * 1000)
                for connection in connections:
                    if not await connection.read_response():
                        raise RuntimeError("the bare lock is taken")
                for connection in connections:
                    await connection.send_command("EVALSHA", release, 1, "bare-aio", ID)
                for connection in connections:
                    await connection.read_response()

        return lambda repetitions: self.loop.run_until_complete(pairs(repetitions))

    async def _connect(self, nodes: Sequence[Redis]) -> tuple[list[Any], list[bytes]]:
        import redis.asyncio

        connections: list[Any] = []
        shas: list[bytes] = []
        for node in nodes:
            connection: Any = redis.asyncio.Connection(host=node.host, port=node.port)
            self._stack.push_async_callback(connection.disconnect)
            connections.append(connection)
            shas = []
            for script in (ACQUIRE, RELEASE):
                await connection.send_command("SCRIPT", "LOAD", script)
                shas.append(await connection.read_response())
        return connections, shas
