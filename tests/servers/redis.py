"""Redis: one node, or several independent nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tests.servers import certificate, packages
from tests.servers.cluster import Cluster
from tests.servers.server import Server


class Redis(Server):
    """A Redis that writes each change to its append-only file before it replies."""

    family = "redis"
    leaves_out: ClassVar[tuple[str, ...]] = ()
    """Settings that this version does not have."""

    def url_at(self, address: str) -> str:
        password = self.settings.get("requirepass")
        return f"redis://:{password}@{address}/0" if password else f"redis://{address}/0"

    def command(self, *arguments: str | bytes, timeout: float = 2.0) -> bytes:
        """Send one command over a new connection; return the first line of the reply, with a bulk string's content."""
        with socket.create_connection((self.host, self.port), timeout) as sock:
            sock.settimeout(timeout)
            password = self.settings.get("requirepass")
            with sock.makefile("rb") as replies:
                if password:
                    sock.sendall(_encode("AUTH", password))
                    replies.readline()
                sock.sendall(_encode(*arguments))
                line = replies.readline().rstrip(b"\r\n")
                if not line:
                    raise ConnectionError("Redis closed the connection")
                if line.startswith(b"$") and line != b"$-1":
                    return replies.read(int(line[1:]))
                return line

    def _prepare(self) -> None:
        settings = {
            "bind": self.host,
            "port": str(self.port),
            "dir": str(self.data),
            "databases": "10000",  # one database for each test that shares this server
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "enable-debug-command": "local",
            **self.settings,
        }
        lines = [f"{name} {value}\n" for name, value in settings.items() if name not in self.leaves_out]
        (self.folder / "redis.conf").write_text("".join(lines))

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "redis-server")
        return [str(program.path), str(self.folder / "redis.conf")], program

    def _probe(self, timeout: float) -> None:
        reply = self.command("PING", timeout=timeout)
        if reply != b"+PONG":
            raise ConnectionError(reply.decode(errors="replace"))


class Redis62(Redis):
    """The oldest Redis that fencelock supports."""

    family = "redis62"
    leaves_out = ("enable-debug-command",)


class RedisTls(Redis):
    """A Redis that also listens on a port for TLS, with a self-signed certificate."""

    ports_needed = 2

    @property
    def certificate(self) -> Path:
        """The certificate that a client has to trust."""
        return self.folder / "certificate.pem"

    @property
    def tls_url(self) -> str:
        """The URL for the port with TLS."""
        return f"rediss://{self.host}:{self.ports[1]}/0?ssl_ca_certs={self.certificate}"

    def _prepare(self) -> None:
        key = self.folder / "key.pem"
        certificate.make(self.certificate, key, self.host)
        self.settings |= {
            "tls-port": str(self.ports[1]),
            "tls-cert-file": str(self.certificate),
            "tls-key-file": str(key),
            "tls-ca-cert-file": str(self.certificate),
            "tls-auth-clients": "no",
        }
        super()._prepare()


class Sentinel(Redis):
    """A single Sentinel that watches a master: with a quorum of one, it decides alone."""

    def __init__(self, master: Redis, service: str = "mymaster", *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings=settings)
        self.master = master
        self.service = service

    def _prepare(self) -> None:
        conf = self.folder / "redis.conf"
        if conf.exists():
            return  # Sentinel writes its state into this file
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f"dir {self.data}",
            f"sentinel monitor {self.service} {self.master.host} {self.master.port} 1",
            f"sentinel down-after-milliseconds {self.service} 1000",
            f"sentinel failover-timeout {self.service} 3000",
            *(f"{name} {value}" for name, value in self.settings.items()),
        ]
        password = self.master.settings.get("requirepass")
        if password:
            lines.append(f"sentinel auth-pass {self.service} {password}")
        conf.write_text("\n".join(lines) + "\n")

    def _command(self) -> tuple[list[str], packages.Program]:
        command, program = super()._command()
        return [*command, "--sentinel"], program


class RedisNodes(Cluster[Redis]):
    """Independent nodes, as Redlock needs them."""

    def __init__(self, count: int, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__([Redis(settings=settings) for _ in range(count)])

    def url_at(self, address: str) -> str:
        return f"redlock://{address}"


def _encode(*arguments: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
