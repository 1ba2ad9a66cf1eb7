"""How to reach one member: the world connects, and from there on the wire carries frames of HTTP/2."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.backends.etcd.http2 import Frames
from fencelock.backends.etcd.place import address
from fencelock.core.world import Command, Host
from fencelock.errors import EngineUnavailable


class EtcdDialer:
    """`fencelock.core.world.Dialer` for one member. All that it says counts as pushed: HTTP/2 answers in any order."""

    pushes = object

    def __init__(self, host: Host) -> None:
        self.address = address(host.name, host.port)
        self.tls = host.tls is not None
        self._host = host

    def within(self, seconds: float) -> EtcdDialer:
        """Return one that takes no longer than this."""
        return self if seconds >= self._host.seconds else EtcdDialer(self._host._replace(seconds=seconds))

    def dial(self, reach: Callable[[Host], Any]) -> Any:
        """Connect."""
        try:
            return reach(self._host)
        except (OSError, ValueError) as error:  # the last for a host that cannot be one
            raise self._unreachable(error) from error

    async def adial(self, reach: Callable[[Host], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect."""
        try:
            return await reach(self._host), None
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
