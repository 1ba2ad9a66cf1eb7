"""One link for all: where a world shares its wires, whoever needs one while it is being made waits for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from fencelock.errors import EngineUnavailable, FencelockError

if TYPE_CHECKING:
    from fencelock.core.runtime import Event, Runtime

T = TypeVar("T")


class _Dial(NamedTuple):
    done: Event
    within: float
    errors: list[FencelockError]


class ConnectOnce(Generic[T]):
    """Makes one link at a time."""

    __slots__ = ("_dial", "_runtime", "_server", "_under_way")

    def __init__(self, runtime: Runtime, server: str, connect: Callable[[float], Awaitable[T]]) -> None:
        self._runtime = runtime
        self._server = server
        self._dial = connect
        self._under_way: _Dial | None = None

    async def once(self, made: Callable[[], T | None], keep: Callable[[T], None], within: float) -> T:
        """Return the link that somebody has made, or make one and keep it.

        Whoever waited for somebody in vain shares the failure, unless it is only that the other had less time.
        """
        until = self._runtime.now() + within
        while (other := self._under_way) is not None:
            left = until - self._runtime.now()
            if not await other.done.wait(None if left == inf else left):
                raise EngineUnavailable(f"cannot reach {self._server} within {within:.3g} s")
            if (link := made()) is not None:
                return link
            for error in other.errors:
                if other.within >= until - self._runtime.now():
                    raise type(error)(*error.args) from error
        mine = self._under_way = _Dial(self._runtime.event(), within, [])
        try:
            link = await self._dial(until - self._runtime.now())
            keep(link)
            return link
        except FencelockError as error:
            mine.errors.append(error)
            raise
        finally:
            self._under_way = None
            mine.done.set()

    def forget(self) -> None:
        """Begin anew in a forked child."""
        self._under_way = None
