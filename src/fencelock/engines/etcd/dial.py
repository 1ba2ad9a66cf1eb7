"""How to reach one member: the world connects, and from there on the wire carries frames of HTTP/2."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.core.runtime import Command, Endpoint
from fencelock.engines.etcd.http2 import Frames
from fencelock.engines.etcd.place import address
from fencelock.errors import EngineUnavailable


class EtcdConnector:
    """`fencelock.core.runtime.Dialer` for one member. All that it says counts as pushed: HTTP/2 answers in any order."""

    pushes = object

    def __init__(self, host: Endpoint) -> None:
        self.address = address(host.name, host.port)
        self.tls = host.tls is not None
        self._host = host

    def within(self, seconds: float) -> EtcdConnector:
        """Return one that takes no longer than this."""
        return self if seconds >= self._host.seconds else EtcdConnector(self._host._replace(seconds=seconds))

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Connect."""
        try:
            return open_stream(self._host)
        except (OSError, ValueError) as error:  # the last for a host that cannot be one
            raise self._unreachable(error) from error

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect."""
        try:
            return await open_stream(self._host), None
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def pack(self, command: Command) -> bytes:
        """Nothing is asked in words."""
        raise NotImplementedError(f"etcd takes no commands such as {command[0]}")

    def parser(self) -> Frames:
        """Return a parser of frames."""
        return Frames()

    def _unreachable(self, error: Exception) -> EngineUnavailable:
        words = str(error) or type(error).__name__
        return EngineUnavailable(f"cannot reach etcd at {self.address}: {words}")
