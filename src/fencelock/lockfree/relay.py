"""The relay of an outbox: one of the fleet delivers, at least once, and in order for each key.

Our own lock makes it one. What the lock cannot promise, the fence does: a relay that was replaced while it was stopped can
mark nothing as delivered, and its messages carry its token, so that a receiver can refuse them as well.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.core.runtime import Event
from fencelock.errors import EngineUnavailable, FencelockError, InvalidType, LeaseLost, LockTimeout, StaleToken
from fencelock.fences.sql import SqlFence
from fencelock.lockfree.colour import in_colour, settled, world_of
from fencelock.lockfree.idempotency_locks import is_awaited
from fencelock.lockfree.outbox import Message, Outbox, Unreadable
from fencelock.primitives.lock import LockFactory
from fencelock.sqlio import link
from fencelock.sqlio.lent import check_connect, lent
from fencelock.sqlio.lent import is_awaited as is_awaited_connection

__all__ = ["Relay"]

IN_LINE = 5.0
"""Seconds after which one that waits for its turn looks whether it is to stop."""
UNMARKED = 1.0
"""Seconds for which deliveries may go unmarked: as many may be repeated after a crash."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 60.0
BLOCKED_MAX = 50
"""Keys that fail, from which on it is the receiver that fails, and all wait."""

_log = logging.getLogger("fencelock")


class _Held:
    """Holds the lock for a block of either colour: where it can be, the body is interrupted when the lease is lost."""

    def __init__(self, mutex: LockFactory[Any], patience: float | None) -> None:
        self._mutex = mutex
        self._patience = patience

    async def __aenter__(self) -> BaseLease:
        lease: BaseLease = self._mutex.entered(self._mutex.current_task(), await self._mutex.acquire(self._patience))
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._mutex.leaving()._exit_block(error)


class _Blocked:
    """Keys whose last delivery failed, and how long each has to wait."""

    def __init__(self, now: Callable[[], float], random: Callable[[], float]) -> None:
        self._now = now
        self._random = random
        self._until: dict[str, tuple[float, float]] = {}

    def keys(self) -> list[str]:
        """Return the keys that have to wait."""
        return [key for key, (until, _) in self._until.items() if until > self._now()]

    def failed(self, key: str) -> None:
        """Let it wait, longer every time."""
        pause = min(self._until[key][1] * 2, LONGEST_PAUSE) if key in self._until else FIRST_PAUSE
        self._until[key] = (self._now() + pause * (0.5 + self._random() / 2), pause)

    def delivered(self, key: str) -> None:
        """Forget that it failed."""
        self._until.pop(key, None)


class Relay:
    """Delivers the messages of an outbox, while it is the one of the fleet that does. Start one in every process.

    `connect` gives a connection of the relay's own, not in autocommit mode, or a context manager around one, such as a pool's
    `connection`; the relay closes it, or gives it back. `deliver` is called with one
    `Message` after the other. When it returns, the message is delivered; when it raises, the messages of that key wait and
    are tried again, ever more slowly, while those of other keys go on. `locks` is a client of `fencelock.connect`, or of
    `fencelock.aio.connect`: then `run` and `drain` are to be awaited, `connect` and `deliver` may be `async def`, and a plain
    `deliver` is called in a thread, so that it does not keep the event loop from renewing leases.

    A delivery can always happen twice: have the receiver remember the `id`, or refuse old `token`s.

    >>> import sqlite3
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

    def __init__(
        self,
        outbox: Outbox,
        connect: Callable[[], Any],
        deliver: Callable[[Message], object | Awaitable[object]],
        locks: Any,
        *,
        poll: float = 0.5,
        batch: int = 100,
        ttl: float | None = None,
    ) -> None:
        self._outbox = outbox
        self._connect = check_connect(connect, "a relay")
        self._deliver = deliver
        self._client: Client[Any] = locks._client
        self._awaited = is_awaited(locks)
        self._is_async = any(inspect.iscoroutinefunction(one) for one in (deliver, type(deliver).__call__))
        # Not the client's: slow deliveries would take the threads that its engine renews leases with.
        self._threads = world_of(awaited=self._awaited)
        self._poll = poll
        self._batch = batch
        self._resource = f"outbox:{outbox.name}"
        self._mutex: LockFactory[Any] = LockFactory(self._client, self._resource, ttl=ttl)
        self._stopped = False
        self._bell: Event | None = None

    def run(self) -> Any:
        """Deliver until `stop` is called. What goes wrong is logged and tried again; a mistake in the setup is raised."""
        return in_colour(self._run(), awaited=self._awaited)

    def drain(self, timeout: float | None = None) -> Any:
        """Deliver what there is now, once, and return how many that were; raise LockTimeout if another is at it for so long.

        For a job that is started every minute, and for tests. Errors come out.
        """
        return in_colour(self._drain(timeout), awaited=self._awaited)

    def stop(self) -> None:
        """Have `run` end after the delivery that is under way. From any thread; within seconds if it waits for its turn."""
        self._stopped = True
        if self._bell is not None:
            self._bell.set()

    async def _run(self) -> None:
        runtime = self._client.runtime
        bell = self._bell = runtime.event()
        pause = FIRST_PAUSE
        while not self._stopped:
            since = runtime.now()
            try:
                async with _Held(self._mutex, IN_LINE) as lease:
                    _log.info("%s relays %r (token %d)", lease.owner, self._outbox.name, lease.token)
                    await self._serve(lease, bell)
            except LockTimeout:
                continue
            except (LeaseLost, StaleToken) as error:
                _log.warning("this relay of %r was replaced: %s", self._outbox.name, error)
            except EngineUnavailable as error:
                _log.warning("the relay of %r waits for its locks: %s", self._outbox.name, error)
            except (FencelockError, TypeError):
                raise
            except Exception as error:
                _log.warning("the relay of %r starts anew: %s", self._outbox.name, error, exc_info=error)
            if runtime.now() - since > LONGEST_PAUSE:
                pause = FIRST_PAUSE  # it went well for a while
            if not self._stopped:
                await bell.wait(pause * (0.5 + runtime.random() / 2))
                pause = min(pause * 2, LONGEST_PAUSE)
        self._stopped = False

    async def _drain(self, timeout: float | None) -> int:
        async with _Held(self._mutex, timeout) as lease:
            return await self._serve(lease, None)

    async def _serve(self, lease: BaseLease, bell: Event | None) -> int:
        """Deliver as long as we are the one: until we are stopped or, without a bell, until there is nothing more."""
        runtime = self._client.runtime
        blocked = _Blocked(runtime.now, runtime.random)
        given = self._connect()
        if not self._awaited and is_awaited_connection(given):
            with suppress(Exception):
                given.close()  # a coroutine would be missed
            raise InvalidType(
                "`connect` is for asyncio, and these locks are not: give the relay those of fencelock.aio"
            )
        lending = lent(given)
        connection = await lending.__aenter__()
        count, first = 0, True
        done: list[int] = []
        failure: Exception | None = None
        try:
            while True:
                stopping = bell is not None and self._stopped
                waiting = blocked.keys()
                most = 0 if stopping or len(waiting) > BLOCKED_MAX else self._batch
                messages = await self._turn(connection, lease, done, most, waiting, first=first)
                first = False
                if failure is not None:
                    raise failure
                if stopping or (bell is None and not messages):
                    return count
                done, failure = await self._deliver_all(messages, lease, blocked, stoppable=bell is not None)
                count += len(done)
                if bell is not None:
                    failure = None  # it was logged, and is tried again
                if bell is not None and not done:
                    await bell.wait(self._poll)
        finally:
            with suppress(Exception):  # it may be what failed
                await settled(SqlFence().restore(connection))  # it may go back to a pool
            with suppress(Exception):
                await lending.__aexit__(None, None, None)
            await self._threads.close()

    async def _turn(
        self, connection: Any, lease: BaseLease, done: list[int], most: int, waiting: list[str], *, first: bool
    ) -> list[Message]:
        """Mark what was delivered and read what is next, in one transaction that a relay that was replaced cannot begin.

        The first one keeps older relays from marking, before anything is read. Those that only look need not write.
        """
        to = link(connection)
        try:
            lease.check()
            if first or done:
                await settled(SqlFence().check(connection, lease, self._resource))
            if done:
                await self._outbox.forget(to, done)
            messages = await self._outbox.next(to, lease.token, most, waiting) if most else []
            await settled(connection.commit())
        except BaseException:
            with suppress(Exception):
                await settled(connection.rollback())
            raise
        return messages

    async def _deliver_all(
        self, messages: list[Message], lease: BaseLease, blocked: _Blocked, *, stoppable: bool
    ) -> tuple[list[int], Exception | None]:
        """Deliver one after the other for a while; return which were, and a failure: the rest of that key has to wait."""
        runtime = self._client.runtime
        done: list[int] = []
        failed: set[str] = set()
        failure: Exception | None = None
        started = runtime.now()
        for message in messages:
            if (stoppable and self._stopped) or runtime.now() - started > UNMARKED:
                break
            if message.key in failed:
                continue
            lease.check()
            try:
                if isinstance(message.payload, Unreadable):
                    raise FencelockError(f"message {message.id} of {message.key!r} is no JSON: {message.payload.why}")
                await self._deliver_one(message)
            except Exception as error:
                lease.check()  # a LeaseLost or a StaleToken of the receiver's own is a failure like any other
                failure = error
                _log.warning("message %d of %r was not delivered: %s", message.id, message.key, error, exc_info=error)
                failed.add(message.key)
                blocked.failed(message.key)
            else:
                done.append(message.id)
                blocked.delivered(message.key)
        return done, failure

    async def _deliver_one(self, message: Message) -> None:
        """Call `deliver`, under asyncio in a thread unless it is `async def`. A thread is waited for after a loss, too."""
        if self._is_async:
            await settled(self._deliver(message))
        else:
            await settled(await self._threads.run_blocking(self._deliver, message))
