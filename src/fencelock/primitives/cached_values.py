"""The values of single flight: their options, and how they are stored in records."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypedDict

from fencelock.core.acquire import attach_name
from fencelock.core.client import Client
from fencelock.core.log import WARNING, log
from fencelock.core.records import RECORD_MAX_BYTES, Record, records_of
from fencelock.core.validation import check_seconds
from fencelock.errors import BuildFailed, FencelockError, InvalidArgument, InvalidType
from fencelock.primitives.api_hints import check_keywords
from fencelock.primitives.keys import record_key

MAX_MESSAGE = 1000
INVALIDATED_SECONDS = 3600.0
"""Seconds for which an invalidation prevents a builder that began before it from storing its value."""
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
    """What a caller reads: a value, fresh or stale, or nothing."""

    record: Record | None
    value: Any = None
    has_value: bool = False
    fresh: bool = False

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
    """How long values are fresh, how long callers get stale ones while one of them rebuilds, and how long a caller waits."""

    ttl: float
    stale: float = 0.0
    timeout: float | None = None
    error_for: float = 1.0
    codec: Codec = json
    lease_ttl: float | None = None


def cache_options(function: str, key: str, options: SingleFlightOptions) -> CacheOptions:
    """Return the checked options of `single_flight` or `cached`, or raise InvalidArgument."""
    check_keywords(function, options)
    if "ttl" not in options:
        raise InvalidType(f"{function}() needs ttl=, the seconds for which a value is fresh, as in ttl=60", key)
    given = CacheOptions(**options)
    codec = given.codec
    fresh = check_seconds(given.ttl, "ttl", key, zero=False)
    old = check_seconds(given.stale, "stale", key, zero=True)
    remember = check_seconds(given.error_for, "error_for", key, zero=True)
    if fresh is None or old is None or remember is None or old > MAX_STALE:
        raise InvalidArgument(f"{key!r}: ttl, stale and error_for must be numbers of seconds below ten years", key)
    if not callable(getattr(codec, "dumps", None)) or not callable(getattr(codec, "loads", None)):
        raise InvalidType(f"{key!r}: codec must have dumps() and loads(), as json and pickle have", key)
    waiting = check_seconds(given.timeout, "timeout", key, zero=True)
    return CacheOptions(fresh, old, waiting, remember, codec, given.lease_ttl)


class CachedValues:
    """The record of one cached value, and of its last failed build."""

    def __init__(self, client: Client[Any], key: str, options: CacheOptions) -> None:
        self._key = key
        self._options = options
        self._records = records_of(client.engine, f"single_flight({key!r})", key)
        self.name = record_key("cache", key)
        """The key of the record, which is also the name of the builder's lock."""

    @property
    def _error_key(self) -> str:
        """The key of the last failure. It is made when it is needed: most calls only read a fresh value."""
        return record_key("cache-error", self._key)

    async def read(self) -> Cached:
        """Return the value, or nothing if there is none."""
        with attach_name(self._key):
            return self._decode(await self._records.read(self.name))

    async def store(self, data: bytes, token: int, version: int) -> Cached | None:
        """Store an encoded value over this version; return what is stored instead if another writer was faster."""
        ttl = self._options.ttl + self._options.stale
        written = await self._records.write(self.name, data, token=token, ttl=ttl, expect=version)
        return None if written.done else self._decode(written.record)

    async def read_error(self) -> BuildFailed | None:
        """Return the error of the last build, while it is remembered."""
        with attach_name(self._key):
            record = await self._records.read(self._error_key)
        if record is None:
            return None
        kind, message = json.loads(record.value[1:])
        return BuildFailed(
            f"{self._key!r} could not be built: {kind}: {message}", self._key, type=kind, message=message
        )

    async def store_error(self, error: Exception, token: int) -> None:
        """Store the failure for those that wait, if the engine can."""
        seconds = self._options.error_for
        if not seconds:
            return
        content = json.dumps([type(error).__name__, str(error)[:MAX_MESSAGE]]).encode()
        try:
            await self._records.write(self._error_key, Kind.ERROR.value + content, token=token, ttl=seconds)
        except FencelockError as failure:
            log("cache", WARNING, f"the failed build of {self._key!r} was not recorded: {failure}", lock=self._key)

    async def forget_error(self, token: int) -> None:
        """Forget an earlier failure, as a build has succeeded since."""
        try:
            if await self._records.read(self._error_key) is not None:
                await self._records.write(self._error_key, None, token=token, ttl=1.0)
        except FencelockError as failure:
            log("cache", WARNING, f"the failed build of {self._key!r} is still recorded: {failure}", lock=self._key)

    def _decode(self, record: Record | None) -> Cached:
        if record is None or record.value[:1] != Kind.VALUE.value:
            return Cached(record)
        header, _, encoded = record.value.partition(b"\n")
        # The record outlives its freshness by `stale` seconds, as its writer had it.
        return Cached(record, self._options.codec.loads(encoded), True, record.expires_in > float(header[1:]))

    def value_of(self, content: bytes) -> Any:
        """Return the value of what `encode` returned: what every caller gets, the builder, too."""
        return self._options.codec.loads(content.partition(b"\n")[2])

    def encode(self, value: object) -> bytes:
        """Return the value as it is stored; raise InvalidType if the codec cannot, or InvalidArgument if it is too large."""
        try:
            data = self._options.codec.dumps(value)
            encoded = data.encode() if isinstance(data, str) else data
            content = Kind.VALUE.value + f"{self._options.stale!r}\n".encode() + encoded
        except Exception as error:
            raise InvalidType(
                f"{self._key!r}: the codec cannot encode a value of type {type(value).__name__}: {error}; build a value that "
                "it can encode, or pass codec=",
                self._key,
            ) from error
        if len(content) > RECORD_MAX_BYTES:
            raise InvalidArgument(
                f"{self._key!r}: the value has {len(encoded)} bytes, and at most {RECORD_MAX_BYTES - 100} can be shared; "
                "cache a reference to it instead",
                self._key,
            )
        return content


async def invalidate(client: Client[Any], key: str) -> None:
    """Remove a value, and keep a builder that has begun before from storing its own."""
    records, name = records_of(client.engine, f"single_flight({key!r})", key), record_key("cache", key)
    client._check_open(key)
    with attach_name(key):
        while True:
            record = await records.read(name)
            token, expect = (0, 0) if record is None else (record.token, record.version)
            data = Kind.INVALIDATED.value
            written = await records.write(name, data, token=token, ttl=INVALIDATED_SECONDS, expect=expect)
            if written.done:
                return
