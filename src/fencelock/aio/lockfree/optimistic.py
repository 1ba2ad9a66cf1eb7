"""Optimistic versions, awaited. `fencelock.lockfree.optimistic` describes them."""

from __future__ import annotations

from typing import TypeVar

from fencelock.errors import VersionConflict
from fencelock.lockfree.etag import check_if_match, etag
from fencelock.lockfree.optimistic_sql import BaseSqlRow, Row
from fencelock.lockfree.optimistic_stores import BaseEtcdKey, BaseHttpResource, BaseRecordKey, BaseRedisKey
from fencelock.lockfree.versioned import BaseVersionedValue, Versioned
from fencelock.runtime.both_apis import AsyncioApi

__all__ = [
    "EtcdKey",
    "HttpResource",
    "RecordKey",
    "RedisKey",
    "SqlRow",
    "VersionConflict",
    "Versioned",
    "VersionedValue",
    "check_if_match",
    "etag",
]

T = TypeVar("T")


class VersionedValue(BaseVersionedValue[T], AsyncioApi):
    """A value that is read and written as a whole, and whose version shows whether others have written meanwhile.

    For a store of your own, write `async def _load` and `_store`.
    """


class SqlRow(BaseSqlRow, VersionedValue[Row]):
    """A row of a table with a version column, for a connection of asyncio.

    >>> async def withdraw(connection):
    ...     account = SqlRow(connection, "account", {"id": 7}, ["balance"])
    ...     return await account.update(lambda row: {"balance": row["balance"] - 10})
    """


class RedisKey(BaseRedisKey, VersionedValue["bytes | None"]):
    """A string of Redis, for a `redis.asyncio.Redis`. The value itself is the version.

    >>> async def count(client):
    ...     return await RedisKey(client, "visits").update(lambda value: b"%d" % (int(value or 0) + 1))
    """


class EtcdKey(BaseEtcdKey, VersionedValue["bytes | None"]):
    """A key of etcd, for a client whose `get` and `transaction` are `async def`, in the form of etcd3gw.

    >>> async def count(client):
    ...     return await EtcdKey(client, "visits").update(lambda value: b"%d" % (int(value or 0) + 1))
    """


class RecordKey(BaseRecordKey, VersionedValue["bytes | None"]):
    """A record beside the locks of a client of `fencelock.aio.connect`; with a lease, its token fences the write.

    >>> import fencelock.aio
    >>> async def main():
    ...     async with fencelock.aio.connect("memory://records-aio") as locks:
    ...         return await RecordKey(locks, "counter").update(lambda value: b"%d" % (int(value or 0) + 1))
    >>> asyncio.run(main())
    b'1'
    """


class HttpResource(BaseHttpResource, VersionedValue["bytes | None"]):
    """A resource behind HTTP that has an ETag and obeys If-Match; for an httpx.AsyncClient.

    >>> async def add_line(client, url):
    ...     return await HttpResource(client, url).update(lambda body: body + b"more")
    """
