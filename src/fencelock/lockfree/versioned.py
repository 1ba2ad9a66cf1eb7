"""Read, change, and write unless others have written meanwhile: one loop for everything that has a version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from fencelock.errors import InvalidArgument, VersionConflict
from fencelock.runtime.blocking import run_sync
from fencelock.runtime.half import BLOCKING, Half
from fencelock.sqlio.drivers import resolve

FIRST_PAUSE = 0.005
MAX_PAUSE = 1.0

T = TypeVar("T")


class Versioned(NamedTuple, Generic[T]):
    """A value that was read, None if there is none, and its version, which a write must find unchanged.

    >>> Versioned({"balance": 90}, version=2).version
    2
    """

    value: T
    version: Any


class BaseVersionedValue(ABC, Generic[T]):
    """The coroutines of both halves."""

    half: Half = BLOCKING
    name: str
    """The name in messages."""

    @abstractmethod
    async def _load(self) -> Versioned[T]:
        """Return the current value."""

    @abstractmethod
    async def _store(self, value: T, version: Any) -> bool:
        """Write if the version is still the same, in one atomic step; return whether it was."""

    async def _attempt(self, fn: Callable[[T], Any]) -> tuple[bool, T | None]:
        """Read, change and write once; return whether that succeeded, and the value that was written."""
        seen = await self._load()
        value: T | None = await resolve(fn(seen.value))
        return value is None or await self._store(value, seen.version), value

    async def _write(self, value: T, version: Any) -> None:
        if not await self._store(value, version):
            raise VersionConflict(f"others have changed {self.name!r} since it was read: read it again", self.name)

    async def _update(self, fn: Callable[[T], Any], timeout: float | None, attempts: int | None) -> T | None:
        if attempts is not None and attempts < 1:
            raise InvalidArgument(
                f"attempts must be 1 or more, or None for as many as the timeout allows; not {attempts}"
            )
        runtime = self.half.runtime()
        deadline = None if timeout is None else runtime.now() + timeout
        pause, tried = FIRST_PAUSE, 0
        while True:
            done, value = await self._attempt(fn)
            if done:
                return value
            tried += 1
            wait = pause * runtime.random()
            if tried == attempts or (deadline is not None and runtime.now() + wait > deadline):
                raise VersionConflict(
                    f"others changed {self.name!r} during each of {tried} attempts: try again later, or use a lock where "
                    "many write at the same time",
                    self.name,
                )
            await runtime.sleep(wait)
            pause = min(pause * 2, MAX_PAUSE)


class VersionedValue(BaseVersionedValue[T]):
    """A value that is read and written as a whole, and whose version shows whether others have written meanwhile.

    For a store of your own, write `_load` and `_store`.

    >>> class Box(VersionedValue[int]):
    ...     name, value, version = "box", 1, 1
    ...     async def _load(self):
    ...         return Versioned(self.value, self.version)
    ...     async def _store(self, value, version):            # compare and write in one atomic step
    ...         if version != self.version:
    ...             return False
    ...         self.value, self.version = value, version + 1
    ...         return True
    >>> Box().update(lambda value: value + 1)
    2
    """

    def read(self) -> Versioned[T]:
        """Return the current value with its version."""
        return run_sync(self._load())

    def write(self, value: T, version: Any) -> None:
        """Write, or raise VersionConflict if the version has changed."""
        run_sync(self._write(value, version))

    def update(
        self,
        fn: Callable[[T], T | Awaitable[T | None] | None],
        *,
        timeout: float | None = 30.0,
        attempts: int | None = None,
    ) -> T | None:
        """Replace the value by `fn(value)`, again until no other writer came between; return the new value.

        `fn` may be called several times, so it should only compute. If it returns None, nothing is written. It pauses between
        attempts, with backoff and full jitter; after the timeout, or `attempts` attempts, it raises VersionConflict. At least
        one attempt is made.
        """
        return run_sync(self._update(fn, timeout, attempts))
