"""How to reach the server: the world connects, and from there on the wire carries packets, the login too."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.core.runtime import Command, Endpoint
from fencelock.engines.mysql.login import TLS as CAN_TLS
from fencelock.engines.mysql.login import Greeting, ask_for_tls, read_greeting
from fencelock.engines.mysql.packets import Messages, ServerError
from fencelock.engines.mysql.place import Place
from fencelock.errors import EngineUnavailable


class MysqlConnector:
    """`fencelock.core.runtime.Dialer` for one connection. What the server says counts as pushed: the link knows the order."""

    pushes = object

    def __init__(self, place: Place, seconds: float) -> None:
        self.address = place.address
        self.messages = Messages()
        self.greeting: Greeting | None = None
        """What the server said before TLS began; without TLS it is the first packet."""
        self._host = Endpoint(place.host, place.port, place.tls, seconds, self._greeted if place.tls else None)

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Connect."""
        try:
            return open_stream(self._host)
        except (OSError, ValueError, ServerError) as error:  # ValueError: a host that cannot be one
            raise self.unreachable(error) from error

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect."""
        try:
            return await open_stream(self._host), None
        except (OSError, ValueError, ServerError) as error:
            raise self.unreachable(error) from error

    def pack(self, command: Command) -> bytes:
        """Nothing is asked in words."""
        raise NotImplementedError(f"statements are told, not asked: {command[0]}")

    def parser(self) -> Messages:
        """Return the parser of this connection."""
        return self.messages

    def unreachable(self, error: Exception) -> EngineUnavailable:
        """Return what to raise if the server cannot be reached or does not let us in."""
        words = str(error) or type(error).__name__
        reached = isinstance(error, ServerError) or type(error).__name__ == "SSLCertVerificationError"
        what = f"cannot log in to MySQL at {self.address}" if reached else f"cannot reach MySQL at {self.address}"
        return EngineUnavailable(f"{what}: {words}{self._hint(error)}")

    def _hint(self, error: Exception) -> str:
        if isinstance(error, ServerError) and error.code == DENIED and self._host.tls is None:
            return f" ({HINTS[DENIED]}, or the user has to use TLS: ?ssl-mode=REQUIRED)"
        return hint(error)

    def _greeted(self, data: bytes) -> bytes | None:
        """Read the greeting, in the clear; return what asks for TLS, or None if it is not all there."""
        size = int.from_bytes(data[:3], "little")
        if len(data) < 4 or len(data) < 4 + size:
            return None
        self.greeting = read_greeting(data[4 : 4 + size])
        if not self.greeting.abilities & CAN_TLS:
            raise ValueError("the server does not speak TLS; have it do so, or leave out the ssl options")
        return ask_for_tls()


DENIED = 1045
HINTS = {
    1040: "every lease and every waiter has a connection of its own; raise max_connections",
    1044: "the user has no rights in this database",
    DENIED: "the user or the password is wrong",
    1049: "create the database first",
    1114: "raise max_heap_table_size, or the tables' engine",
    1142: "the user needs SELECT, INSERT, UPDATE, DELETE and CREATE here; or have `fencelock schema --apply` run by one "
    "who may create tables, and see the grants in docs/engines/mysql.md",
    1203: "every lease and every waiter has a connection of its own; raise max_user_connections",
    1226: "every lease and every waiter has a connection of its own; raise the user's limit",
    1290: "connect to the server that takes writes",
    1836: "connect to the server that takes writes",
}


def hint(error: Exception) -> str:
    """Return what to do about an error of the server's."""
    found = HINTS.get(error.code) if isinstance(error, ServerError) else None
    return f" ({found})" if found else ""
