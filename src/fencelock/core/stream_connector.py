"""How a runtime connects for engines that have no driver: it opens the stream itself, and the engine does the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fencelock.core.connect_once import unreachable_hint
from fencelock.core.runtime import Command, Endpoint, Parser
from fencelock.errors import EngineUnavailable


class StreamConnector:
    """`fencelock.core.runtime.Connector` for one server. All its messages are pushes: the engine assigns them to requests.

    `server` is the server's kind, for messages.
    """

    pushes = object

    def __init__(self, server: str, endpoint: Endpoint, parser: Callable[[], Parser]) -> None:
        self.address = endpoint.address
        self.parser = parser
        self._server = server
        self._endpoint = endpoint

    def connect(self, open_stream: Callable[[Endpoint], Any]) -> Any:
        """Connect; raise EngineUnavailable."""
        try:
            return open_stream(self._endpoint)
        except (OSError, ValueError) as error:  # ValueError: not a valid host name
            raise self._unreachable(error) from error

    async def aconnect(self, open_stream: Callable[[Endpoint], Awaitable[Any]]) -> tuple[Any, object]:
        """Connect; raise EngineUnavailable."""
        try:
            return await open_stream(self._endpoint), None
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> EngineUnavailable:
        words = str(error) or type(error).__name__
        return EngineUnavailable(f"cannot reach {self._server} at {self.address}: {words}{unreachable_hint(words)}")

    def pack(self, command: Command) -> bytes:
        """Not used: the engine sends bytes."""
        raise NotImplementedError(f"cannot pack {command[0]}: the engine encodes its requests itself")
