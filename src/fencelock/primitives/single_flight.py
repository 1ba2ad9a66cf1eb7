"""Single flight: one builder of a value in the fleet; all other callers get its result, or the stale value immediately.

A value is a record. A builder holds the key's lock exclusively; other callers queue behind it as readers, so that its release
admits them all at once. A builder stores with its token and the version that it read under the lock: one that was paused
cannot overwrite a newer value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from fencelock.core.client import Client
from fencelock.core.clock import Deadline
from fencelock.core.log import WARNING, log
from fencelock.core.validation import check_ttl
from fencelock.errors import BuildFailed, FencelockError, LockTimeout, WouldDeadlock
from fencelock.model import Mode
from fencelock.primitives.cached_values import Cached, CachedValues, CacheOptions
from fencelock.primitives.lock import BaseLock

T = TypeVar("T")


_building: ContextVar[frozenset[str]] = ContextVar("fencelock_building", default=frozenset())
"""The keys that this thread or task is building: a build that waits for one of them would wait for itself."""

RETRY_SECONDS = 0.5
"""Seconds after which a process tries again to rebuild a stale value that another process was rebuilding."""
MAX_RETRIES = 10_000
"""How many such values a client remembers."""
CLOSE_CHECK_SECONDS = 0.5
"""How often a caller that waits for a flight looks whether the client was closed."""


class Flight(Generic[T]):
    """One build, or one wait for a build of another process, that the callers of this process share."""

    __slots__ = ("aborted", "background", "done", "error", "rebuild", "started", "value")

    def __init__(self, client: Client[Any], *, rebuild: bool, background: bool = False) -> None:
        self.started = client.runtime.now()
        self.rebuild = rebuild
        """Whether it builds in any case, even if there is a fresh value."""
        self.background = background
        """Whether its callers have a stale value: it may end without a new one."""
        self.done = client.runtime.event()
        self.value: T | None = None
        self.error: Exception | None = None
        self.aborted = False
        """Whether it was interrupted or cancelled: it has neither a value nor an error for others."""


class SingleFlight(Generic[T]):
    """One cached value of both APIs, as coroutines."""

    def __init__(self, client: Client[Any], key: str, build: Callable[[], Awaitable[T]], options: CacheOptions) -> None:
        self._client = client
        self.key = key
        self._build = build
        self._options = options
        self._values = CachedValues(client, key, options)
        self._name = self._values.name
        if options.lease_ttl is not None:
            check_ttl(options.lease_ttl, client.engine.traits, key)

    @property
    def _writer(self) -> BaseLock[Any]:
        """The builder's lock. It is made when it is needed: most calls only read a fresh value."""
        return BaseLock(self._client, self._name, ttl=self._options.lease_ttl)

    @property
    def _reader(self) -> BaseLock[Any] | None:
        """The lock of those that wait. Without readers on this engine they queue exclusively, read and release."""
        if not self._client.engine.traits.readers:
            return None
        return BaseLock(self._client, self._name, Mode.SHARED, ttl=self._options.lease_ttl)

    async def get(self) -> T:
        """Return the value: a fresh one, or a stale one while it is rebuilt in the background, or a new one."""
        self._client._check_open(self.key)
        found = await self._values.read()
        if found.fresh or (found.has_value and self._rebuild_in_background()):
            return found.value  # type: ignore[no-any-return]
        return await self._join(rebuild=False)

    async def refresh(self) -> T:
        """Build the value now, even if it is fresh, and return it."""
        self._client._check_open(self.key)
        return await self._join(rebuild=True)

    # ------------------------------------------------------------------ the callers of this process

    async def _join(self, *, rebuild: bool) -> T:
        """Wait for the flight of this process, or begin one; a caller's cancellation does not end it."""
        client = self._client
        if self._name in _building.get():
            raise WouldDeadlock(
                f"the build of {self.key!r} asks for its own result and would wait for itself", self.key
            )
        deadline = Deadline(client.runtime.now, self._options.timeout)
        asked = client.runtime.now()
        while True:
            flight: Flight[T] = Flight(client, rebuild=rebuild)
            with client.mutex:
                current: Flight[T] = client.flights.setdefault(self._name, flight)
            ours = current is flight
            if ours:
                try:
                    await client.runtime.run_shared(self._fly(flight, deadline), "fencelock-build")
                except BaseException:  # Ctrl-C in this thread: others must not wait for a build that nobody does
                    self._end(flight, aborted=not flight.done.is_set())
                    raise
            await self._wait_for(current, deadline)
            usable = current.rebuild and current.started >= asked if rebuild else not current.background
            if not ours and (not usable or current.aborted or isinstance(current.error, LockTimeout)):
                continue  # it was for something else, was interrupted, or the caller that began it had less time
            if current.aborted:
                raise BuildFailed(f"the build of {self.key!r} was cancelled", self.key, type="CancelledError")
            if current.error is not None:
                raise current.error
            return current.value  # type: ignore[return-value]

    async def _wait_for(self, flight: Flight[T], deadline: Deadline) -> None:
        """Wait until a flight has ended; raise LockTimeout or ClientClosed."""
        while not await flight.done.wait(deadline.at_most(CLOSE_CHECK_SECONDS)):
            if deadline.passed:
                raise LockTimeout(f"{self.key!r} was not built within {self._options.timeout:g} s", self.key)
            self._client._check_open(self.key)
        if flight.aborted:
            self._client._check_open(self.key)

    async def _fly(self, flight: Flight[T], deadline: Deadline) -> None:
        building = _building.set(_building.get() | {self._name})
        aborted = True
        try:
            flight.value = await self._obtain(deadline, rebuild=flight.rebuild)
            aborted = False
        except Exception as error:
            flight.error, aborted = error, False
        finally:
            _building.reset(building)
            self._end(flight, aborted=aborted)

    def _end(self, flight: Flight[T], *, aborted: bool) -> None:
        """End a flight: the next caller begins another one."""
        with self._client.mutex:
            flight.aborted = aborted
            if self._client.flights.get(self._name) is flight:
                del self._client.flights[self._name]
        flight.done.set()

    def _rebuild_in_background(self) -> bool:
        """Start a rebuild unless this or another process is at it; return False if that is impossible."""
        client = self._client
        if client.runtime.now() < client.rebuild_retries.get(self._name, 0.0):
            return True
        flight: Flight[T] = Flight(client, rebuild=False, background=True)
        with client.mutex:
            if client.flights.setdefault(self._name, flight) is not flight:
                return True
        try:
            client.runtime.spawn(self._fly_stale(flight), "fencelock-rebuild")
        except BaseException as error:
            self._end(flight, aborted=True)
            if not isinstance(error, RuntimeError):  # no more threads
                raise
            return False
        return True

    async def _fly_stale(self, flight: Flight[T]) -> None:
        """Rebuild a stale value if no other process does it. A failure is only logged: callers have the stale value."""
        building = _building.set(_building.get() | {self._name})
        try:
            await self._rebuild_stale()
        except Exception as error:
            log("cache", WARNING, f"{self.key!r} could not be rebuilt; the stale value stays: {error}", lock=self.key)
        finally:
            _building.reset(building)
            self._end(flight, aborted=False)

    # ------------------------------------------------------------------ the callers of the fleet

    async def _rebuild_stale(self) -> None:
        lease = await self._writer.try_acquire()
        if lease is None:
            # Another process rebuilds it: without a pause, every read would send an attempt until that one is done.
            retries = self._client.rebuild_retries
            if len(retries) >= MAX_RETRIES:
                retries.clear()
            retries[self._name] = self._client.runtime.now() + RETRY_SECONDS
            return
        try:
            found = await self._values.read()
            if not found.fresh and await self._values.read_error() is None:
                await self._build_and_store(lease, found)
        finally:
            await self._release(lease)

    async def _obtain(self, deadline: Deadline, *, rebuild: bool) -> T:
        """Build the value, or wait for another process that does."""
        lease = await self._writer.try_acquire()
        if lease is None and not rebuild and (reader := self._reader) is not None:
            reading = await reader.acquire(self._left(deadline))
            try:
                found = await self._values.read()
                if found.has_value:
                    return found.value  # type: ignore[no-any-return]
                if (error := await self._values.read_error()) is not None:
                    raise error
            finally:
                await self._release(reading)
        if lease is None:
            lease = await self._writer.acquire(self._left(deadline))
        try:
            found = await self._values.read()
            if not rebuild:
                if found.fresh:
                    return found.value  # type: ignore[no-any-return]
                if (error := await self._values.read_error()) is not None:
                    raise error
            value = await self._build_and_store(lease, found)
            if rebuild:
                await self._values.forget_error(lease.token)
            return value
        finally:
            await self._release(lease)

    def _left(self, deadline: Deadline) -> float | None:
        return None if deadline.at is None else deadline.at_most(self._options.timeout or 0.0)

    async def _build_and_store(self, lease: Any, found: Cached) -> T:
        """Build under the lease and store the value, unless the lease was lost meanwhile."""
        try:
            value = await self._build()
            data = self._values.encode(value)
            value = self._values.value_of(data)  # a tuple is a list for the builder, too
        except Exception as error:
            if not lease.is_lost():
                await self._values.store_error(error, lease.token)
            raise
        try:
            lease.check()
            newer = await self._values.store(data, lease.token, found.version)
        except FencelockError as error:
            # The caller has its value; only others have to build again.
            log("cache", WARNING, f"the new value of {self.key!r} was not stored: {error}", lock=self.key)
            return value
        return value if newer is None or not newer.has_value else newer.value  # type: ignore[no-any-return]

    async def _release(self, lease: Any) -> None:
        try:
            await lease._release()
        except FencelockError as error:
            log("cache", WARNING, str(error), lock=self.key)
