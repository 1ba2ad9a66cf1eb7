"""What else has a version: a key of Redis or etcd, a record of fencelock's engines, a resource behind HTTP."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fencelock.errors import EngineUnavailable, InvalidType, StaleToken
from fencelock.fences.etcd import coded
from fencelock.fences.redis import is_awaited as is_awaited_redis
from fencelock.lockfree.cell import Cell, Seen
from fencelock.lockfree.colour import settled
from fencelock.lockfree.idempotency_locks import is_awaited, records_of

NO_LEASE = 1
"""The lowest token: whoever writes under a lease has a higher one."""


class RedisKey(Cell["bytes | None"]):
    """A string of Redis, for a `redis.Redis` or a `redis.asyncio.Redis`. The value itself is the version.

    `ttl`: seconds that it lives after a write; None leaves that as it is.

    >>> def count(client):                                     # await it with redis.asyncio
    ...     return RedisKey(client, "visits").modify(lambda value: b"%d" % (int(value or 0) + 1))
    """

    def __init__(self, client: Any, key: str, *, ttl: float | None = None) -> None:
        self._client = client
        self._ttl = "" if ttl is None else str(max(1, round(ttl * 1000)))
        self.name = key
        self.awaited = is_awaited_redis(client)

    async def _read(self) -> Seen[bytes | None]:
        value = await settled(self._client.get(self.name))
        if isinstance(value, str):
            value = value.encode()  # a client with decode_responses
        return Seen(value, value)

    async def _write(self, value: bytes | None, version: bytes | None) -> bool:
        was = ("0", b"") if version is None else ("1", version)
        return bool(await settled(self._client.eval(_swap(), 1, self.name, *was, value, self._ttl)))


class EtcdKey(Cell["bytes | None"]):
    """A key of etcd, for a client of etcd3gw's. For asyncio, use `RecordKey` with a client of `fencelock.aio`.

    >>> def count(client):
    ...     return EtcdKey(client, "visits").modify(lambda value: b"%d" % (int(value or 0) + 1))
    """

    def __init__(self, client: Any, key: str) -> None:
        self._client = client
        self.name = key

    async def _read(self) -> Seen[bytes | None]:
        found = self._client.get(self.name, metadata=True)
        if not found:
            return Seen(None, 0)
        value, about = found[0]
        return Seen(value, int(about["mod_revision"]))

    async def _write(self, value: bytes | None, version: int) -> bool:
        key = coded(self.name)
        put = {"key": key, "value": coded(value or b"")}
        compare = {"key": key, "result": "EQUAL", "target": "MOD", "mod_revision": version}
        answer = self._client.transaction(
            {"compare": [compare], "success": [{"request_put": put}], "failure": []}
        )  # fmt: skip
        return bool(answer.get("succeeded"))


class RecordKey(Cell["bytes | None"]):
    """A record beside the locks of a client of `fencelock.connect` or `fencelock.aio.connect`.

    With a lease its token fences the write: whoever had the lock before is refused (StaleToken), and so is who has none.

    >>> with fencelock.connect("memory://records") as locks:
    ...     counter = RecordKey(locks, "counter")
    ...     _ = counter.modify(lambda value: b"%d" % (int(value or 0) + 1))
    ...     counter.modify(lambda value: b"%d" % (int(value or 0) + 1))
    b'2'
    """

    def __init__(self, locks: Any, key: str, *, ttl: float = 86400.0, lease: Any = None) -> None:
        self._records = records_of(locks, f"the record {key!r}")
        self._token = NO_LEASE if lease is None else lease.token
        self._ttl = ttl
        self.name = key
        self.awaited = is_awaited(locks)

    async def _read(self) -> Seen[bytes | None]:
        found = await self._records.read(self.name)
        return Seen(None, 0) if found is None else Seen(found.value, found.version)

    async def _write(self, value: bytes | None, version: int) -> bool:
        written = await self._records.write(self.name, value, token=self._token, ttl=self._ttl, expect=version)
        there = written.record
        # To read again would not help. What is not there has no other version: what was forgotten has a token in the way.
        if not written.done and (version == 0 if there is None else there.token > self._token):
            raise self._stale(None if there is None else there.token)
        return written.done

    def _stale(self, seen: int | None) -> StaleToken:
        by = "under a newer lease" if seen is None else f"under a lease with token {seen}"
        if self._token == NO_LEASE:
            message = f"the record {self.name!r} was written {by}, not without a lease: take the lock, and give lease=…"
            return StaleToken(message, self.name, seen=seen)
        message = f"the record {self.name!r} was written {by}, and this one has {self._token}: stop, and acquire anew"
        return StaleToken(message, self.name, token=self._token, seen=seen)


class HttpResource(Cell["bytes | None"]):
    """A resource behind HTTP that has an ETag and obeys If-Match; for httpx (both colours) and for a session of requests.

    The body is the value, None where there is nothing (404): then it is created with If-None-Match.

    >>> def add_line(client, url):                             # await it with httpx.AsyncClient
    ...     return HttpResource(client, url, headers={"Content-Type": "text/plain"}).modify(lambda body: body + b"more")
    """

    def __init__(self, client: Any, url: str, *, headers: dict[str, str] | None = None) -> None:
        kinds = [kind for kind in type(client).__mro__ if kind.__module__.partition(".")[0] in ("httpx", "requests")]
        if not kinds:
            raise InvalidType(
                f"an httpx.Client, httpx.AsyncClient or requests.Session is needed, not {type(client).__name__}"
            )
        self._body = "content" if kinds[0].__module__.startswith("httpx") else "data"
        self.awaited = any(kind.__name__ == "AsyncClient" for kind in kinds)
        self._client = client
        self._headers = headers or {}
        self.name = url

    async def _read(self) -> Seen[bytes | None]:
        answer = await settled(self._client.get(self.name))
        if answer.status_code == 404:
            return Seen(None, None)
        self._check(answer, "GET")
        tag = answer.headers.get("ETag")
        if not tag or tag.startswith("W/"):
            raise EngineUnavailable(
                f"{self.name!r} has {'only a weak' if tag else 'no'} ETag: nothing tells whether it was changed",
                self.name,
            )
        return Seen(answer.content, tag)

    async def _write(self, value: bytes | None, version: str | None) -> bool:
        condition = {"If-None-Match": "*"} if version is None else {"If-Match": version}
        headers = {**self._headers, **condition}
        answer = await settled(self._client.put(self.name, headers=headers, **{self._body: value}))
        if answer.status_code in (409, 412):
            return False
        self._check(answer, "PUT")
        return True

    def _check(self, answer: Any, what: str) -> None:
        if not 200 <= answer.status_code < 300:
            raise EngineUnavailable(f"{what} {self.name} was answered with {answer.status_code}", self.name)


def _swap() -> str:
    return files("fencelock.lockfree").joinpath("lua/swap.lua").read_text("utf-8")
