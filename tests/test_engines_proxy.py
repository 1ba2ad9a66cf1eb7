"""The proxy: a network that delays, drops, cuts, refuses and heals, with real bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.servers import EtcdCluster, MariaDB, Postgres, Proxies, Proxy, Redis
from tests.servers.waiting import eventually

Own = Callable[..., Any]


@contextmanager
def connected(proxy: Proxy, timeout: float = 30.0) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout) as wire:
        wire.settimeout(timeout)
        yield wire


def ping(wire: socket.socket) -> float:
    """Ask Redis, and tell how long the answer took."""
    began = time.monotonic()
    wire.sendall(b"PING\r\n")
    assert wire.recv(100) == b"+PONG\r\n"
    return time.monotonic() - began


def quickest(wire: socket.socket) -> float:
    """Ask three times, as a busy machine may hold up one of them."""
    return min(ping(wire) for _ in range(3))


def silent(wire: socket.socket, seconds: float = 0.3) -> bool:
    wire.settimeout(seconds)
    try:
        wire.recv(100)
    except TimeoutError:
        return True
    else:
        return False
    finally:
        wire.settimeout(30.0)


@pytest.fixture
def through(redis_node: Redis, proxy: Callable[[Redis], Proxy]) -> Proxy:
    """A proxy in front of the shared Redis."""
    return proxy(redis_node)


def test_forwards_and_counts(through: Proxy, redis_node: Redis) -> None:
    """A whole network forwards every byte, and the URL differs in nothing but the port."""
    with connected(through) as wire:
        ping(wire)
        stats = through.stats()
    assert (stats.accepted, stats.open) == (1, 1)
    assert (stats.to_server.forwarded, stats.to_client.forwarded) == (6, 7)
    assert through.url == redis_node.url.replace(str(redis_node.port), str(through.port))
    assert eventually(lambda: through.stats().open == 0)


@pytest.mark.parametrize(("direction", "expected"), [("to_server", 0.5), ("to_client", 0.5), ("both", 1.0)])
def test_delays_each_direction(through: Proxy, direction: Any, expected: float) -> None:
    """Bytes arrive as much later as they should, each direction by itself, and not once it is healed."""
    with connected(through) as wire:
        ping(wire)
        through.delay(0.5, direction)
        assert expected <= quickest(wire) < expected + 0.4
        through.heal()
        assert quickest(wire) < 0.4


def test_delayed_bytes_do_not_wait_for_each_other(through: Proxy) -> None:
    """Ten requests sent at once through a slow network take one delay, and come in order."""
    through.delay(0.5, "to_client")
    with connected(through) as wire, wire.makefile("rb") as replies:
        began = time.monotonic()
        for number in range(10):
            wire.sendall(b"ECHO %d\r\n" % number)
            time.sleep(0.005)
        answers = [replies.readline() + replies.readline() for _ in range(10)]
        assert answers == [b"$1\r\n%d\r\n" % number for number in range(10)]
        assert 0.5 <= time.monotonic() - began < 4.5


def test_cut_to_the_server_holds_requests_back(through: Proxy, redis_node: Redis) -> None:
    """A request sent into a cut network has no effect until the network is healed, and then it has."""
    redis_node.command("DEL", "cut")
    with connected(through) as wire:
        ping(wire)
        through.cut("to_server")
        wire.sendall(b"SET cut yes\r\n")
        assert silent(wire)
        assert redis_node.command("GET", "cut") == b"$-1"
        assert through.stats().to_server.held == 13
        through.heal()
        assert wire.recv(100) == b"+OK\r\n"
    assert redis_node.command("GET", "cut") == b"yes"


def test_cut_to_the_client_holds_answers_back(through: Proxy, redis_node: Redis) -> None:
    """When only answers are cut the request takes effect, and its answer comes after healing."""
    redis_node.command("DEL", "cut")
    with connected(through) as wire:
        ping(wire)
        through.cut("to_client")
        wire.sendall(b"SET cut yes\r\n")
        assert eventually(lambda: redis_node.command("GET", "cut") == b"yes")
        assert silent(wire)
        through.heal()
        assert wire.recv(100) == b"+OK\r\n"


def test_dropped_answer_is_lost_for_good(through: Proxy, redis_node: Redis) -> None:
    """When answers are dropped the request takes effect, nobody hears of it, and healing resets the connection."""
    redis_node.command("DEL", "dropped")
    with connected(through) as wire:
        ping(wire)
        through.drop("to_client")
        wire.sendall(b"SET dropped yes\r\n")
        assert eventually(lambda: through.stats().to_client.swallowed == 5)
        assert redis_node.command("GET", "dropped") == b"yes"
        assert silent(wire)
        through.heal()
        with pytest.raises(ConnectionResetError):
            wire.recv(100)
    with connected(through) as wire:
        ping(wire)


def test_dropped_request_never_arrives(through: Proxy, redis_node: Redis) -> None:
    """When requests are dropped they have no effect, not even after healing."""
    redis_node.command("DEL", "dropped")
    with connected(through) as wire:
        ping(wire)
        through.drop("to_server")
        wire.sendall(b"SET dropped yes\r\n")
        assert silent(wire)
        through.heal()
    assert redis_node.command("GET", "dropped") == b"$-1"


def test_new_connection_waits_for_a_whole_network(through: Proxy) -> None:
    """A connection made while the network is cut reaches the server only after healing."""
    through.cut()
    with connected(through) as wire:
        wire.sendall(b"PING\r\n")
        assert silent(wire)
        through.heal()
        assert wire.recv(100) == b"+PONG\r\n"


def test_refuses_new_connections_only(through: Proxy) -> None:
    """Refusing leaves the present connections alone, and healing lets new ones in on the same port."""
    with connected(through) as wire:
        ping(wire)
        through.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((through.host, through.port), 1.0)
        ping(wire)
        through.heal()
        with connected(through) as another:
            ping(another)


def test_disconnects_present_connections(through: Proxy) -> None:
    """A disconnect resets what is there, and a new connection works at once."""
    with connected(through) as wire:
        ping(wire)
        through.disconnect()
        with pytest.raises(ConnectionResetError):
            wire.recv(100)
    with connected(through) as wire:
        ping(wire)


def test_dead_server_is_felt_through_the_proxy(own_redis: Own, proxy: Callable[[Redis], Proxy]) -> None:
    """When the server is killed its clients are disconnected, and new ones too until it is back."""
    server: Redis = own_redis()
    through = proxy(server)
    with connected(through) as wire:
        ping(wire)
        server.kill()
        with pytest.raises(ConnectionResetError):
            if wire.recv(100) == b"":
                raise ConnectionResetError("closed in order, which is as good")
    with pytest.raises(ConnectionResetError), connected(through) as wire:
        if wire.recv(100) == b"":
            raise ConnectionResetError("closed in order, which is as good")
    server.start()
    with connected(through) as wire:
        ping(wire)


class Echo(Redis):
    """Stands where a server would; nothing of Redis but the address is used."""


@contextmanager
def listening() -> Iterator[tuple[socket.socket, Proxy]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30.0)
        target = Echo()
        target.ports = (listener.getsockname()[1],)
        with Proxy(target) as proxy:
            yield listener, proxy


def test_half_close_passes_through() -> None:
    """A client that has finished sending still gets the answer that the server gives at its end."""
    with listening() as (listener, proxy), connected(proxy) as client:
        server, _ = listener.accept()
        with server:
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            received = b""
            while chunk := server.recv(100):
                received += chunk
            assert received == b"question"
            server.sendall(b"answer")
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""
        assert eventually(lambda: proxy.stats().open == 0)


def test_back_pressure_reaches_the_sender_and_nothing_is_lost() -> None:
    """Into a cut network a sender can put only so much; healed, every byte arrives, in order."""
    payload = bytes(range(256)) * 65_536
    with listening() as (listener, proxy), connected(proxy) as client:
        server, _ = listener.accept()
        with server:
            server.settimeout(30.0)
            proxy.cut("to_server")
            sender = threading.Thread(target=client.sendall, args=(payload,))
            sender.start()
            time.sleep(0.5)
            assert sender.is_alive()
            assert proxy.stats().to_server.held < 1_000_000
            proxy.heal()
            received = bytearray()
            while len(received) < len(payload):
                received += server.recv(1 << 20)
            sender.join()
        assert bytes(received) == payload


def test_holding_the_gil_does_not_hold_up_the_network(through: Proxy) -> None:
    """The proxy is a process of its own, so bytes arrive in time whatever the tests' interpreter does."""
    with connected(through) as wire:
        ping(wire)
        through.delay(0.4, "to_client")
        waits = []
        for _ in range(3):  # a busy machine may hold up one of them
            wire.sendall(b"PING\r\n")
            # One call in C, which never lets go of the GIL.
            sum(range(50_000_000))
            began = time.monotonic()
            assert wire.recv(100) == b"+PONG\r\n"
            waits.append(time.monotonic() - began)
            if waits[-1] < 0.2:
                break
        assert min(waits) < 0.2


def test_databases_work_through_a_proxy(postgres: Postgres, mariadb: MariaDB, proxy: Callable[[Any], Proxy]) -> None:
    """The ordinary clients of PostgreSQL and MariaDB do not notice the proxy."""
    for server in (postgres, mariadb):
        through = proxy(server)
        direct, server.ports = server.ports, (through.port,)
        try:
            assert server.query("SELECT 6 * 7") == "42"
        finally:
            server.ports = direct
        assert through.stats().accepted == 1


def test_each_member_of_a_cluster_has_its_proxy(etcd3: EtcdCluster, proxies: Callable[[EtcdCluster], Proxies]) -> None:
    """A cluster behind proxies has one URL, and each member's network breaks alone."""
    through = proxies(etcd3)
    assert through.url == "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in through.members)
    through.members[0].refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((through.members[0].host, through.members[0].port), 1.0)
    with connected(through.members[1]) as wire:
        wire.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert wire.recv(100).startswith(b"HTTP/1.0 200")
    through.heal()
    with connected(through.members[0]) as wire:
        wire.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert wire.recv(100).startswith(b"HTTP/1.0 200")
