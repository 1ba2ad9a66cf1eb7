"""Optimistic versions: read, change, and write only if nobody else has written; else begin again.

For what is rarely wanted by two at once, this is cheaper than a lock, and nobody can be stopped while holding one. Under
constant contention a lock is better: every loser has worked for nothing.

`SqlRow` (a version column), `RedisKey`, `EtcdKey`, `RecordKey` (any engine of fencelock's that keeps records) and
`HttpResource` (ETag and If-Match) all have `read`, `write` and `modify`; `Cell` is for one of your own. `etag` and
`check_if_match` are for whoever serves HTTP.
"""

from fencelock.errors import VersionConflict
from fencelock.lockfree.cell import Cell, Seen
from fencelock.lockfree.etag import check_if_match, etag
from fencelock.lockfree.optimistic_sql import SqlRow
from fencelock.lockfree.optimistic_stores import EtcdKey, HttpResource, RecordKey, RedisKey

__all__ = [
    "Cell",
    "EtcdKey",
    "HttpResource",
    "RecordKey",
    "RedisKey",
    "Seen",
    "SqlRow",
    "VersionConflict",
    "check_if_match",
    "etag",
]
