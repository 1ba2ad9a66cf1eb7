"""The relay of an outbox: one process of the fleet delivers, at least once, and in order for each key.

A lock of fencelock elects that process. The fence adds what a lock cannot promise: a relay that was replaced while it was
stopped cannot delete messages as delivered, and its messages carry its token, so that a receiver can refuse them, too.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar

from fencelock.core.lease import BaseLease
from fencelock.core.runtime import Event
from fencelock.errors import EngineUnavailable, FencelockError, InvalidType, LeaseLost, LockTimeout, StaleToken
from fencelock.fences.sql import SqlFence
from fencelock.fences.sql.base import BaseSqlFence
from fencelock.lockfree.idempotency_records import client_of
from fencelock.lockfree.outbox import BaseOutbox, InvalidPayload, Message
from fencelock.primitives.lock import BaseLock
from fencelock.runtime.both_apis import Api, BlockingApi, both_apis
from fencelock.sqlio import adapt, kind_of, wrong_api
from fencelock.sqlio.borrowed import borrowed_connection, check_connect

__all__ = ["Relay"]

STOP_CHECK_INTERVAL = 5.0
"""Seconds after which a relay that waits for the lock checks whether it was stopped."""
MAX_UNMARKED = 1.0
"""Seconds of deliveries before they are deleted from the outbox: after a crash as many may be repeated."""
FIRST_PAUSE = 0.1
MAX_PAUSE = 60.0
MAX_FAILING_KEYS = 50
"""With more failing keys, the receiver itself has failed, and all keys wait."""

_log = logging.getLogger("fencelock")


@asynccontextmanager
async def _held(lock: BaseLock[Any], timeout: float | None) -> AsyncIterator[BaseLease]:
    """Hold the lock for a block; asyncio cancels the block when the lease is lost."""
    lease: BaseLease = lock.enter_block(lock.current_task(), await lock.acquire(timeout))
    error: BaseException | None = None
    try:
        yield lease
    except BaseException as raised:
        error = raised
        raise
    finally:
        await lock.pop_block()._exit_block(error)


class _FailingKeys:
    """The keys whose last delivery failed, and how long each has to wait."""

    def __init__(self, now: Callable[[], float], random: Callable[[], float]) -> None:
        self._now = now
        self._random = random
        self._until: dict[str, tuple[float, float]] = {}

    def waiting(self) -> list[str]:
        """Return the keys that have to wait."""
        return [key for key, (until, _) in self._until.items() if until > self._now()]

    def failed(self, key: str) -> None:
        """Let a key wait, longer after every failure."""
        pause = min(self._until[key][1] * 2, MAX_PAUSE) if key in self._until else FIRST_PAUSE
        self._until[key] = (self._now() + pause * (0.5 + self._random() / 2), pause)

    def delivered(self, key: str) -> None:
        """Forget the failures of a key."""
        self._until.pop(key, None)


class BaseRelay(Api):
    """What both APIs share."""

    _fence: ClassVar[BaseSqlFence[Any]]

    def __init__(
        self,
        outbox: BaseOutbox[Any],
        connect: Callable[[], Any],
        deliver: Callable[[Message], Any],
        locks: Any,
        *,
        poll: float = 0.5,
        batch: int = 100,
        ttl: float | None = None,
    ) -> None:
        self._client = client_of(locks, awaited=self._awaited)
        if outbox._awaited is not self._awaited:
            raise wrong_api(outbox, "lockfree", awaited=self._awaited)
        is_async = any(inspect.iscoroutinefunction(one) for one in (deliver, type(deliver).__call__))
        if is_async is not self._awaited:
            kind = "a coroutine function (async def)" if self._awaited else "a plain function"
            raise InvalidType(f"deliver must be {kind}, not {kind_of(deliver)}")
        self._outbox = outbox
        self._connect = check_connect(connect, "Relay")
        self._deliver = deliver
        self._poll = poll
        self._batch = batch
        self._resource = f"outbox:{outbox.name}"
        self._lock: BaseLock[Any] = BaseLock(self._client, self._resource, ttl=ttl)
        self._stopped = False
        self._wakeup: Event | None = None

    def stop(self) -> None:
        """Make `run` end after the present delivery, or within seconds while it waits for the lock; from any thread."""
        self._stopped = True
        if self._wakeup is not None:
            self._wakeup.set()

    @both_apis
    async def run(self) -> None:
        """Deliver until `stop` is called. Failures are logged and repeated; an error in the configuration is raised."""
        runtime = self._client.runtime
        wakeup = self._wakeup = runtime.event()
        pause = FIRST_PAUSE
        while not self._stopped:
            since = runtime.now()
            try:
                async with _held(self._lock, STOP_CHECK_INTERVAL) as lease:
                    _log.info("%s relays %r (token %d)", lease.owner, self._outbox.name, lease.token)
                    await self._serve(lease, wakeup)
            except LockTimeout:
                continue
            except (LeaseLost, StaleToken) as error:
                _log.warning("this relay of %r was replaced: %s", self._outbox.name, error)
            except EngineUnavailable as error:
                _log.warning("the relay of %r waits for its engine: %s", self._outbox.name, error)
            except (FencelockError, TypeError):
                raise
            except Exception as error:
                _log.warning("the relay of %r starts again: %s", self._outbox.name, error, exc_info=error)
            if runtime.now() - since > MAX_PAUSE:
                pause = FIRST_PAUSE  # it has worked for a while
            if not self._stopped:
                await wakeup.wait(pause * (0.5 + runtime.random() / 2))
                pause = min(pause * 2, MAX_PAUSE)
        self._stopped = False

    @both_apis
    async def drain(self, timeout: float | None = None) -> int:
        """Deliver all present messages once, and return their number; raise LockTimeout if another relay works meanwhile.

        For a job that starts every minute, and for tests. Errors are raised.
        """
        async with _held(self._lock, timeout) as lease:
            return await self._serve(lease, None)

    async def _serve(self, lease: BaseLease, wakeup: Event | None) -> int:
        """Deliver while this relay holds the lock: until it is stopped or, without an event, until no message is left."""
        async with borrowed_connection(self._connect, "lockfree", awaited=self._awaited) as connection:
            try:
                return await self._serve_on(connection, lease, wakeup)
            finally:
                with suppress(Exception):  # the connection may be what failed
                    await self._call(self._fence.restore, connection)  # it may go back to a pool

    async def _serve_on(self, connection: Any, lease: BaseLease, wakeup: Event | None) -> int:
        runtime = self._client.runtime
        failing = _FailingKeys(runtime.now, runtime.random)
        count, first = 0, True
        done: list[int] = []
        failure: Exception | None = None
        while True:
            stopping = wakeup is not None and self._stopped
            waiting = failing.waiting()
            limit = 0 if stopping or len(waiting) > MAX_FAILING_KEYS else self._batch
            messages = await self._delete_and_read(connection, lease, done, limit, waiting, first=first)
            first = False
            if failure is not None:
                raise failure
            if stopping or (wakeup is None and not messages):
                return count
            done, failure = await self._deliver_all(messages, lease, failing, stoppable=wakeup is not None)
            count += len(done)
            if wakeup is not None:
                failure = None  # it was logged, and is tried again
                if not done:
                    await wakeup.wait(self._poll)

    async def _delete_and_read(
        self, connection: Any, lease: BaseLease, done: list[int], limit: int, waiting: list[str], *, first: bool
    ) -> list[Message]:
        """Delete delivered messages and read the next ones, in one transaction that the fence refuses to a replaced relay.

        The first transaction sets the mark before anything is read. Later ones check only if they delete.
        """
        adapter = adapt(connection, "lockfree", awaited=self._awaited)
        try:
            lease.check()
            await adapter.begin()
            if first or done:
                await self._call(self._fence.check, connection, lease, self._resource)
            if done:
                await self._outbox._delete(adapter, done)
            messages = await self._outbox._read_next(adapter, lease.token, limit, waiting) if limit else []
            await adapter.commit()
        except BaseException:
            with suppress(Exception):
                await adapter.rollback()
            raise
        return messages

    async def _deliver_all(
        self, messages: list[Message], lease: BaseLease, failing: _FailingKeys, *, stoppable: bool
    ) -> tuple[list[int], Exception | None]:
        """Deliver messages for a while; return the delivered ones, and a failure: the other messages of its key wait."""
        runtime = self._client.runtime
        done: list[int] = []
        failed: set[str] = set()
        failure: Exception | None = None
        started = runtime.now()
        for message in messages:
            if (stoppable and self._stopped) or runtime.now() - started > MAX_UNMARKED:
                break
            if message.key in failed:
                continue
            lease.check()
            try:
                if isinstance(message.payload, InvalidPayload):
                    raise FencelockError(f"message {message.id} of {message.key!r} is no JSON: {message.payload.why}")
                await self._call(self._deliver, message)
            except Exception as error:
                lease.check()  # a LeaseLost or StaleToken of the receiver is a failure like any other
                failure = error
                _log.warning("message %d of %r was not delivered: %s", message.id, message.key, error, exc_info=error)
                failed.add(message.key)
                failing.failed(message.key)
            else:
                done.append(message.id)
                failing.delivered(message.key)
        return done, failure


class Relay(BaseRelay, BlockingApi):
    """Delivers the messages of an outbox while it holds the outbox's lock. Start one in every process.

    `connect` opens a connection for the relay, not in autocommit mode, or a context manager around one, such as a pool's
    `connection`; the relay closes it, or gives it back. `deliver` is called with one `Message` after the other. When it
    returns, the message is delivered; when it raises, the messages of that key wait and are tried again, with growing
    pauses, while it delivers other keys. `locks` is a client of `fencelock.connect`.

    A delivery can always happen twice: let the receiver remember the `id`, or refuse old `token`s.

    >>> import sqlite3
    >>> from fencelock.lockfree.outbox import Outbox
    >>> from fencelock.lockfree.schema import create_tables
    >>> db = sqlite3.connect(":memory:", check_same_thread=False); create_tables(db)
    >>> with db:
    ...     Outbox("mail").append(db, "ann", "welcome")
    ...     Outbox("mail").append(db, "ann", "news")
    >>> with fencelock.connect("memory://relay") as locks:
    ...     Relay(Outbox("mail"), lambda: db, lambda message: print(message.payload), locks).drain()
    welcome
    news
    2
    """

    _fence = SqlFence()
