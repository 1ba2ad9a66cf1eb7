"""Read, change, and write unless others have written meanwhile: one loop for everything that has a version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from fencelock.errors import InvalidArgument, VersionConflict
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis
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


class BaseVersionedValue(Api, ABC, Generic[T]):
    """What both APIs share."""

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

    @both_apis
    async def read(self) -> Versioned[T]:
        """Return the current value with its version."""
        return await self._load()

    @both_apis
    async def write(self, value: T, version: Any) -> None:
        """Write, or raise VersionConflict if the version has changed."""
        if not await self._store(value, version):
            raise VersionConflict(f"others have changed {self.name!r} since it was read: read it again", self.name)

    @both_apis
    async def update(
        self,
        fn: Callable[[T], T | Awaitable[T | None] | None],
        *,
        timeout: float | None = 30.0,
        attempts: int | None = None,
    ) -> T | None:
        """Replace the value by `fn(value)`, again until no other writer came between; return the new value.

        `fn` may be called several times, so it should only compute; in `fencelock.aio` it may be `async def`. If it returns
        None, nothing is written. Between attempts it pauses, with backoff and full jitter. After the timeout, or `attempts`
        attempts, it raises VersionConflict. At least one attempt is made.
        """
        if attempts is not None and attempts < 1:
            raise InvalidArgument(
                f"attempts must be 1 or more, or None for as many as the timeout allows; not {attempts}"
            )
        runtime = self._runtime()
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


class VersionedValue(BaseVersionedValue[T], BlockingApi):
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
