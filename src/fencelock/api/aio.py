"""The asyncio API: the names of the blocking API, to be awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, NoReturn, ParamSpec, TypeVar, Unpack

from fencelock.api.aio_lock import Lease, Lock, RWLock
from fencelock.core.client import Client
from fencelock.core.urls import open_engine, resolve, shown
from fencelock.core.validation import (
    check_callback,
    check_coroutine_function,
    check_limit,
    check_mode_name,
    check_name,
    warn_long_ttl,
)
from fencelock.core.watch import StopSignal, check_stop
from fencelock.model import LossReason, Mode, Snapshot, Traits
from fencelock.primitives.api_hints import AsyncioOnly, check_keywords, no_keyword
from fencelock.primitives.lock import BaseLock, CommonOptions, LockOptions, WaitOptions
from fencelock.primitives.locked import check_template, name_template
from fencelock.runtime.asyncio import AsyncioRuntime

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from fencelock.api.aio_cache import CachedFunction
    from fencelock.api.aio_election import Election
    from fencelock.api.aio_jobs import Once, Schedule
    from fencelock.api.aio_multi import MultiLock
    from fencelock.api.aio_rate_limit import RateLimit
    from fencelock.core.urls import Database
    from fencelock.primitives.cached_values import SingleFlightOptions

T = TypeVar("T")
P = ParamSpec("P")


class Locks(AsyncioOnly):
    """A client: the locks of one engine and namespace. `connect` makes it; tasks may share it.

    >>> async def main():
    ...     async with connect("memory://locks") as locks, locks.lock("order:42"):
    ...         return [name async for name in locks.names(prefix="order:")]
    >>> asyncio.run(main())
    ['order:42']
    """

    def __init__(self, client: Client[Lease], url: object) -> None:
        self._client = client
        self._url = shown(url, client.engine)

    @property
    def traits(self) -> Traits:
        """What the engine promises: the guarantee of its tokens, whether it is fair, the ttls that it accepts."""
        return self._client.engine.traits

    @property
    def owner(self) -> str:
        """The label of this client in `inspect`."""
        return self._client.owner

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        renew: bool = True,
        max_hold: float | None = None,
        stall_after: float | None = None,
        reentrant: bool = False,
        purpose: Literal["efficiency", "correctness"] = "efficiency",
        **unknown: Never,
    ) -> Lock:
        """Return a lock on a name: 1 to 1024 bytes of UTF-8 without control characters. It does not acquire the lock.

        `ttl`: seconds after which the lock of a dead process is free (the client renews it in the background); by default
        the client's, between `traits.ttl_min` and `traits.ttl_max` (0.1 s and a day). `timeout`: seconds to wait; 0 tries
        once, None waits for ever. `renew=False`: the lease expires after its ttl. `max_hold`: seconds after which the lease
        is lost even if renewals succeed. `stall_after`: seconds after which a holder that does not call `lease.progress()` is
        no longer renewed. `reentrant`: the task that holds the lock may acquire it again.
        `purpose="correctness"`: refuse an engine whose tokens could repeat after a failure.
        """
        if unknown:
            raise no_keyword("lock", unknown)
        options = LockOptions(
            ttl=ttl,
            timeout=timeout,
            renew=renew,
            max_hold=max_hold,
            stall_after=stall_after,
            reentrant=reentrant,
            purpose=purpose,
        )
        return Lock(BaseLock(self._client, name, **options))

    def rwlock(self, name: str, **options: Unpack[LockOptions]) -> RWLock:
        """Return a reader-writer lock: many readers or one writer, first come, first served. The options are `lock`'s."""
        check_keywords("rwlock", options)
        return RWLock(
            Lock(BaseLock(self._client, name, Mode.SHARED, **options)),
            Lock(BaseLock(self._client, name, Mode.EXCLUSIVE, **options)),
        )

    def semaphore(self, name: str, limit: int, **options: Unpack[WaitOptions]) -> Lock:
        """Return a lock that at most `limit` hold at a time, first come, first served. The options are `lock`'s.

        Contenders with different limits respect their own; that is logged once and shown by `inspect`.
        """
        check_keywords("semaphore", options)
        return Lock(BaseLock(self._client, name, Mode.PERMIT, check_limit(limit, check_name(name)), **options))

    def multi(
        self, *names: str, read: Iterable[str] = (), write: Iterable[str] = (), **options: Unpack[WaitOptions]
    ) -> MultiLock:
        """Return a lock on several names, all or nothing: at most 32 names. Those in `read` are only read.

        Duplicates count once, a name to read and to write is written, and all contenders acquire in one global order. The
        timeout is for all names together. The options are `lock`'s.
        """
        from fencelock.api.aio_multi import Group, MultiLock
        from fencelock.primitives.multi import BaseMultiLock, modes_of

        check_keywords("multi", options)
        return MultiLock(BaseMultiLock(self._client, Group, modes_of(names, read, write), **options))

    def election(self, name: str, *, value: str = "", **options: Unpack[WaitOptions]) -> Election:
        """Return an election. `value`: at most 1024 bytes that others see while this candidate leads, such as an address."""
        from fencelock.api.aio_election import Election
        from fencelock.primitives.election import BaseElection

        check_keywords("election", options)
        return Election(BaseElection(self._client, name, value, **options))

    def once(
        self,
        name: str,
        slot: str,
        *,
        keep: float = 90 * 86400.0,
        attempts: int = 1,
        again: bool = False,
        **options: Unpack[CommonOptions],
    ) -> Once:
        """Return one run of a job in the whole fleet: a slot is any text, such as a day, and runs at most `attempts` times.

        `keep`: seconds for which the run is remembered. A run that raises is failed, and one whose worker died is abandoned;
        each uses up an attempt. `again`: run a finished slot on purpose. The other options are `lock`'s.
        """
        from fencelock.api.aio_jobs import Once
        from fencelock.primitives.once import BaseOnce

        check_keywords("once", options)
        return Once(
            BaseOnce(
                self._client,
                name,
                slot,
                keep=keep,
                attempts=attempts,
                again=again,
                **options,
            )
        )

    def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: float | None = None,
        tz: str = "UTC",
        catch_up: Literal["latest", "all", "none"] = "latest",
        within: float | None = 3600.0,
        overlap: Literal["skip", "wait"] = "skip",
        attempts: int = 1,
        **options: Unpack[CommonOptions],
    ) -> Schedule:
        """Return a schedule: each slot runs once in the whole fleet, whatever the clocks of its processes say.

        `cron`: an expression in the time zone `tz` (needs the extra `cron`). `every`: seconds, as multiples since 1970.
        `catch_up`: which slots to run that were due while no process watched. `within`: seconds after which a slot is given
        up. `overlap`: whether a slot that is due during another run is skipped or waits. `attempts`: how often a slot may run
        if runs fail or their workers die. The other options are `lock`'s.
        """
        from fencelock.api.aio_jobs import Schedule
        from fencelock.primitives.schedule import BaseSchedule

        check_keywords("schedule", options)
        return Schedule(
            BaseSchedule(
                self._client,
                name,
                cron=cron,
                every=every,
                tz=tz,
                catch_up=catch_up,
                within=within,
                overlap=overlap,
                attempts=attempts,
                **options,
            )
        )

    def rate_limit(
        self,
        name: str,
        n: int,
        *,
        per: float = 1.0,
        burst: int = 1,
        on_error: Literal["raise", "allow"] = "raise",
        **unknown: Never,
    ) -> RateLimit:
        """Return a rate limit for the whole fleet: `n` calls per `per` seconds, evenly, and `burst` of them at once.

        Any period of `per` seconds has at most n + burst calls: for a hard limit L, use n = L - burst.
        `on_error="allow"`: calls go while the engine cannot be reached.
        """
        from fencelock.api.aio_rate_limit import RateLimit
        from fencelock.primitives.rate_limit import BaseRateLimit, make_limit

        if unknown:
            raise no_keyword("rate_limit", unknown)
        return RateLimit(BaseRateLimit(self._client, [make_limit(name, n, per, burst)], on_error))

    def rate_limits(self, *limits: RateLimit) -> RateLimit:
        """Return several limits as one: a call is charged to all of them together or to none."""
        from fencelock.api.aio_rate_limit import RateLimit
        from fencelock.primitives.rate_limit import BaseRateLimit

        given = [limit._limit for limit in limits]
        on_error: Literal["raise", "allow"] = "allow" if all(limit.on_error == "allow" for limit in given) else "raise"
        return RateLimit(BaseRateLimit(self._client, [part for limit in given for part in limit.limits], on_error))

    async def single_flight(
        self, key: str, build: Callable[[], Awaitable[T]], **options: Unpack[SingleFlightOptions]
    ) -> T:
        """Return the value of a key: one caller in the fleet builds it, all others get its result.

        `ttl`: seconds for which a value is fresh. `stale`: seconds after that for which callers get the old value at once,
        while one of them rebuilds it in the background. `timeout`: seconds to wait for another builder; then LockTimeout.
        `error_for`: seconds for which a failed build is remembered: callers in other processes get BuildFailed, and no
        builder tries again. `codec`: has `dumps` and `loads`; json by default: every caller gets what
        `loads` returns, the builder, too. `lease_ttl`: the ttl of the builder's lock.
        """
        from fencelock.primitives.cached_values import cache_options
        from fencelock.primitives.single_flight import SingleFlight

        check_coroutine_function(build, "build")

        return await SingleFlight(self._client, key, build, cache_options("single_flight", key, options)).get()

    def cached(
        self, key: str, **options: Unpack[SingleFlightOptions]
    ) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], CachedFunction[P, T]]:
        """Return a decorator: calls of the function share their results in the whole fleet, as with `single_flight`.

        `{argument}` in the key stands for the call's argument. The function has `invalidate(*args)` and `refresh(*args)`.

        >>> async def main():
        ...     async with connect("memory://cached") as locks:
        ...         @locks.cached("report:{id}", ttl=60, stale=600)
        ...         async def report(id):
        ...             return f"report {id}"
        ...         return await report(7)
        >>> asyncio.run(main())
        'report 7'
        """
        from fencelock.api.aio_cache import cached_function

        return cached_function(self._client, key, options)

    async def invalidate(self, key: str) -> None:
        """Remove the value of a key. A build that has begun before is not stored."""
        from fencelock.primitives.cached_values import invalidate

        await invalidate(self._client, key)

    def locked(
        self, name: str, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Return a decorator: each call of the function holds the lock. The options are those of `lock`.

        `{argument}` in the name stands for the call's argument.

        >>> async def main():
        ...     async with connect("memory://locked") as locks:
        ...         @locks.locked("report:{day}", timeout=5)
        ...         async def report(day):
        ...             return [name async for name in locks.names()]
        ...         return await report("monday")
        >>> asyncio.run(main())
        ['report:monday']
        """
        check_template(name)
        check_keywords("locked", options)

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            name_of = name_template(name, function, awaited=True)

            @wraps(function)
            async def call(*args: P.args, **kwargs: P.kwargs) -> T:
                async with self.lock(name_of(*args, **kwargs), **options):
                    return await function(*args, **kwargs)

            return call

        return decorate

    async def inspect(self, name: str) -> Snapshot:
        """Return the holders and waiters of a name."""
        return await self._client.inspect(name)

    def names(self, prefix: str = "") -> AsyncIterator[str]:
        """Iterate over the names that have a holder or a waiter."""
        return self._client.names(prefix)

    def watch(self, name: str, stop: StopSignal | None = None) -> AsyncIterator[Snapshot]:
        """Iterate over the states of a name: the current one, then the newest one after each change, within a second.

        States that lasted less than that may be skipped, and times are not changes. The iteration ends when `stop` is set or
        the client is closed; an outage of the engine is logged, and the iteration goes on after it.
        """
        return self._client.watch(name, check_stop(stop))

    def assert_held(self, name: str, mode: Literal["exclusive", "shared", "permit"] = "exclusive") -> None:
        """Raise NotHeld unless this client holds the name now: for code that must run under a lock. It asks no server."""
        self._client.assert_held(name, check_mode_name(mode, name))

    async def force_release(self, name: str, *, reason: str) -> int:
        """Take the lock away from its holders; return their number. The reason is logged, and their leases are lost."""
        return await self._client.force_release(name, reason)

    async def close(self) -> None:
        """Release all leases and close the connections. Safe to call again; a `with` block does it."""
        await self._client.close()

    async def __aenter__(self) -> Locks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Locks {self._url}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fencelock client cannot be sent to another process; call connect() there")


def connect(
    url: str | Redis | Database | None = None,
    *,
    namespace: str = "fencelock",
    ttl: float = 30.0,
    owner: str | None = None,
    on_lost: Callable[[Lease, LossReason], object] | None = None,
    **unknown: Never,
) -> Locks:
    """Return a client for the engine that the URL names. It connects on first use.

    Without a URL: $FENCELOCK_URL, else SQLite in the user's state folder. Instead of a URL it accepts a
    `redis.asyncio.Redis`, a connection or pool of psycopg, a connection of PyMySQL, an engine of SQLAlchemy or a connection
    of Django: the client connects with the same arguments, and opens its own connections. `namespace` separates applications
    on one engine; `ttl` is the default of its locks; `owner` is a label for people (by default host and process id).
    `on_lost(lease, reason)` is called once, on the event loop, for every lost lease, and for a multi-lock once with its
    group, except for those that close() ends.

    >>> async def main():
    ...     async with connect("memory://connect", owner="worker-1") as locks:
    ...         async with locks.lock("order:42") as lease:
    ...             return (await locks.inspect("order:42")).holders[0].owner
    >>> asyncio.run(main())
    'worker-1'
    """
    if unknown:
        raise no_keyword("connect", unknown)
    check_callback(on_lost)
    target = resolve(url)
    runtime = AsyncioRuntime()
    engine = open_engine(runtime, target, check_name(namespace, "a namespace"))
    client = Client(runtime, engine, Lease, ttl=ttl, owner=owner, on_lost=on_lost)
    warn_long_ttl(ttl)
    return Locks(client, target)
