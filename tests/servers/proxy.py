"""A network that can be broken: a small TCP proxy to put in front of a server.

    with Redis() as redis, Proxy(redis) as proxy:
        proxy.delay(0.2, "to_client")   # every reply takes 200 ms longer
        proxy.cut("to_server")          # nothing arrives; what was sent arrives after heal()
        proxy.drop("to_client")         # replies are lost; heal() resets their connections
        proxy.refuse()                  # no new connections
        proxy.disconnect()              # resets the open connections
        proxy.heal()

While a direction is cut or dropped, a new connection is accepted but reaches the server only after heal(): the kernel
answers a client's SYN before a program can refuse it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.servers import ports_and_folders
from tests.servers.cluster import Cluster
from tests.servers.managed import Closable
from tests.servers.server import TRIES, Server

PROCESS = Path(__file__).with_name("proxy_process.py")
Direction = Literal["to_server", "to_client", "both"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one direction: forwarded, dropped, or still held."""

    forwarded: int
    swallowed: int
    held: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a proxy has seen: connections accepted so far, connections open now, bytes each way."""

    accepted: int
    open: int
    to_server: Traffic
    to_client: Traffic


class Proxy(Closable):
    """A proxy in front of one server, on its own port. Every call returns when it has taken effect."""

    host = ports_and_folders.HOST

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._owner = os.getpid()
        error = "no port tried"
        for _ in range(TRIES):
            (self.port,) = ports_and_folders.free_ports(1)
            order = {
                "target": (server.host, server.port),
                "address": (self.host, self.port),
                "tests": os.getpid(),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROCESS), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
            error = self._reply()["error"]
            if error is None:
                return
            self.close()
        raise RuntimeError(f"the proxy cannot listen: {error}")

    @property
    def address(self) -> str:
        """`host:port`, as clients write it."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The server's URL with the address of this proxy."""
        return self.server.url_at(self.address)

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Deliver everything that is sent from now on this many seconds later."""
        self._fault("delay", seconds, direction)

    def drop(self, direction: Direction = "both") -> None:
        """Drop everything that is sent from now on, without an error."""
        self._fault("drop", True, direction)

    def cut(self, direction: Direction = "both") -> None:
        """Deliver nothing until heal(); when the buffers are full, the sender blocks."""
        self._fault("cut", True, direction)

    def refuse(self) -> None:
        """Refuse new connections; the open ones stay."""
        self._request({"do": "refuse"})

    def disconnect(self) -> None:
        """Reset every open connection, on both sides."""
        self._request({"do": "disconnect"})

    def heal(self) -> None:
        """Remove all faults."""
        self._request({"do": "heal"})

    def stats(self) -> Stats:
        """Return the traffic so far."""
        reply = self._request({"do": "stats"})
        return Stats(
            accepted=reply["accepted"],
            open=reply["open"],
            to_server=Traffic(**reply["to_server"]),
            to_client=Traffic(**reply["to_client"]),
        )

    def close(self) -> None:
        """End the proxy and every connection through it."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _fault(self, kind: str, value: float | bool, direction: Direction) -> None:
        ways = ["to_server", "to_client"] if direction == "both" else [direction]
        self._request({"do": "fault", "kind": kind, "value": value, "ways": ways})

    def _request(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy has ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __repr__(self) -> str:
        return f"<Proxy {self.address} to {self.server!r}>"


class Proxies(Closable):
    """One proxy in front of each member of a cluster, or of several servers that belong together."""

    def __init__(self, servers: Cluster[Any] | Sequence[Server]) -> None:
        members: Sequence[Server] = servers.members if isinstance(servers, Cluster) else servers
        self.members: list[Proxy] = []
        try:
            for member in members:
                self.members.append(Proxy(member))
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """One URL that names the proxies of all members."""
        return self.members[0].server.url_at(",".join(member.address for member in self.members))

    def heal(self) -> None:
        """Heal every member's network."""
        for member in self.members:
            member.heal()

    def close(self) -> None:
        """End every proxy."""
        for member in self.members:
            member.close()
