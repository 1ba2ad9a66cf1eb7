"""One view of both façades, so that a behaviour is written once: the blocking one behind `async def`, the other as it is.

Both apply the engine's pace to the ttls that tests ask for; `raw` is the façade itself.

The blocking façade is called in a thread that belongs to the calling task (`Threads`), so that a task stands for a thread
wherever that matters; or, in a worker process, right here in its main thread (`direct`), where signals arrive.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

import fencelock
from fencelock import aio
from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.model import LossReason, Snapshot, Traits
from tests.contract.ttl_scale import UNSCALED, TtlScale

T = TypeVar("T")
Call = Callable[..., Awaitable[Any]]

RUNTIMES = ("blocking", "aio")


class LostView(Protocol):
    def is_set(self) -> bool: ...
    async def wait(self, timeout: float | None = None) -> bool: ...


class LeaseView(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def id(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def ttl(self) -> float: ...
    @property
    def remaining(self) -> float: ...
    @property
    def reason(self) -> LossReason | None: ...
    @property
    def lost(self) -> LostView: ...
    def check(self) -> None: ...
    async def renew(self) -> None: ...
    async def release(self) -> bool: ...
    async def __aenter__(self) -> LeaseView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class LockView(Protocol):
    @property
    def name(self) -> str: ...
    def acquire(self, timeout: Any = ...) -> Coroutine[Any, Any, LeaseView]: ...
    async def try_acquire(self) -> LeaseView | None: ...
    async def __aenter__(self) -> LeaseView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class LocksView(Protocol):
    @property
    def raw(self) -> Any: ...
    @property
    def traits(self) -> Traits: ...
    @property
    def owner(self) -> str: ...
    @property
    def lock(self) -> Callable[..., LockView]: ...
    @property
    def locked(self) -> Callable[..., Callable[[Any], Any]]: ...
    async def inspect(self, name: str) -> Snapshot: ...
    def names(self, prefix: str = "") -> AsyncIterator[str]: ...
    async def force_release(self, name: str, *, reason: str) -> int: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> LocksView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Threads:
    """Runs blocking calls, each task's in a thread of its own."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[asyncio.Task[Any], ThreadPoolExecutor] = weakref.WeakKeyDictionary()

    async def __call__(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        task = asyncio.current_task()
        assert task is not None
        thread = self._of.get(task)
        if thread is None:
            thread = self._of[task] = ThreadPoolExecutor(1, thread_name_prefix="test")
            task.add_done_callback(lambda _: thread.shutdown(wait=False))
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: fn(*args, **kwargs))


async def direct(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call it right here."""
    return fn(*args, **kwargs)


class BlockingLost:
    def __init__(self, raw: fencelock.Lost, call: Call) -> None:
        self._raw = raw
        self._call = call

    def is_set(self) -> bool:
        return self._raw.is_set()

    async def wait(self, timeout: float | None = None) -> bool:
        return bool(await self._call(self._raw.wait, timeout))


class BlockingLease:
    def __init__(self, raw: fencelock.Lease, call: Call) -> None:
        self.raw = raw
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __repr__(self) -> str:
        return repr(self.raw)

    @property
    def lost(self) -> BlockingLost:
        return BlockingLost(self.raw.lost, self._call)

    async def renew(self) -> None:
        await self._call(self.raw.renew)

    async def release(self) -> bool:
        return bool(await self._call(self.raw.release))

    async def __aenter__(self) -> BlockingLease:
        await self._call(self.raw.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._call(self.raw.__exit__, *error)


class BlockingLock:
    def __init__(self, raw: fencelock.Lock, call: Call) -> None:
        self.raw = raw
        self._call = call

    def __repr__(self) -> str:
        return repr(self.raw)

    @property
    def name(self) -> str:
        return self.raw.name

    async def acquire(self, *args: Any, **kwargs: Any) -> BlockingLease:
        return BlockingLease(await self._call(self.raw.acquire, *args, **kwargs), self._call)

    async def try_acquire(self) -> BlockingLease | None:
        raw = await self._call(self.raw.try_acquire)
        return None if raw is None else BlockingLease(raw, self._call)

    async def __aenter__(self) -> BlockingLease:
        return BlockingLease(await self._call(self.raw.__enter__), self._call)

    async def __aexit__(self, *error: Any) -> None:
        await self._call(self.raw.__exit__, *error)


class BlockingLocks:
    def __init__(self, raw: fencelock.Locks, call: Call, pace: TtlScale) -> None:
        self.raw = raw
        self._call = call
        self._pace = pace

    def __repr__(self) -> str:
        return repr(self.raw)

    @property
    def traits(self) -> Traits:
        return self.raw.traits

    @property
    def owner(self) -> str:
        return self.raw.owner

    def lock(self, name: str, **options: Any) -> BlockingLock:
        return BlockingLock(self.raw.lock(name, **self._pace.options(options)), self._call)

    def locked(self, name: str, **options: Any) -> Callable[[Any], Any]:
        """Decorate a coroutine function that never suspends: in this colour its body runs as a plain function."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            import functools

            @self.raw.locked(name, **self._pace.options(options))
            @functools.wraps(function)
            def plain(*args: Any, **kwargs: Any) -> Any:
                try:
                    function(*args, **kwargs).send(None)
                except StopIteration as stop:
                    return stop.value

            async def call(*args: Any, **kwargs: Any) -> Any:
                return await self._call(plain, *args, **kwargs)

            return call

        return decorate

    async def inspect(self, name: str) -> Snapshot:
        return await self._call(self.raw.inspect, name)  # type: ignore[no-any-return]

    async def names(self, prefix: str = "") -> AsyncIterator[str]:
        for name in await self._call(lambda: list(self.raw.names(prefix))):
            yield name

    async def force_release(self, name: str, *, reason: str) -> int:
        return int(await self._call(self.raw.force_release, name, reason=reason))

    async def close(self) -> None:
        await self._call(self.raw.close)

    async def __aenter__(self) -> BlockingLocks:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()


class AioLocks:
    def __init__(self, raw: aio.Locks, pace: TtlScale) -> None:
        self.raw = raw
        self._pace = pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __repr__(self) -> str:
        return repr(self.raw)

    def lock(self, name: str, **options: Any) -> LockView:
        return self.raw.lock(name, **self._pace.options(options))

    def locked(self, name: str, **options: Any) -> Callable[[Any], Any]:
        return self.raw.locked(name, **self._pace.options(options))

    async def __aenter__(self) -> AioLocks:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.raw.close()


def connect(runtime_name: str, call: Call, url: str, pace: TtlScale = UNSCALED, **options: Any) -> LocksView:
    """Return a client of either colour."""
    if runtime_name == "aio":
        return AioLocks(aio.connect(url, **options), pace)
    return BlockingLocks(fencelock.connect(url, **options), call, pace)


def client_of(locks: Any) -> Client[Any]:
    """Return the client behind either façade, for tests that put something between it and its engine."""
    client = locks.raw._client
    assert isinstance(client, Client)
    return client


def core_of(lease: Any) -> BaseLease:
    """Return the lease itself."""
    raw = lease.raw if isinstance(lease, BlockingLease) else lease
    assert isinstance(raw, BaseLease)
    return raw
