"""Optimistic versions: read, change, and write only if no other writer came between; otherwise repeat.

Where two writers rarely meet, this is cheaper than a lock, and no holder can be stopped while it holds one. Under constant
contention a lock is better, as every loser has worked in vain.

`SqlRow` (a version column), `RedisKey`, `EtcdKey`, `RecordKey` (any engine that keeps records) and `HttpResource` (ETag and
If-Match) all have `read`, `write` and `update`; `VersionedValue` is the base class for a store of your own. `etag` and
`check_if_match` are for HTTP servers.
"""

from fencelock.errors import VersionConflict
from fencelock.lockfree.etag import check_if_match, etag
from fencelock.lockfree.optimistic_sql import SqlRow
from fencelock.lockfree.optimistic_stores import EtcdKey, HttpResource, RecordKey, RedisKey
from fencelock.lockfree.versioned import Versioned, VersionedValue

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
