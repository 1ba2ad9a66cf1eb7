"""Single flight: one builder of a value in the fleet; all other callers get its result, or the stale value immediately.

A value is a record. A builder holds the key's lock exclusively; other callers queue behind it as readers, so that its release
admits them all at once. A builder stores with its token and the version that it read under the lock: one that was paused
cannot overwrite a newer value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from fencelock.core.client import Client
from fencelock.core.clock import Deadline
from fencelock.core.log import WARNING, log
from fencelock.core.validation import check_ttl
from fencelock.errors import FencelockError, LockTimeout, WouldDeadlock
from fencelock.model import Mode
from fencelock.primitives.cached_values import Cached, CachedValues, CacheOptions
from fencelock.primitives.lock import LockFactory

T = TypeVar("T")


class Flight(Generic[T]):
    """One build, or one wait for a build of another process, that the callers of this process share."""

    __slots__ = ("done", "error", "task", "value")

    def __init__(self, client: Client[Any]) -> None:
        self.task: Hashable = None
        """The thread or task that builds."""
        self.done = client.runtime.event()
        self.value: T | None = None
        self.error: BaseException | None = None


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
    def _writer(self) -> LockFactory[Any]:
        """The builder's lock. It is made when it is needed: most calls only read a fresh value."""
        return LockFactory(self._client, self._name, ttl=self._options.lease_ttl)

    @property
    def _reader(self) -> LockFactory[Any] | None:
        """The lock of those that wait. Without readers on this engine they queue exclusively, read and release."""
        if not self._client.engine.traits.shared:
            return None
        return LockFactory(self._client, self._name, Mode.SHARED, ttl=self._options.lease_ttl)

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
        client, flights = self._client, self._client.flights
        deadline = Deadline(client.runtime.now, self._options.timeout)
        while True:
            with client.mutex:
                flight: Flight[T] | None = flights.get(self._name)
                ours = flight is None
                if flight is None:
                    flight = flights[self._name] = Flight(client)
            if ours:
                await client.runtime.run_detached(self._fly(flight, deadline, rebuild=rebuild), "fencelock-build")
            elif flight.task == client.runtime.current_task():
                raise WouldDeadlock(
                    f"the build of {self.key!r} asks for its own result and would wait for itself", self.key
                )
            timeout = None if deadline.at is None else deadline.at_most(self._options.timeout or 0.0)
            if not await flight.done.wait(timeout):
                raise LockTimeout(f"{self.key!r} was not built within {self._options.timeout:g} s", self.key)
            if isinstance(flight.error, LockTimeout) and not ours and not deadline.passed:
                continue  # the caller that began it had less time
            if flight.error is not None:
                raise flight.error
            return flight.value  # type: ignore[return-value]

    async def _fly(self, flight: Flight[T], deadline: Deadline, *, rebuild: bool) -> None:
        flight.task = self._client.runtime.current_task()
        try:
            flight.value = await self._obtain(deadline, rebuild=rebuild)
        except BaseException as error:
            flight.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._client.flights.pop(self._name, None)
            flight.done.set()

    def _rebuild_in_background(self) -> bool:
        """Start a rebuild unless this process is at it; return False if that is impossible."""
        client = self._client
        with client.mutex:
            if self._name in client.flights:
                return True
            flight: Flight[T] = Flight(client)
            client.flights[self._name] = flight
        try:
            client.runtime.spawn(self._fly_stale(flight), "fencelock-rebuild")
        except RuntimeError:  # no more threads
            client.flights.pop(self._name, None)
            return False
        return True

    async def _fly_stale(self, flight: Flight[T]) -> None:
        """Rebuild a stale value if no other process does it. A failure is only logged: callers have the stale value."""
        flight.task = self._client.runtime.current_task()
        try:
            flight.value = await self._rebuild_stale()
        except Exception as error:
            flight.error = error
            log("cache", WARNING, f"{self.key!r} could not be rebuilt; the stale value stays: {error}", lock=self.key)
        finally:
            self._client.flights.pop(self._name, None)
            flight.done.set()

    # ------------------------------------------------------------------ the callers of the fleet

    async def _rebuild_stale(self) -> T:
        lease = await self._writer.try_acquire()
        if lease is None:
            return (await self._values.read()).value  # type: ignore[no-any-return]
        try:
            found = await self._values.read()
            if found.fresh or await self._values.read_error() is not None:
                return found.value  # type: ignore[no-any-return]
            return await self._build_and_store(lease, found)
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
            return await self._build_and_store(lease, found)
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
