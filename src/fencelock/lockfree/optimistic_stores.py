"""Other values with a version: a key of Redis or etcd, a record of fencelock's engines, a resource behind HTTP."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fencelock.errors import EngineUnavailable, InvalidType, StaleToken
from fencelock.fences.core import credentials_of
from fencelock.fences.etcd import coded
from fencelock.fences.redis import check_redis_client
from fencelock.lockfree.idempotency_records import records_of
from fencelock.lockfree.versioned import BaseVersionedValue, Versioned, VersionedValue
from fencelock.sqlio import wrong_api

NO_LEASE = 1
"""The lowest token: every lease has a higher one."""


class BaseRedisKey(BaseVersionedValue["bytes | None"]):
    """What both APIs share."""

    def __init__(self, client: Any, key: str, *, ttl: float | None = None) -> None:
        check_redis_client(client, "lockfree", awaited=self._awaited)
        self._client = client
        self._ttl = "" if ttl is None else str(max(1, round(ttl * 1000)))
        self.name = key

    async def _load(self) -> Versioned[bytes | None]:
        value = await self._call(self._client.get, self.name)
        if isinstance(value, str):
            value = value.encode()  # a client with decode_responses
        return Versioned(value, value)

    async def _store(self, value: bytes | None, version: bytes | None) -> bool:
        expected = ("0", b"") if version is None else ("1", version)
        script = files("fencelock.lockfree").joinpath("lua/compare_and_set.lua").read_text("utf-8")
        return bool(await self._call(self._client.eval, script, 1, self.name, *expected, value, self._ttl))


class RedisKey(BaseRedisKey, VersionedValue["bytes | None"]):
    """A string of Redis, for a `redis.Redis`. The value itself is the version.

    `ttl`: seconds for which it lives after a write; None keeps the present time to live.

    >>> def count(client):
    ...     return RedisKey(client, "visits").update(lambda value: b"%d" % (int(value or 0) + 1))
    """


class BaseEtcdKey(BaseVersionedValue["bytes | None"]):
    """What both APIs share."""

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self.name = key

    async def _load(self) -> Versioned[bytes | None]:
        found = await self._call(self._client.get, self.name, metadata=True)
        if not found:
            return Versioned(None, 0)
        value, metadata = found[0]
        return Versioned(value, int(metadata["mod_revision"]))

    async def _store(self, value: bytes | None, version: int) -> bool:
        key = coded(self.name)
        put = {"request_put": {"key": key, "value": coded(value or b"")}}
        compare = {"key": key, "result": "EQUAL", "target": "MOD", "mod_revision": version}
        request = {"compare": [compare], "success": [put], "failure": []}
        return bool((await self._call(self._client.transaction, request)).get("succeeded"))


class EtcdKey(BaseEtcdKey, VersionedValue["bytes | None"]):
    """A key of etcd, for a client of etcd3gw.

    >>> def count(client):
    ...     return EtcdKey(client, "visits").update(lambda value: b"%d" % (int(value or 0) + 1))
    """


class BaseRecordKey(BaseVersionedValue["bytes | None"]):
    """What both APIs share."""

    def __init__(self, locks: Any, key: str, *, ttl: float = 86400.0, lease: Any = None) -> None:
        self._records = records_of(locks, f"the record {key!r}", awaited=self._awaited)
        self._lease = lease
        self._token = NO_LEASE if lease is None else credentials_of(lease).token
        self._ttl = ttl
        self.name = key

    async def _load(self) -> Versioned[bytes | None]:
        found = await self._records.read(self.name)
        return Versioned(None, 0) if found is None else Versioned(found.value, found.version)

    async def _store(self, value: bytes | None, version: int) -> bool:
        if self._lease is not None:
            credentials_of(self._lease)  # raises LeaseLost if it has ended meanwhile
        written = await self._records.write(self.name, value, token=self._token, ttl=self._ttl, expect=version)
        record = written.record
        # A higher token refused it, so reading again would not help. A missing record has no other version: the token of
        # one that was deleted did.
        if not written.done and (version == 0 if record is None else record.token > self._token):
            raise self._stale(None if record is None else record.token)
        return written.done

    def _stale(self, seen: int | None) -> StaleToken:
        by = "under a newer lease" if seen is None else f"under a lease with token {seen}"
        if self._token == NO_LEASE:
            message = f"the record {self.name!r} was written {by}: acquire the lock, and pass lease=…"
            return StaleToken(message, self.name, seen=seen)
        message = (
            f"the record {self.name!r} was written {by}, after token {self._token}: stop, and acquire the lock again"
        )
        return StaleToken(message, self.name, token=self._token, seen=seen)


class RecordKey(BaseRecordKey, VersionedValue["bytes | None"]):
    """A record beside the locks of a client of `fencelock.connect`.

    With a lease, its token fences the write: an earlier holder of the lock is refused (StaleToken), and so is a writer
    without a lease. A lease that has ended is refused, too (LeaseLost).

    >>> with fencelock.connect("memory://records") as locks:
    ...     counter = RecordKey(locks, "counter")
    ...     _ = counter.update(lambda value: b"%d" % (int(value or 0) + 1))
    ...     counter.update(lambda value: b"%d" % (int(value or 0) + 1))
    b'2'
    """


class BaseHttpResource(BaseVersionedValue["bytes | None"]):
    """What both APIs share."""

    def __init__(self, client: Any, url: str, *, headers: dict[str, str] | None = None) -> None:
        kinds = [kind for kind in type(client).__mro__ if kind.__module__.partition(".")[0] in ("httpx", "requests")]
        if not kinds:
            raise InvalidType(
                f"an httpx.Client, httpx.AsyncClient or requests.Session is needed, not {type(client).__name__}"
            )
        if any(kind.__name__ == "AsyncClient" for kind in kinds) is not self._awaited:
            raise wrong_api(client, "lockfree", awaited=self._awaited)
        self._body = "content" if kinds[0].__module__.startswith("httpx") else "data"
        self._client = client
        self._headers = headers or {}
        self.name = url

    async def _load(self) -> Versioned[bytes | None]:
        response = await self._call(self._client.get, self.name)
        if response.status_code == 404:
            return Versioned(None, None)
        self._check_status(response, "GET")
        tag = response.headers.get("ETag")
        if not tag or tag.startswith("W/"):
            raise EngineUnavailable(
                f"{self.name!r} has {'only a weak' if tag else 'no'} ETag, so a change of it cannot be noticed",
                self.name,
            )
        return Versioned(response.content, tag)

    async def _store(self, value: bytes | None, version: str | None) -> bool:
        condition = {"If-None-Match": "*"} if version is None else {"If-Match": version}
        options = {"headers": {**self._headers, **condition}, self._body: value}
        response = await self._call(self._client.put, self.name, **options)
        if response.status_code in (409, 412):
            return False
        self._check_status(response, "PUT")
        return True

    def _check_status(self, response: Any, method: str) -> None:
        if not 200 <= response.status_code < 300:
            raise EngineUnavailable(f"{method} {self.name} was answered with {response.status_code}", self.name)


class HttpResource(BaseHttpResource, VersionedValue["bytes | None"]):
    """A resource behind HTTP that has an ETag and obeys If-Match; for an httpx.Client or a requests.Session.

    The body is the value, None if the resource does not exist (404): then it is created with If-None-Match.

    >>> def add_line(client, url):
    ...     return HttpResource(client, url, headers={"Content-Type": "text/plain"}).update(lambda body: body + b"more")
    """
