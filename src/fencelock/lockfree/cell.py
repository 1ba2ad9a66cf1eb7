"""Read, change, write if nobody else has written: one loop for everything that has a version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from fencelock.errors import InvalidArgument, VersionConflict
from fencelock.lockfree.colour import in_colour, settled, world_of

FIRST_PAUSE = 0.005
LONGEST_PAUSE = 1.0

T = TypeVar("T")


class Seen(NamedTuple, Generic[T]):
    """What was read: a value, None if there is none, and the version that a write has to find unchanged.

    >>> Seen({"balance": 90}, version=2).version
    2
    """

    value: T
    version: Any


class Cell(ABC, Generic[T]):
    """Something that is read and written as a whole, and tells when others have written meanwhile.

    Whether its methods have to be awaited is decided by the connection or client that it is made with. To make one of your
    own, write `_read` and `_write`.

    >>> class Box(Cell[int]):
    ...     name, value, version = "box", 1, 1
    ...     async def _read(self):
    ...         return Seen(self.value, self.version)
    ...     async def _write(self, value, version):            # in one atomic step, where others could come between
    ...         if version != self.version:
    ...             return False
    ...         self.value, self.version = value, version + 1
    ...         return True
    >>> Box().modify(lambda value: value + 1)
    2
    """

    awaited: bool = False
    name: str
    """For messages."""

    @abstractmethod
    async def _read(self) -> Seen[T]:
        """Return what is there now."""

    @abstractmethod
    async def _write(self, value: T, version: Any) -> bool:
        """Write, if that is still the version, in one atomic step; return whether it was."""

    async def _attempt(self, change: Callable[[T], T | Awaitable[T | None] | None]) -> tuple[bool, T | None]:
        """Read, change and write once; return whether that is settled, and what was written."""
        seen = await self._read()
        value: T | None = await settled(change(seen.value))
        return value is None or await self._write(value, seen.version), value

    def read(self) -> Any:
        """Return what is there now, with its version: a `Seen`."""
        return in_colour(self._read(), awaited=self.awaited)

    def write(self, value: T, version: Any) -> Any:
        """Write, or raise VersionConflict if the version is another by now."""
        return in_colour(self._write_or_raise(value, version), awaited=self.awaited)

    def modify(
        self,
        change: Callable[[T], T | Awaitable[T | None] | None],
        *,
        timeout: float | None = 30.0,
        attempts: int | None = None,
    ) -> Any:
        """Replace the value by what `change` makes of it, again and again until nobody came between; return the new one.

        `change` may be called several times, so it must do nothing but compute. If it returns None, nothing is written. With
        backoff and full jitter between the attempts; after the timeout, or so many attempts, VersionConflict.
        """
        if attempts is not None and attempts < 1:
            raise InvalidArgument(
                f"attempts must be 1 or more, or None for as many as the timeout allows; not {attempts}"
            )
        return in_colour(self._modify(change, timeout, attempts), awaited=self.awaited)

    async def _write_or_raise(self, value: T, version: Any) -> None:
        if not await self._write(value, version):
            raise VersionConflict(f"{self.name!r} is no longer as it was read: read again, and decide again", self.name)

    async def _modify(self, change: Any, timeout: float | None, attempts: int | None) -> T | None:
        runtime = world_of(awaited=self.awaited)
        until = None if timeout is None else runtime.now() + timeout
        pause, tried = FIRST_PAUSE, 0
        while True:
            done, value = await self._attempt(change)
            if done:
                return value
            tried += 1
            wait = pause * runtime.random()
            if tried == attempts or (until is not None and runtime.now() + wait > until):
                raise VersionConflict(
                    f"{self.name!r} was changed by others each of the {tried} times that it was tried: try again later, or "
                    "take a lock for what so many want at once",
                    self.name,
                )
            await runtime.sleep(wait)
            pause = min(pause * 2, LONGEST_PAUSE)
