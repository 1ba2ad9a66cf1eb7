"""Idempotency keys without a transaction: a lock excludes other runs, and a record, fenced by its token, stores the result.

A finished key is read without the lock, so that its replays do not wait for each other. A run that crashed leaves its
record without a result. The next run gets the lock with a higher token, and takes over; if the first run resumes, the
record refuses its lower token.
"""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any

from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.core.records import RECORD_MAX_BYTES, Records
from fencelock.errors import GuaranteeUnavailable, InvalidType, LockTimeout, StaleToken, WouldDeadlock
from fencelock.lockfree.idempotency_sql import Done, in_progress
from fencelock.primitives.lock import BaseLock
from fencelock.sqlio import kind_of, wrong_api

PREFIX = "idempotency:"

_log = logging.getLogger("fencelock.lockfree")


def is_client(thing: object) -> bool:
    """Return whether it is what `fencelock.connect` or `fencelock.aio.connect` returned."""
    return isinstance(getattr(thing, "_client", None), Client)


def client_of(locks: Any, *, awaited: bool) -> Client[Any]:
    """Return the client of `connect`; raise InvalidType for one of the other API."""
    if not is_client(locks):
        raise InvalidType(f"a client of fencelock.connect or fencelock.aio.connect is needed, not {kind_of(locks)}")
    if inspect.iscoroutinefunction(locks.close) is not awaited:
        raise wrong_api(locks, "lockfree", awaited=awaited)
    client: Client[Any] = locks._client
    return client


def records_of(locks: Any, what: str, *, awaited: bool) -> Records:
    """Return the records of a client's engine; raise GuaranteeUnavailable if it keeps none."""
    records: Records | None = getattr(client_of(locks, awaited=awaited).engine, "records", None)
    if records is None:
        raise GuaranteeUnavailable(
            f"{what} needs an engine that keeps records, and {locks.traits.engine} does not: use another one"
        )
    return records


class LockStore:
    """Stores one key with a lock and a record of an engine."""

    def __init__(self, locks: Any, key: str, *, awaited: bool) -> None:
        self._records = records_of(locks, f"the idempotency key {key!r}", awaited=awaited)
        self._client = client_of(locks, awaited=awaited)
        self._key = key
        self._lease: BaseLease | None = None
        self._fingerprint = ""

    async def claim(self, fingerprint: str, ttl: float, timeout: float | None) -> Done | None:
        """Claim the key; return the outcome of an earlier run, or None if this run must do the work. Raise KeyInProgress."""
        if (done := _done(await self._read())) is not None:
            return done
        mutex = BaseLock(self._client, PREFIX + self._key, timeout=timeout)
        try:
            lease = self._lease = await mutex.acquire()
        except (LockTimeout, WouldDeadlock) as error:
            # The run may have finished meanwhile, and others that waited for it hold the lock for a moment.
            if (done := _done(await self._read())) is not None:
                return done
            raise in_progress(self._key) from error
        mutex.enter_block(mutex.current_task(), lease)
        self._fingerprint = fingerprint
        stored = await self._read()
        if (done := _done(stored)) is not None:
            return done
        if stored.get("fingerprint", fingerprint) != fingerprint:
            return Done(stored["fingerprint"], "")  # a crashed run with another payload is refused like a finished one
        await self._write({"fingerprint": fingerprint}, ttl)
        return None

    async def finish(self, result: str, ttl: float) -> None:
        """Store the result for `ttl` seconds; raise LeaseLost or StaleToken if another run may have the key by now.

        If the result is too large, store that the run has finished, so that a replay does not do the work again.
        """
        assert self._lease is not None
        self._lease.check()
        finished: dict[str, str | None] = {"fingerprint": self._fingerprint, "result": result}
        if (size := len(_encoded(finished))) > RECORD_MAX_BYTES:
            _log.warning(
                "the result of %r has %d bytes, and a record takes %d: it was not stored, so replays cannot return it. Store "
                "large results elsewhere, and return their place",
                self._key,
                size,
                RECORD_MAX_BYTES,
            )
            finished["result"] = None
        await self._write(finished, ttl)

    async def leave(self, error: BaseException | None) -> None:
        """End the block and release the lock."""
        if self._lease is not None:
            await self._lease._exit_block(error)

    async def _read(self) -> dict[str, Any]:
        """Return the record: a fingerprint, and a result if the run has finished; an empty dict if there is no record."""
        found = await self._records.read(PREFIX + self._key)
        return {} if found is None else dict(json.loads(found.value))

    async def _write(self, what: dict[str, str | None], ttl: float) -> None:
        assert self._lease is not None
        token = self._lease.token
        written = await self._records.write(PREFIX + self._key, _encoded(what), token=token, ttl=ttl)
        if not written.done:
            seen = None if written.record is None else written.record.token
            raise StaleToken(
                f"another run with token {seen} has taken {self._key!r} over from token {token}: stop, and get its result",
                self._key,
            )


def _done(stored: dict[str, Any]) -> Done | None:
    return Done(stored["fingerprint"], stored["result"]) if "result" in stored else None


def _encoded(what: dict[str, str | None]) -> bytes:
    return json.dumps(what).encode()
