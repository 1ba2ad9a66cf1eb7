"""Socket connections at the edges: ends within a reply, interrupts, and reused descriptors."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from fencelock.core.clock import boottime
from fencelock.core.runtime import NO_REPLY, Endpoint
from fencelock.engines.redis.connector import from_url
from fencelock.runtime.socket_connection import SocketConnection
from fencelock.runtime.socket_poll import request_all
from fencelock.runtime.socket_stream import CHUNK
from tests.interrupts import interrupted_at
from tests.servers.redis import Redis
from tests.support.waiting import SOON

RESET = struct.pack("ii", 1, 0)
MANY_STEPS = 200


class Plain:
    """Opens connections to a server without a handshake."""

    def __init__(self, port: int) -> None:
        redis = from_url(f"redis://127.0.0.1:{port}")
        self.address, self.parser, self.pack, self.pushes = redis.address, redis.parser, redis.pack, redis.pushes
        self._port = port

    def connect(self, reach: Callable[[Endpoint], socket.socket]) -> socket.socket:
        return reach(Endpoint("127.0.0.1", self._port, seconds=SOON))


@pytest.fixture
def made() -> Iterator[ExitStack]:
    """Whatever has to be closed in the end."""
    with ExitStack() as stack:
        yield stack


def connect_to(port: int, made: ExitStack) -> SocketConnection:
    connector: Any = Plain(port)
    connection = SocketConnection(connector, lambda _: True, lambda: None)
    made.callback(connection.close)
    return connection


def listener(made: ExitStack) -> socket.socket:
    return made.enter_context(socket.create_server(("127.0.0.1", 0)))


@pytest.mark.parametrize("size", [100, 5000, CHUNK])
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_answer_before_the_end(made: ExitStack, size: int, how: str) -> None:
    """An answer counts, whatever its size, though the server has hung up when it is read."""
    server = listener(made)
    connection = connect_to(server.getsockname()[1], made)
    peer, _ = server.accept()
    words = b"x" * (size - len(b"$%d\r\n\r\n" % size) + (size == 100))
    answers: list[Any] = [NO_REPLY]
    assert connection.post(b"*1\r\n$4\r\nPING\r\n", answers, 0)
    assert peer.recv(100)
    answer = b"$%d\r\n%b\r\n" % (len(words), words)
    assert len(answer) == size
    peer.sendall(answer)
    if how == "reset":
        time.sleep(0.05)  # a reset takes along what has not arrived
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    peer.close()
    time.sleep(0.05)
    connection.read_once()
    assert answers == [words]
    assert not connection.alive()


def test_request_interrupted_while_it_is_sent(server: Redis, made: ExitStack) -> None:
    """A connection that was interrupted while it sent gets its reply later or is closed, and never waits for more."""
    pack, begun = from_url(server.url).pack, time.monotonic()
    for step in range(1, MANY_STEPS):
        connection = connect_to(server.port, made)
        interrupted = interrupted_at(
            step,
            (SocketConnection.post, SocketConnection._use, SocketConnection._post),
            partial(connection.post, pack(("PING",)), [NO_REPLY], 0),
        )
        if connection.open:
            assert request_all([(connection, ("ECHO", "after"))], SOON, lambda answers: NO_REPLY not in answers) == [
                b"after"
            ]
        connection.close()
        assert connection.fileno() == -1
        if not interrupted:
            break
    assert 3 < step < MANY_STEPS - 1
    assert time.monotonic() - begun < SOON


def test_descriptor_that_is_anothers(made: ExitStack) -> None:
    """A request on a connection that another thread closes fails at once, although its descriptor number is reused."""
    for _ in range(10):
        server = listener(made)
        connections = [connect_to(server.getsockname()[1], made) for _ in range(5)]
        quiet: list[socket.socket] = []

        def close(connections: list[SocketConnection] = connections, quiet: list[socket.socket] = quiet) -> None:
            time.sleep(0.01)
            for connection in connections:
                connection.close()
                quiet.extend(socket.socketpair())

        closer = threading.Thread(target=close)
        closer.start()
        begun = time.monotonic()
        assert request_all([(connection, b"x") for connection in connections], SOON, lambda _: False) == [NO_REPLY] * 5
        took = time.monotonic() - begun
        closer.join()
        for sock in quiet:
            sock.close()
        assert took < SOON / 2
        assert all(connection.fileno() == -1 for connection in connections)


@pytest.mark.parametrize("reader_leaves_first", [True, False])
def test_used_by_two_at_once(made: ExitStack, monkeypatch: pytest.MonkeyPatch, reader_leaves_first: bool) -> None:
    """A thread sends while another reads, in either order; closing the connection closes its descriptor."""
    server = listener(made)
    connection = connect_to(server.getsockname()[1], made)
    peer = made.enter_context(server.accept()[0])
    send = SocketConnection._send_all

    answers: list[Any] = [NO_REPLY]
    connection.pending.append((0.0, answers, 0))
    reader = threading.Thread(
        target=connection.read_until, args=(lambda: answers[0] is not NO_REPLY, boottime() + SOON)
    )

    def send_slowly(self: SocketConnection, data: bytes | memoryview) -> None:
        if reader_leaves_first:
            peer.sendall(b"+OK\r\n")
            reader.join(SOON)
        else:
            reader.start()
            time.sleep(0.05)  # until it waits
        send(self, data)

    if reader_leaves_first:
        reader.start()
        time.sleep(0.05)
    monkeypatch.setattr(SocketConnection, "_send_all", send_slowly)
    connection.send(b"x")
    peer.sendall(b"+OK\r\n")
    reader.join(SOON)
    assert connection.open
    connection.close()
    assert connection.fileno() == -1
