"""Records on Redis: one string each, with an expiry of its own, in the bucket of its key."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from math import ceil
from typing import Any

from fencelock.core.engine import never_repeated
from fencelock.core.records import Record, Written
from fencelock.engines.redis.links import Links
from fencelock.engines.redis.scripts import load

PATIENCE = 5.0

RECORD = load("record")


class RedisRecords:
    """`fencelock.core.records.Records`."""

    def __init__(self, links: Links, base: Callable[[str], str]) -> None:
        self._links = links
        self._base = base

    async def read(self, key: str) -> Record | None:
        """Look."""
        _, found = await self._links.run(RECORD, RECORD.call((self._base(key),), (key,)), PATIENCE)
        return _record(found)

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Write the record if the token and the expected version allow it, in one script that runs once."""
        text = "" if value is None else f"={b64encode(value).decode()}"  # words are text
        args = (key, text, token, ceil(ttl * 1000), "" if expect is None else expect)
        with never_repeated("the write", "Read it", key):
            done, found = await self._links.run_once(RECORD, RECORD.call((self._base(key),), args), PATIENCE)
        return Written(bool(done), _record(found))


def _record(found: Any) -> Record | None:
    if not found:
        return None
    token, version, text, left = found
    return Record(b64decode(text[1:]), int(token), int(version), left / 1000)
