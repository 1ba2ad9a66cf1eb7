"""The runtime's connection against a real Redis: every reply goes to its own request, also after others timed out."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from fencelock import aio
from fencelock.core.clock import boottime
from fencelock.core.runtime import NO_REPLY, Connection, Runtime
from fencelock.engines.redis.connector import RedisConnector, from_url
from fencelock.errors import OutcomeUnknown
from fencelock.runtime.asyncio import AsyncioRuntime
from fencelock.runtime.blocking import BlockingRuntime, run_sync
from tests.servers.proxy import Proxy
from tests.servers.redis import Redis, RedisTls
from tests.support.waiting import SOON

PUBLISH_TWICE = "redis.call('PUBLISH', KEYS[1], ARGV[1]) redis.call('PUBLISH', KEYS[1], ARGV[2]) return ARGV[3]"


class Ends:
    """Connections of one runtime, closed at the end of the test."""

    def __init__(self, runtime_name: str) -> None:
        self.runtime: Runtime = AsyncioRuntime() if runtime_name == "aio" else BlockingRuntime()
        self.pushes: list[Any] = []
        self.ended = 0
        self._connections: list[Connection] = []

    async def connection(self, connector: Any) -> Connection:
        """Connect."""
        self._connections.append(await self.runtime.connect(connector, self._on_push, self._end))
        return self._connections[-1]

    def _on_push(self, push: Any) -> bool:
        if push[0] == b"subscribe":
            return True
        self.pushes.append(push)
        return False

    def _end(self) -> None:
        self.ended += 1

    async def finish(self) -> None:
        """Close all."""
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)


@pytest.fixture
def ends(runtime_name: str) -> Ends:
    """Connections of either runtime."""
    return Ends(runtime_name)


@pytest.fixture(params=["plain", "tls"])
def url(request: pytest.FixtureRequest, server: Redis, redis_tls: RedisTls) -> str:
    """The URL of a server, with and without TLS."""
    return server.url if request.param == "plain" else redis_tls.tls_url


def _never() -> NoReturn:
    raise AssertionError("this test does not connect")


class Scripted(RedisConnector):
    """Connects to a fake server whose bytes the test sends."""

    def __init__(self) -> None:
        super().__init__("scripted", _never, _never)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.ours = socket.create_connection(server.getsockname())
            self.theirs = server.accept()[0]
        self.theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self, reach: object = None) -> socket.socket:
        return self.ours

    async def aconnect(self, reach: object = None) -> tuple[Any, object]:
        return await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=self.ours)


PUSH = b">3\r\n$7\r\nmessage\r\n$4\r\nhere\r\n$10\r\n0123456789\r\n"


@pytest.mark.parametrize("cut", [1, 5, 13])
@pytest.mark.parametrize("with_answer", [True, False])
async def test_push_in_two_parts(ends: Ends, cut: int, with_answer: bool) -> None:
    """A push whose last bytes arrive later is received."""
    connector = Scripted()
    event = ends.runtime.event()
    ends.pushes = _SetsEvent(event)
    connection = await ends.connection(connector)
    connector.theirs.sendall(b":-2\r\n" + (PUSH[:-cut] if with_answer else b""))
    assert await connection.request(("PING",), SOON) == -2
    if not with_answer:
        connector.theirs.sendall(PUSH[:-cut])
        assert not await ends.runtime.wait_for_push([connection], event, 0.02)
    connector.theirs.sendall(PUSH[-cut:])
    assert await ends.runtime.wait_for_push([connection], event, SOON)
    assert [push[2] for push in ends.pushes] == [b"0123456789"]
    connector.theirs.close()


async def test_timeout_under_signals(ends: Ends) -> None:
    """A timeout ends on time, however often signals interrupt the caller."""
    connector = Scripted()
    connection = await ends.connection(connector)
    over = threading.Event()
    waiter = threading.get_ident()

    def send_signals() -> None:
        for _ in range(300):
            signal.pthread_kill(waiter, signal.SIGUSR1)
            if over.wait(0.02):
                break

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=send_signals)
    begun = boottime()
    thread.start()
    try:
        with pytest.raises(OutcomeUnknown, match="no answer within"):
            await connection.request(("PING",), 0.2)
        assert boottime() - begun < 4
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        connector.theirs.close()


def test_timeout_under_a_timer() -> None:
    """A timeout ends on time, also if a profiler's timer sends a signal every millisecond."""
    connector = Scripted()
    connection = run_sync(BlockingRuntime().connect(connector, print, print))
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    begun = boottime()
    # If the request hangs, the end of the connection ends it with another error.
    cut = threading.Timer(10, connector.theirs.close)
    cut.start()
    try:
        with pytest.raises(OutcomeUnknown, match="no answer within"):
            run_sync(connection.request(("PING",), 0.2))
        assert boottime() - begun < 4
    finally:
        cut.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        connection.close()
        connector.theirs.close()


def test_server_that_reads_late() -> None:
    """A command that does not fit into the buffers waits until the server reads again, and then arrives complete."""
    connector = Scripted()
    connection = run_sync(BlockingRuntime().connect(connector, print, print))
    blob = "x" * 30_000_000  # more than the buffers of both ends
    got = bytearray()

    def read_late() -> None:
        time.sleep(0.3)
        while len(got) < len(blob):
            got.extend(connector.theirs.recv(1_000_000))
        connector.theirs.sendall(b"+read\r\n")

    thread = threading.Thread(target=read_late)
    thread.start()
    try:
        assert run_sync(connection.request(("ECHO", blob), SOON)) == b"read"
        assert bytes(got).endswith(blob.encode() + b"\r\n")
    finally:
        thread.join()
        connection.close()
        connector.theirs.close()


def test_server_that_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed if the server stops reading: after a part of a command, nothing else may be sent."""
    monkeypatch.setattr("fencelock.runtime.socket_connection.SEND_SECONDS", 0.2)
    connector = Scripted()
    connection = run_sync(BlockingRuntime().connect(connector, print, print))
    with pytest.raises(OutcomeUnknown, match="the connection broke"):
        run_sync(connection.request(("ECHO", "x" * 30_000_000), SOON))
    assert not connection.open
    with pytest.raises(OutcomeUnknown, match="the connection broke"):
        run_sync(connection.request(("PING",), SOON))
    connector.theirs.close()


async def test_pushes_together_with_replies(url: str, ends: Ends) -> None:
    """A push in the same packet as a reply is received, and never taken for the reply."""
    connection = await ends.connection(from_url(url))
    await connection.request(("SUBSCRIBE", "here"), SOON)
    for i in range(200):
        asked = ("EVAL", PUBLISH_TWICE, 1, "here", f"a{i}", f"b{i}", f"answer{i}")
        assert await connection.request(asked, SOON) == b"answer%d" % i
    await connection.request(("PING",), SOON)
    assert [push[2] for push in ends.pushes] == [word for i in range(200) for word in (b"a%d" % i, b"b%d" % i)]


async def test_push_wakes_a_waiter(url: str, ends: Ends) -> None:
    """A push from another connection wakes a waiter, and so does the end of its connection."""
    connection, other = await ends.connection(from_url(url)), await ends.connection(from_url(url))
    event = ends.runtime.event()
    ends.pushes = _SetsEvent(event)
    connection = await ends.connection(from_url(url))
    await connection.request(("SUBSCRIBE", "here"), SOON)
    assert not await ends.runtime.wait_for_push([connection], event, 0.02)
    assert await other.request(("PUBLISH", "here", "x" * 100_000), SOON) == 1
    assert await ends.runtime.wait_for_push([connection], event, SOON)
    assert len(ends.pushes[0][2]) == 100_000
    event.clear()
    await other.request(("CLIENT", "KILL", "TYPE", "pubsub"), SOON)
    await ends.runtime.wait_for_push([connection], event, SOON)
    await asyncio.sleep(0.01)
    assert not connection.alive()
    assert not connection.open


class _SetsEvent(list[Any]):
    """A list of pushes that sets an event for each new one."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self._event = event

    def append(self, push: Any) -> None:
        super().append(push)
        self._event.set()


async def test_large_replies(url: str, ends: Ends) -> None:
    """Replies and commands that are larger than any buffer arrive complete."""
    connection = await ends.connection(from_url(url))
    for size in (1, 65_535, 65_536, 65_537, 3_000_000):
        assert await connection.request(("ECHO", "ä" * size), SOON) == b"\xc3\xa4" * size
    asked = [(connection, ("ECHO", f"{i}" * 10_000)) for i in range(100)]
    answers = await ends.runtime.request_all(asked, SOON, lambda answers: NO_REPLY not in answers)
    assert answers == [f"{i}".encode() * 10_000 for i in range(100)]


async def test_late_replies_are_skipped(server: Redis, proxy: Callable[..., Proxy], ends: Ends) -> None:
    """A reply that arrives after its request timed out is skipped; the next request gets its own reply."""
    between = proxy(server)
    connection = await ends.connection(from_url(between.url))
    between.delay(0.05, "to_client")
    for i in range(5):
        with pytest.raises(OutcomeUnknown, match="no answer within"):
            await connection.request(("ECHO", f"late{i}"), 0.001)
        assert connection.oldest_pending_since is not None
        assert await connection.request(("ECHO", f"good{i}"), SOON) == b"good%d" % i
        assert connection.oldest_pending_since is None
    missed = await ends.runtime.request_all(
        [(connection, ("ECHO", f"fan{i}")) for i in range(3)], 0.001, lambda answers: False
    )
    assert missed == [NO_REPLY] * 3
    assert await connection.request(("ECHO", "after"), SOON) == b"after"
    assert connection.open


@pytest.mark.parametrize("seed", range(4))
async def test_random_timeouts(server: Redis, proxy: Callable[..., Proxy], ends: Ends, seed: int) -> None:
    """Callers with different timeouts each get the reply to their own request or none, never another's."""
    between = proxy(server)
    rng = random.Random(seed)
    connection = await ends.connection(from_url(between.url))
    between.delay(0.002, "to_client")
    right = 0
    for i in range(150):
        try:
            assert (
                await connection.request(("ECHO", f"{i}"), rng.choice([0.0005, 0.001, 0.002, 0.003, 0.01])) == b"%d" % i
            )
            right += 1
        except OutcomeUnknown:
            pass
    assert await connection.request(("ECHO", "end"), SOON) == b"end"
    assert connection.open
    assert right


@pytest.mark.parametrize("seed", range(4))
async def test_random_cancellations(server: Redis, proxy: Callable[..., Proxy], seed: int) -> None:
    """A hundred tasks share a connection and are cancelled at random: none ever gets the reply to another's request."""
    between = proxy(server)
    rng = random.Random(seed)
    async with aio.connect(between.url) as locks:
        leases = await asyncio.gather(*(locks.lock(f"n{i}", ttl=60).acquire() for i in range(100)))
        between.delay(0.001, "to_client")
        answered = 0

        async def look(i: int) -> None:
            nonlocal answered
            while True:
                seen = await locks.inspect(f"n{i}")
                assert [holder.token for holder in seen.holders] == [leases[i].token]
                answered += 1

        async def cancel_repeatedly(i: int) -> None:
            for _ in range(10):
                task = asyncio.ensure_future(look(i))
                await asyncio.sleep(rng.uniform(0, 0.03))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        await asyncio.gather(*(cancel_repeatedly(i) for i in range(100)))
        assert answered > 0
        between.heal()
        for lease in leases:
            assert await lease.release()


@pytest.mark.parametrize("seed", range(3))
async def test_cancelled_while_connecting(server: Redis, proxy: Callable[..., Proxy], seed: int) -> None:
    """A task that is cancelled while it opens the first connection does not disturb others that wait for that connection."""
    between = proxy(server)
    rng = random.Random(seed)
    between.delay(0.002)
    for _ in range(15):
        async with aio.connect(between.url) as locks:
            tasks = [asyncio.ensure_future(locks.inspect("x")) for _ in range(5)]
            for task in tasks[:4]:
                await asyncio.sleep(rng.uniform(0, 0.006))
                task.cancel()
            assert (await tasks[4]).holders == ()
            await asyncio.wait(tasks)


async def test_cancellation_that_a_driver_swallows() -> None:
    """A task that is cancelled while a driver connects gets CancelledError, even if the driver suppresses it."""
    begun = asyncio.Event()

    class IgnoresCancel(Scripted):
        async def aconnect(self, reach: object = None) -> tuple[Any, object]:
            begun.set()
            with suppress(
                asyncio.CancelledError
            ):  # as `asyncio.wait_for` did before Python 3.12 if its result was there
                await asyncio.sleep(60)
            return await super().aconnect(reach)

    connector = IgnoresCancel()
    runtime = AsyncioRuntime()
    connecting = asyncio.ensure_future(runtime.connect(connector, print, print))
    await begun.wait()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert await asyncio.to_thread(connector.theirs.recv, 1) == b""
    connector.theirs.close()


async def test_garbage(ends: Ends) -> None:
    """Bytes that are no Redis reply end the connection: the caller gets OutcomeUnknown, not the parser's error."""
    ours, theirs = socket.socketpair()

    class Garbled(RedisConnector):
        def __init__(self) -> None:
            super().__init__("garbled", _never, _never)

        def connect(self, reach: object = None) -> socket.socket:
            return ours

        async def aconnect(self, reach: object = None) -> tuple[Any, object]:
            return await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)

    connection = await ends.connection(Garbled())
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(OutcomeUnknown):
        await connection.request(("PING",), SOON)
    assert not connection.open
    assert ends.ended == 1
    with pytest.raises(OutcomeUnknown):
        await connection.request(("PING",), SOON)
    theirs.close()
