"""ZooKeeper: one server, or an ensemble of them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from glob import glob

from tests.servers import packages
from tests.servers.cluster import Cluster
from tests.servers.managed import Closable
from tests.servers.server import Server

JARS = (
    "zookeeper",
    "zookeeper-jute",
    "slf4j-api",
    "slf4j-log4j12",
    "log4j-1.2",
    "netty-all",
    "metrics-core",
    "snappy-java",
)
LOGGING = """\
log4j.rootLogger=INFO, CONSOLE
log4j.appender.CONSOLE=org.apache.log4j.ConsoleAppender
log4j.appender.CONSOLE.layout=org.apache.log4j.PatternLayout
log4j.appender.CONSOLE.layout.ConversionPattern=%d{ISO8601} %-5p %c{1} - %m%n
"""
# The JVM should start fast and stay small; it does not run for days.
JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xmx192m", "-XX:-UsePerfData")


class ZooKeeper(Server):
    """One ZooKeeper server. Ticks are short, so that sessions of half a second are allowed."""

    family = "zookeeper"
    ports_needed = 3

    ensemble: ZooKeeperCluster | None = None

    def url_at(self, address: str) -> str:
        return f"zookeeper://{address}"

    def ask(self, word: str, *, timeout: float = 2.0) -> str:
        """Send a four-letter command; return the reply."""
        with socket.create_connection((self.host, self.port), timeout) as sock:
            sock.settimeout(timeout)
            sock.sendall(word.encode())
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        return answer.decode()

    def session(self, *, timeout: float = 5.0) -> ZooKeeperSession:
        """Open a session, to be used as a context manager."""
        return ZooKeeperSession(self, timeout)

    @property
    def peer_address(self) -> str:
        """The address for the other members: the ports for data and for elections."""
        return f"{self.host}:{self.ports[1]}:{self.ports[2]}" if self.port else ""

    def _listening_ports(self) -> tuple[int, ...]:
        # Only members of an ensemble listen on the election port, and only the leader on the data port.
        return (self.ports[0], self.ports[2]) if self.ensemble is not None else (self.ports[0],)

    def _prepare(self) -> None:
        members = self.ensemble.members if self.ensemble is not None else ()
        settings = {
            "dataDir": str(self.data),
            "clientPort": str(self.port),
            "clientPortAddress": self.host,
            "tickTime": "250",
            "initLimit": "40",
            "syncLimit": "12",
            "minSessionTimeout": "500",
            "maxSessionTimeout": "86400000",
            "maxClientCnxns": "0",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            **{f"server.{number}": member.peer_address for number, member in enumerate(members, 1)},
            **self.settings,
        }
        (self.folder / "zoo.cfg").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (self.folder / "log4j.properties").write_text(LOGGING)
        if members:
            (self.data / "myid").write_text(f"{members.index(self) + 1}\n")

    def _command(self) -> tuple[list[str], packages.Program]:
        java = packages.find(self.family, "java")
        jars = packages.find(self.family, "zookeeper.jar")
        found = [path for name in JARS for path in glob(str(jars.path.parent / f"{name}.jar"))]
        # Preallocating the usual 64 MB for each log file takes seconds on a slow disk.
        return [
            str(java.path),
            *JVM,
            "-Djava.net.preferIPv4Stack=true",
            "-Dzookeeper.preAllocSize=1024",
            "-cp",
            os.pathsep.join([str(self.folder), *found]),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "zoo.cfg"),
        ], java

    def _probe(self, timeout: float) -> None:
        answer = self.ask("srvr", timeout=timeout)
        if "Mode:" not in answer:
            raise ConnectionError(answer.strip() or "ZooKeeper closed the connection")


class ZooKeeperCluster(Cluster[ZooKeeper]):
    """An ensemble that elects a leader; a minority of it may be down."""

    def __init__(self, count: int = 3, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__([ZooKeeper(settings=settings) for _ in range(count)])
        for member in self.members:
            member.ensemble = self

    def _leads(self, member: ZooKeeper) -> bool:
        try:
            return "Mode: leader" in member.ask("srvr", timeout=1.0)
        except OSError:
            return False


class ZooKeeperSession(Closable):
    """The few requests that a test of the engine itself needs, over ZooKeeper's own protocol."""

    def __init__(self, server: ZooKeeper, timeout: float) -> None:
        self._wire = socket.create_connection((server.host, server.port), timeout)
        self._wire.settimeout(timeout)
        self._number = 0
        try:
            self._send(struct.pack(">iqiq", 0, 0, 10_000, 0) + _text(b"\0" * 16))
            self.timeout_ms, self.id = struct.unpack(">iq", self._receive()[4:16])
        except BaseException:
            self._wire.close()
            raise

    def create(self, path: str, value: str, *, ephemeral: bool = False) -> None:
        """Create a node that all clients may read and write."""
        runtime = struct.pack(">ii", 1, 31) + _text(b"world") + _text(b"anyone")
        self._request(1, _text(path.encode()) + _text(value.encode()) + runtime + struct.pack(">i", int(ephemeral)))

    def get(self, path: str) -> str | None:
        """Return a node's value, or None if there is no such node."""
        try:
            answer = self._request(4, _text(path.encode()) + b"\0")
        except KeyError:
            return None
        (length,) = struct.unpack(">i", answer[:4])
        return answer[4 : 4 + length].decode()

    def close(self) -> None:
        """End the session, and its ephemeral nodes with it."""
        try:
            self._request(-11, b"")
        except OSError:
            pass
        finally:
            self._wire.close()

    def _request(self, kind: int, body: bytes) -> bytes:
        self._number += 1
        self._send(struct.pack(">ii", self._number, kind) + body)
        answer = self._receive()
        (error,) = struct.unpack(">i", answer[12:16])
        if error == -101:
            raise KeyError("there is no such node")
        if error != 0:
            raise ConnectionError(f"ZooKeeper answered with error {error}")
        return answer[16:]

    def _send(self, packet: bytes) -> None:
        self._wire.sendall(_text(packet))

    def _receive(self) -> bytes:
        (length,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        taken = b""
        while len(taken) < length:
            chunk = self._wire.recv(length - len(taken))
            if not chunk:
                raise ConnectionError("ZooKeeper closed the connection")
            taken += chunk
        return taken


def _text(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content
