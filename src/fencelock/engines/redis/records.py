"""Records on Redis: one string each, with its own expiry, in the bucket of its key."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from math import ceil
from typing import Any

from fencelock.core.engine import never_repeated
from fencelock.core.records import Record, Written
from fencelock.engines.redis.pool import RedisPool
from fencelock.engines.redis.scripts import load

REPLY_TIMEOUT = 5.0

RECORD = load("record")


class RedisRecords:
    """`fencelock.core.records.Records` on Redis."""

    def __init__(self, pool: RedisPool, bucket_key: Callable[[str], str]) -> None:
        self._pool = pool
        self._bucket_key = bucket_key

    async def read(self, key: str) -> Record | None:
        """Return the record, or None if there is none."""
        _, found = await self._pool.run(RECORD, RECORD.call((self._bucket_key(key),), (key,)), REPLY_TIMEOUT)
        return _record(found)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Write the record if the token and the expected version allow it, in one script that runs once."""
        text = "" if value is None else f"={b64encode(value).decode()}"  # the arguments of a command are text
        args = (key, text, token, ceil(ttl * 1000), "" if expect is None else expect)
        with never_repeated("the write", "Read it", key):
            command = RECORD.call((self._bucket_key(key),), args)
            done, found = await self._pool.run(RECORD, command, REPLY_TIMEOUT, once=True)
        return Written(bool(done), _record(found))


def _record(found: Any) -> Record | None:
    if not found:
        return None
    token, version, text, left = found
    return Record(b64decode(text[1:]), int(token), int(version), left / 1000)
