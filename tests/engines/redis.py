"""Redis: one node, or any number of nodes that know nothing of each other."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from tests.engines import packages
from tests.engines.cluster import Cluster
from tests.engines.server import Server


class Redis(Server):
    """A Redis that has every acknowledged write in its append-only file before it answers."""

    family = "redis"

    def url_at(self, address: str) -> str:
        password = self.settings.get("requirepass")
        return f"redis://:{password}@{address}/0" if password else f"redis://{address}/0"

    def command(self, *words: str | bytes, timeout: float = 2.0) -> bytes:
        """Send one command over a connection of its own; the first line of the reply, with a bulk string's content."""
        with socket.create_connection((self.host, self.port), timeout) as wire:
            wire.settimeout(timeout)
            password = self.settings.get("requirepass")
            with wire.makefile("rb") as replies:
                if password:
                    wire.sendall(_encode("AUTH", password))
                    replies.readline()
                wire.sendall(_encode(*words))
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
            "databases": "10000",  # one for each test that shares this server
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "enable-debug-command": "local",
            **self.settings,
        }
        lines = [f"{name} {value}\n" for name, value in settings.items()]
        (self.folder / "redis.conf").write_text("".join(lines))

    def _command(self) -> tuple[list[str], packages.Program]:
        program = packages.find(self.family, "redis-server")
        return [str(program.path), str(self.folder / "redis.conf")], program

    def _probe(self, timeout: float) -> None:
        reply = self.command("PING", timeout=timeout)
        if reply != b"+PONG":
            raise ConnectionError(reply.decode(errors="replace"))


class RedisNodes(Cluster[Redis]):
    """Independent nodes, as Redlock wants them."""

    def __init__(self, count: int, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__([Redis(settings=settings) for _ in range(count)])

    def url_at(self, address: str) -> str:
        return f"redlock://{address}"


def _encode(*words: str | bytes) -> bytes:
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
