"""Single flight: one builder of a value in the fleet; all other callers get its result, or the stale value immediately.

A value is a record. A builder holds the key's lock exclusively; other callers queue behind it as readers, so that its release
admits them all at once. A builder stores with its token and the version that it read under the lock: one that was paused
cannot overwrite a newer value.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Hashable
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar

from fencelock.core.acquire import attach_name
from fencelock.core.client import Client
from fencelock.core.clock import Deadline
from fencelock.core.log import WARNING, log
from fencelock.core.records import VALUE_MAX_BYTES, Record, Records
from fencelock.core.validation import check_seconds
from fencelock.errors import (
    BuildFailed,
    FencelockError,
    GuaranteeUnavailable,
    InvalidArgument,
    InvalidType,
    LockTimeout,
    WouldDeadlock,
)
from fencelock.model import Mode
from fencelock.primitives.keys import record_key
from fencelock.primitives.lock import LockFactory

T = TypeVar("T")

MAX_MESSAGE = 1000
INVALIDATED_SECONDS = 3600.0
"""How long an invalidation keeps a builder that began before it from storing its value."""
MAX_STALE = 10 * 365 * 86400.0


class Codec(Protocol):
    """Turns values into bytes or text and back: the modules `json` and `pickle`, for example."""

    def dumps(self, value: Any, /) -> bytes | str: ...
    def loads(self, data: bytes, /) -> Any: ...


class Kind(Enum):
    """What a record says."""

    VALUE = b"v"
    ERROR = b"e"
    """The last build failed."""
    INVALIDATED = b"i"


class Cached(NamedTuple):
    """What a caller reads: a value, fresh or stale; a remembered error; or nothing."""

    record: Record | None
    value: Any = None
    has_value: bool = False
    fresh: bool = False
    error: BuildFailed | None = None

    @property
    def version(self) -> int:
        """What the next write has to name."""
        return 0 if self.record is None else self.record.version


class _Required(TypedDict):
    ttl: float


class SingleFlightOptions(_Required, total=False):
    """The options of `single_flight` and `cached`; see `Locks.single_flight`."""

    stale: float
    timeout: float | None
    error_for: float
    codec: Codec
    lease_ttl: float | None


class CacheOptions(NamedTuple):
    """How long values are fresh, how long they are given out while one caller rebuilds them, and how waiting ends."""

    ttl: float
    stale: float
    timeout: float | None
    error_for: float
    codec: Codec
    lease_ttl: float | None


def cache_options(
    key: str,
    *,
    ttl: object,
    stale: object = 0.0,
    timeout: object = None,
    error_for: object = 1.0,
    codec: object = json,
    lease_ttl: float | None = None,
) -> CacheOptions:
    """Return checked options, or raise InvalidArgument."""
    fresh = check_seconds(ttl, "ttl", key, zero=False)
    old = check_seconds(stale, "stale", key, zero=True)
    remember = check_seconds(error_for, "error_for", key, zero=True)
    if fresh is None or old is None or remember is None or old > MAX_STALE:
        raise InvalidArgument(f"{key!r}: ttl, stale and error_for must be numbers of seconds below ten years", key)
    if not callable(getattr(codec, "dumps", None)) or not callable(getattr(codec, "loads", None)):
        raise InvalidType(f"{key!r}: codec must have dumps() and loads(), as json and pickle have", key)
    waiting = check_seconds(timeout, "timeout", key, zero=True)
    return CacheOptions(fresh, old, waiting, remember, codec, lease_ttl)  # type: ignore[arg-type]


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
        self._name = record_key("cache", key)
        self._error_key = record_key("cache-error", key)
        self._records = records_of(client, key)
        self._writer = LockFactory[Any](client, self._name, ttl=options.lease_ttl)
        shared = client.engine.traits.shared
        # Without readers on this engine, waiters queue exclusively: each reads the value and releases.
        self._reader = LockFactory[Any](client, self._name, Mode.SHARED, ttl=options.lease_ttl) if shared else None

    async def get(self) -> T:
        """Return the value: a fresh one, or a stale one while it is rebuilt in the background, or a new one."""
        self._client._check_open(self.key)
        found = await self._read()
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
            return (await self._read()).value  # type: ignore[no-any-return]
        try:
            found = await self._read()
            if found.fresh or await self._remembered_error() is not None:
                return found.value  # type: ignore[no-any-return]
            return await self._build_and_store(lease, found)
        finally:
            await self._release(lease)

    async def _obtain(self, deadline: Deadline, *, rebuild: bool) -> T:
        """Build the value, or wait for another process that does."""
        lease = await self._writer.try_acquire()
        if lease is None and self._reader is not None and not rebuild:
            reading = await self._reader.acquire(self._left(deadline))
            try:
                found = await self._read()
                if found.has_value:
                    return found.value  # type: ignore[no-any-return]
                if (error := await self._remembered_error()) is not None:
                    raise error
            finally:
                await self._release(reading)
        if lease is None:
            lease = await self._writer.acquire(self._left(deadline))
        try:
            found = await self._read()
            if not rebuild:
                if found.fresh:
                    return found.value  # type: ignore[no-any-return]
                if (error := await self._remembered_error()) is not None:
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
            data = self._encode(value)
        except Exception as error:
            await self._remember(error, lease.token)
            raise
        ttl = self._options.ttl + self._options.stale
        try:
            lease.check()
            written = await self._records.write(self._name, data, token=lease.token, ttl=ttl, expect=found.version)
        except FencelockError as error:
            # The caller has its value; only others have to build again.
            log("cache", WARNING, f"the new value of {self.key!r} was not stored: {error}", lock=self.key)
            return value
        newer = None if written.done else self._decode(written.record)
        return value if newer is None or not newer.has_value else newer.value

    async def _remember(self, error: Exception, token: int) -> None:
        """Store the failure for those that wait, if the engine can."""
        seconds = self._options.error_for
        if not seconds:
            return
        content = json.dumps([type(error).__name__, str(error)[:MAX_MESSAGE]]).encode()
        try:
            await self._records.write(self._error_key, Kind.ERROR.value + content, token=token, ttl=seconds)
        except FencelockError as failure:
            log("cache", WARNING, f"the failed build of {self.key!r} was not recorded: {failure}", lock=self.key)

    async def _remembered_error(self) -> BuildFailed | None:
        with attach_name(self.key):
            record = await self._records.read(self._error_key)
        if record is None:
            return None
        kind, message = json.loads(record.value[1:])
        return BuildFailed(f"{self.key!r} could not be built: {kind}: {message}", self.key, type=kind, message=message)

    async def _release(self, lease: Any) -> None:
        try:
            await lease._release()
        except FencelockError as error:
            log("cache", WARNING, str(error), lock=self.key)

    # ------------------------------------------------------------------ records

    async def _read(self) -> Cached:
        with attach_name(self.key):
            return self._decode(await self._records.read(self._name))

    def _decode(self, record: Record | None) -> Cached:
        if record is None or record.value[:1] != Kind.VALUE.value:
            return Cached(record)
        header, _, data = record.value[1:].partition(b"\n")
        # The record outlives its freshness by `stale` seconds, as its writer had it.
        return Cached(record, self._options.codec.loads(data), True, record.expires_in > float(header))

    def _encode(self, value: T) -> bytes:
        data = self._options.codec.dumps(value)
        encoded = data.encode() if isinstance(data, str) else data
        content = Kind.VALUE.value + f"{self._options.stale!r}\n".encode() + encoded
        if len(content) > VALUE_MAX_BYTES:
            raise InvalidArgument(
                f"{self.key!r}: the value has {len(encoded)} bytes, and at most {VALUE_MAX_BYTES - 100} can be shared; "
                "cache a reference to it instead",
                self.key,
            )
        return content


def records_of(client: Client[Any], key: str) -> Records:
    """Return the records of an engine, or raise GuaranteeUnavailable."""
    records: Records | None = getattr(client.engine, "records", None)
    if records is None:
        raise GuaranteeUnavailable(
            f"{key!r}: {client.engine.traits.engine} has no records, so it shares no values", key
        )
    return records


async def invalidate(client: Client[Any], key: str) -> None:
    """Remove a value, and keep a builder that has begun before from storing its own."""
    records, name = records_of(client, key), record_key("cache", key)
    client._check_open(key)
    with attach_name(key):
        while True:
            record = await records.read(name)
            token, expect = (0, 0) if record is None else (record.token, record.version)
            data = Kind.INVALIDATED.value
            written = await records.write(name, data, token=token, ttl=INVALIDATED_SECONDS, expect=expect)
            if written.done:
                return
