"""The second, optional port of an engine: small records that outlive their writers, fenced by tokens, each with an end.

A leader's value, the last run of a job, the outcome of a request: what has to be remembered beside a lock. An engine that
keeps records has them under `records`; they share its namespace, and nothing else with its locks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

VALUE_MAX_BYTES = 256 * 1024
"""Engines of consensus keep everything in memory and send it to every member."""


class Record(NamedTuple):
    """What is remembered under a key."""

    value: bytes
    token: int
    """The token of whoever wrote it last."""
    version: int
    """Another number after every write, always a higher one; never the same again, even if the record was gone between."""
    expires_in: float
    """Seconds, by the engine's view."""


class Written(NamedTuple):
    """What became of a write."""

    done: bool
    record: Record | None
    """What is there now: what was written, or what stood in the way. None: nothing is there, or no longer."""


class Records(Protocol):
    """Read and write, each in one atomic step. Errors are those of `Backend`."""

    async def read(self, key: str) -> Record | None:
        """Return what is remembered under the key."""
        ...

    async def write(
        self, key: str, value: bytes | None, *, token: int, ttl: float, expect: int | None = None
    ) -> Written:
        """Remember a value for so long, or None: forget it.

        It is refused if somebody with a higher token has written, even if that was to forget: a forgotten record keeps its
        token for the ttl that it was forgotten with. Given `expect`, it is also refused unless that is the version there is;
        0 stands for no record. It runs once: if the reply is lost, raise OutcomeUnknown. Repeated with `expect`, it would
        find its own version in the way, and one without would write over what others wrote meanwhile.
        """
        ...


class Entry(NamedTuple):
    """A record as an engine keeps it: one whose value is None is forgotten, and only its token counts."""

    value: bytes | None
    token: int
    version: int
    ends: float
    """By the engine's clock."""

    def seen(self, now: float) -> Record | None:
        """Return what whoever reads it at that time gets to see."""
        if self.value is None or self.ends <= now:
            return None
        return Record(self.value, self.token, self.version, self.ends - now)

    def allows(self, now: float, token: int, expect: int | None) -> bool:
        """Return whether it may be written over: the one rule for all engines."""
        if self.ends <= now:
            return not expect
        if token < self.token:
            return False
        return expect is None or expect == (0 if self.value is None else self.version)
