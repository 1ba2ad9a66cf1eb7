"""Records, an optional protocol of an engine: small values that outlive their writers, fenced by tokens, with an expiry.

A leader's value, the last run of a job, the outcome of a request: what a primitive stores beside a lock. An engine with
records has them as `records`; they share its namespace, and nothing else with its locks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fencelock.core.engine import Engine
from fencelock.errors import GuaranteeUnavailable

RECORD_MAX_BYTES = 256 * 1024
"""The largest value: etcd and ZooKeeper keep all data in memory and send it to every member."""
UNFENCED_TOKEN = 1
"""The token of records without a lock, whose writes are ordered by versions alone."""
FOREVER = 100 * 365.25 * 86400
"""The ttl of a record without expiry: a hundred years. It is below the longest ttl of every engine."""


class Record(NamedTuple):
    """The value of a key, with its token and version."""

    value: bytes
    token: int
    """The token of the last writer."""
    version: int
    """A number that rises with every write and never repeats, even if the record was deleted in between."""
    expires_in: float
    """Seconds, by the engine's clock."""


class Written(NamedTuple):
    """The result of a write."""

    done: bool
    record: Record | None
    """The stored record: the one that was written, or the one that prevented it. None if there is no record."""


class Records(Protocol):
    """Read and write, each in one atomic step. Errors are those of `Engine`."""

    async def read(self, key: str) -> Record | None:
        """Return the record of a key, or None."""
        ...

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Store a value for `ttl` seconds; None deletes it.

        It is refused if a writer with a higher token has written or deleted the record: a deleted record keeps its token for
        the ttl of the deletion. With `expect`, it is also refused unless the record has that version; 0 means no record. It
        runs once: if the reply is lost, raise OutcomeUnknown. A repetition with `expect` would be refused because of its own
        first write, and one without would overwrite what others wrote meanwhile.
        """
        ...


def records_of(engine: Engine, what: str, name: str | None = None) -> Records:
    """Return the records of an engine; raise GuaranteeUnavailable if it has none."""
    records: Records | None = getattr(engine, "records", None)
    if records is None:
        raise GuaranteeUnavailable(
            f"{what} needs an engine that keeps records, and {engine.traits.engine} does not: use another one", name
        )
    return records


class StoredRecord(NamedTuple):
    """A record as an engine stores it. With the value None it is deleted, and only its token counts."""

    value: bytes | None
    token: int
    version: int
    ends: float
    """By the engine's clock."""

    def seen(self, now: float) -> Record | None:
        """Return the record for a reader at this time, or None if it is deleted or expired."""
        if self.value is None or self.ends <= now:
            return None
        return Record(self.value, self.token, self.version, self.ends - now)

    def allows(self, now: float, token: int, expect: int | None) -> bool:
        """Return whether a write may replace it. All engines use this rule."""
        if self.ends <= now:
            return not expect  # it counts as absent: a writer without `expect`, or with 0 (no record), may write
        if token < self.token:
            return False
        return expect is None or expect == (0 if self.value is None else self.version)
