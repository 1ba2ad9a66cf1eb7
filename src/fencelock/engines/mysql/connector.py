"""How the runtime connects to the server, and how a failure to connect is explained."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.core.connect_once import unreachable_hint
from fencelock.core.runtime import Command, Endpoint
from fencelock.engines.mysql.login import TLS, Greeting, read_greeting, tls_request
from fencelock.engines.mysql.packets import ReplyParser, ServerError
from fencelock.engines.mysql.url import MySQLUrl
from fencelock.errors import EngineUnavailable


class MySQLConnector:
    """`fencelock.core.runtime.Connector` for one connection. All replies are pushes: MySQLConnection assigns them."""

    pushes = object

    def __init__(self, url: MySQLUrl, timeout: float) -> None:
        self.address = url.address
        self.replies = ReplyParser()
        self.greeting: Greeting | None = None
        """The greeting that was read before TLS started; without TLS it is the first reply."""
        self._endpoint = Endpoint(url.host, url.port, url.tls, timeout, self._before_tls if url.tls else None)

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Connect; raise EngineUnavailable."""
        try:
            return open_stream(self._endpoint)
        except (OSError, ValueError, ServerError) as error:  # ValueError: not a valid host name
            raise self.unreachable(error) from error

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect; raise EngineUnavailable."""
        try:
            return await open_stream(self._endpoint), None
        except (OSError, ValueError, ServerError) as error:
            raise self.unreachable(error) from error

    def pack(self, command: Command) -> bytes:
        """Not used: MySQLConnection sends packets."""
        raise NotImplementedError(f"cannot pack {command[0]}: statements are sent as packets")

    def parser(self) -> ReplyParser:
        """Return the parser of this connection."""
        return self.replies

    def unreachable(self, error: Exception) -> EngineUnavailable:
        """Return the error for a server that cannot be reached or refuses the login."""
        reason = str(error) or type(error).__name__
        reached = isinstance(error, ServerError) or type(error).__name__ == "SSLCertVerificationError"
        step = f"cannot log in to MySQL at {self.address}" if reached else f"cannot reach MySQL at {self.address}"
        return EngineUnavailable(f"{step}: {reason}{self._hint(error)}")

    def _hint(self, error: Exception) -> str:
        if isinstance(error, ServerError) and error.code == DENIED and self._endpoint.tls is None:
            return f" ({HINTS[DENIED]}, or the user has to use TLS: ?ssl-mode=REQUIRED)"
        return hint(error) or unreachable_hint(str(error))

    def _before_tls(self, data: bytes) -> bytes | None:
        """Read the greeting; return the request for TLS, or None if the greeting is incomplete."""
        size = int.from_bytes(data[:3], "little")
        if len(data) < 4 or len(data) < 4 + size:
            return None
        self.greeting = read_greeting(data[4 : 4 + size])
        if not self.greeting.capabilities & TLS:
            raise ValueError("the server does not support TLS; enable it there, or leave out the ssl options")
        return tls_request()


DENIED = 1045
HINTS = {
    1040: "every lease and every waiter has a connection of its own; raise max_connections",
    1044: "the user has no rights in this database",
    DENIED: "the user or the password is wrong",
    1049: "create the database first",
    1114: "raise max_heap_table_size, or the tables' engine",
    1142: "the user needs SELECT, INSERT, UPDATE, DELETE and CREATE here; or let a user who may create "
    "tables run `fencelock schema --apply`, and see the grants in docs/engines/mysql.md",
    1203: "every lease and every waiter has a connection of its own; raise max_user_connections",
    1226: "every lease and every waiter has a connection of its own; raise the user's limit",
    1290: "connect to the server that takes writes",
    1836: "connect to the server that takes writes",
}


def hint(error: Exception) -> str:
    """Return what the user can do about an error of the server, or ""."""
    found = HINTS.get(error.code) if isinstance(error, ServerError) else None
    return f" ({found})" if found else ""
