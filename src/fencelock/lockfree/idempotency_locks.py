"""Idempotency keys where nothing is transactional: a lock keeps the others out, a record fenced by its token remembers.

A finished key is read without the lock, so that its replays do not wait for each other. A run that crashed leaves its record
without a result. Whoever gets the lock after it has a higher token, and only that lets it take over; the first one, should it
come back, is refused by its lower token when it wants to write its result.
"""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any

from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.core.records import VALUE_MAX_BYTES, Records
from fencelock.errors import GuaranteeUnavailable, LockTimeout, StaleToken
from fencelock.lockfree.idempotency_sql import Done, in_progress
from fencelock.primitives.lock import LockFactory

PREFIX = "idempotency:"

_log = logging.getLogger("fencelock.lockfree")


def records_of(locks: Any, what: str) -> Records:
    """Return the records of a client's engine; raise GuaranteeUnavailable if it keeps none."""
    records: Records | None = getattr(locks._client.engine, "records", None)
    if records is None:
        raise GuaranteeUnavailable(
            f"{what} needs an engine that keeps records, and {locks.traits.engine} does not: use another one"
        )
    return records


def is_client(thing: object) -> bool:
    """Return whether it is what `fencelock.connect` or `fencelock.aio.connect` returned."""
    return isinstance(getattr(thing, "_client", None), Client)


def is_awaited(locks: Any) -> bool:
    """Return whether a client is one of `fencelock.aio`."""
    return inspect.iscoroutinefunction(locks.close)


class LockStore:
    """Keeps one key by a lock and a record of an engine."""

    def __init__(self, locks: Any, key: str) -> None:
        self.awaited = is_awaited(locks)
        self._records = records_of(locks, f"the idempotency key {key!r}")
        self._client: Client[Any] = locks._client
        self._key = key
        self._lease: BaseLease | None = None
        self._fingerprint = ""

    async def claim(self, fingerprint: str, ttl: float, patience: float | None) -> Done | None:
        """Return what an earlier run left, or None: it is for us to run. Raise KeyInProgress."""
        if (done := self._done(await self._stored())) is not None:
            return done
        mutex = LockFactory(self._client, PREFIX + self._key, timeout=patience)
        try:
            lease = self._lease = await mutex.acquire()
        except LockTimeout as error:
            # The run may have finished meanwhile, and others who waited for it hold the lock for a moment.
            if (done := self._done(await self._stored())) is not None:
                return done
            raise in_progress(self._key) from error
        mutex.entered(mutex.current_task(), lease)
        self._fingerprint = fingerprint
        stored = await self._stored()
        if (done := self._done(stored)) is not None:
            return done
        if stored.get("fingerprint", fingerprint) != fingerprint:
            return Done(stored["fingerprint"], "")  # a crashed run of something else: refused like a finished one
        await self._write({"fingerprint": fingerprint}, ttl)
        return None

    async def finish(self, result: str, ttl: float) -> None:
        """Store the result for so long; raise LeaseLost or StaleToken if somebody else may have the key by now.

        If it is too large, store that the run is finished, so that a replay does not do the work again.
        """
        assert self._lease is not None
        self._lease.check()
        finished: dict[str, str | None] = {"fingerprint": self._fingerprint, "result": result}
        if (size := len(_encoded(finished))) > VALUE_MAX_BYTES:
            _log.warning(
                "the result of %r has %d bytes, and a record takes %d: it was not stored, so replays cannot return it. Store "
                "large results elsewhere, and let the result say where",
                self._key,
                size,
                VALUE_MAX_BYTES,
            )
            finished = {"fingerprint": self._fingerprint, "result": None}
        await self._write(finished, ttl)

    async def leave(self, error: BaseException | None) -> None:
        """End the block and release the lock."""
        if self._lease is not None:
            await self._lease._exit_block(error)

    async def _stored(self) -> dict[str, Any]:
        """Return what the record has: a fingerprint, and a result if the run is finished; nothing if there is no record."""
        found = await self._records.read(PREFIX + self._key)
        return {} if found is None else dict(json.loads(found.value))

    @staticmethod
    def _done(stored: dict[str, Any]) -> Done | None:
        return Done(stored["fingerprint"], stored["result"]) if "result" in stored else None

    async def _write(self, what: dict[str, str | None], ttl: float) -> None:
        assert self._lease is not None
        token = self._lease.token
        written = await self._records.write(PREFIX + self._key, _encoded(what), token=token, ttl=ttl)
        if not written.done:
            seen = None if written.record is None else written.record.token
            raise StaleToken(
                f"{self._key!r} was taken over by a holder with token {seen}, and this one has {token}: stop, and ask again "
                "for its result",
                self._key,
            )


def _encoded(what: dict[str, str | None]) -> bytes:
    return json.dumps(what).encode()
