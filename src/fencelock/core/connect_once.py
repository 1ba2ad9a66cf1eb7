"""One connect at a time: in runtimes that share connections, callers wait for the connect that is in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from fencelock.errors import EngineUnavailable, FencelockError

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime

T = TypeVar("T")

NOBODY_THERE = (
    "refused",
    "Connect call failed",
    "ame or service not known",
    "ame resolution",
    "No address associated",
    "nodename nor servname",
    "failed to resolve host",
)
"""Parts of the messages for a closed port and for an unknown host, of asyncio, of socket and of libpq."""


def unreachable_hint(words: str) -> str:
    """Return what to do about a server that refused the connection or whose host is unknown, or "".

    >>> unreachable_hint("[Errno 111] Connection refused")
    '; is the server running there? Check host and port in the URL'
    """
    if any(part in words for part in NOBODY_THERE) and "Is the server running" not in words:  # libpq asks, too
        return "; is the server running there? Check host and port in the URL"
    return ""


class _Connecting(NamedTuple):
    done: Event
    timeout: float
    errors: list[FencelockError]


class ConnectOnce(Generic[T]):
    """Opens one connection at a time."""

    __slots__ = ("_connect", "_in_flight", "_runtime", "_server")

    def __init__(self, runtime: Runtime, server: str, connect: Callable[[float], Awaitable[T]]) -> None:
        self._runtime = runtime
        self._server = server
        self._connect = connect
        self._in_flight: _Connecting | None = None

    async def once(self, made: Callable[[], T | None], keep: Callable[[T], None], timeout: float) -> T:
        """Return the connection that another caller has made (`made`), or make one and store it (`keep`).

        If the connect in flight fails, its waiters raise the same error, unless they have more time left than it had.
        """
        until = self._runtime.now() + timeout
        while (other := self._in_flight) is not None:
            left = until - self._runtime.now()
            if not await other.done.wait(None if left == inf else left):
                raise EngineUnavailable(f"cannot reach {self._server} within {timeout:.3g} s")
            if (connection := made()) is not None:
                return connection
            for error in other.errors:
                if other.timeout >= until - self._runtime.now():
                    raise type(error)(*error.args) from error
        mine = self._in_flight = _Connecting(self._runtime.event(), timeout, [])
        try:
            connection = await self._connect(until - self._runtime.now())
            keep(connection)
            return connection
        except FencelockError as error:
            mine.errors.append(error)
            raise
        finally:
            self._in_flight = None
            mine.done.set()

    def clear(self) -> None:
        """Start again in a forked child, without the parent's connect."""
        self._in_flight = None
