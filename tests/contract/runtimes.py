"""One interface to both APIs, so that each test is written once: the blocking API behind `async def`, the asyncio API.

Both apply the engine's TtlScale to the ttls that tests ask for; `raw` is the façade itself.

The blocking façade is called in a thread that belongs to the calling task (`Threads`), so that a task stands for a thread
wherever that matters; or, in a worker process, right here in its main thread (`direct`), where signals arrive.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, TypeVar

import fencelock
from fencelock import Candidate, Leader, aio
from fencelock.core.client import Client
from fencelock.core.lease import BaseLease
from fencelock.model import LossReason, Mode, Snapshot, Traits
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
    @property
    def mode(self) -> Mode: ...
    def check(self) -> None: ...
    def progress(self) -> None: ...
    async def renew(self) -> None: ...
    async def downgrade(self) -> None: ...
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


class RWLockView(Protocol):
    def read(self) -> LockView: ...
    def write(self) -> LockView: ...


class GroupView(Protocol):
    @property
    def leases(self) -> Mapping[str, LeaseView]: ...
    @property
    def name(self) -> str: ...
    @property
    def remaining(self) -> float: ...
    @property
    def reason(self) -> LossReason | None: ...
    @property
    def lost(self) -> LostView: ...
    def check(self) -> None: ...
    async def release(self) -> bool: ...
    def __getitem__(self, name: str, /) -> LeaseView: ...
    async def __aenter__(self) -> GroupView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class MultiView(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...
    def acquire(self, timeout: Any = ...) -> Coroutine[Any, Any, GroupView]: ...
    async def try_acquire(self) -> GroupView | None: ...
    async def __aenter__(self) -> GroupView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class ElectionView(Protocol):
    @property
    def name(self) -> str: ...
    def campaign(self, timeout: float | None = None) -> LockView: ...
    async def leader(self) -> Leader | None: ...
    async def candidates(self) -> list[Candidate]: ...
    def observe(self, stop: Any = None) -> AsyncIterator[Leader | None]: ...
    async def resign(self) -> bool: ...
    def healthy(self, grace: float) -> bool: ...
    def run(
        self, work: Callable[[Any], Coroutine[Any, Any, object]], stop: Any = None
    ) -> Coroutine[Any, Any, None]: ...


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
    @property
    def rwlock(self) -> Callable[..., RWLockView]: ...
    @property
    def semaphore(self) -> Callable[..., LockView]: ...
    @property
    def multi(self) -> Callable[..., MultiView]: ...
    @property
    def election(self) -> Callable[..., ElectionView]: ...
    @property
    def assert_held(self) -> Callable[..., None]: ...
    def watch(self, name: str, stop: Any = None) -> AsyncIterator[Snapshot]: ...
    async def inspect(self, name: str) -> Snapshot: ...
    def names(self, prefix: str = "") -> AsyncIterator[str]: ...
    async def force_release(self, name: str, *, reason: str) -> int: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> LocksView: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Threads:
    """Runs the blocking calls of each task in the task's own thread."""

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
    """Call the function in this thread."""
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

    async def downgrade(self) -> None:
        await self._call(self.raw.downgrade)

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


class BlockingRWLock:
    def __init__(self, raw: fencelock.RWLock, call: Call) -> None:
        self.raw = raw
        self._call = call

    def read(self) -> BlockingLock:
        return BlockingLock(self.raw.read(), self._call)

    def write(self) -> BlockingLock:
        return BlockingLock(self.raw.write(), self._call)


class BlockingGroup:
    def __init__(self, raw: fencelock.Group, call: Call) -> None:
        self.raw = raw
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __getitem__(self, name: str) -> BlockingLease:
        return BlockingLease(self.raw[name], self._call)

    @property
    def leases(self) -> Mapping[str, BlockingLease]:
        return {name: BlockingLease(lease, self._call) for name, lease in self.raw.leases.items()}

    @property
    def lost(self) -> BlockingLost:
        return BlockingLost(self.raw.lost, self._call)

    async def release(self) -> bool:
        return bool(await self._call(self.raw.release))

    async def __aenter__(self) -> BlockingGroup:
        await self._call(self.raw.__enter__)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._call(self.raw.__exit__, *error)


class BlockingMulti:
    def __init__(self, raw: fencelock.MultiLock, call: Call) -> None:
        self.raw = raw
        self._call = call

    @property
    def names(self) -> tuple[str, ...]:
        return self.raw.names

    async def acquire(self, *args: Any, **kwargs: Any) -> BlockingGroup:
        return BlockingGroup(await self._call(self.raw.acquire, *args, **kwargs), self._call)

    async def try_acquire(self) -> BlockingGroup | None:
        raw = await self._call(self.raw.try_acquire)
        return None if raw is None else BlockingGroup(raw, self._call)

    async def __aenter__(self) -> BlockingGroup:
        return BlockingGroup(await self._call(self.raw.__enter__), self._call)

    async def __aexit__(self, *error: Any) -> None:
        await self._call(self.raw.__exit__, *error)


class BlockingElection:
    def __init__(self, raw: fencelock.Election, call: Call) -> None:
        self.raw = raw
        self._call = call

    @property
    def name(self) -> str:
        return self.raw.name

    def campaign(self, timeout: float | None = None) -> BlockingLock:
        return BlockingLock(self.raw.campaign(timeout), self._call)

    async def leader(self) -> Leader | None:
        return await self._call(self.raw.leader)  # type: ignore[no-any-return]

    async def candidates(self) -> list[Candidate]:
        return await self._call(self.raw.candidates)  # type: ignore[no-any-return]

    def observe(self, stop: Any = None) -> AsyncIterator[Leader | None]:
        return _iterate(self.raw.observe(stop), self._call)

    async def resign(self) -> bool:
        return bool(await self._call(self.raw.resign))

    def healthy(self, grace: float) -> bool:
        return self.raw.healthy(grace)

    async def run(self, work: Callable[[Any], Coroutine[Any, Any, object]], stop: Any = None) -> None:
        """Run the election in this task's thread; the work runs in the event loop while that thread waits for it."""
        loop = asyncio.get_running_loop()

        def call(term: fencelock.Lease) -> None:
            asyncio.run_coroutine_threadsafe(work(BlockingLease(term, self._call)), loop).result()

        await self._call(self.raw.run, call, stop)


async def _iterate(items: Iterator[T], call: Call) -> AsyncIterator[T]:
    end = object()
    while (item := await call(next, items, end)) is not end:
        yield item


class BlockingLocks:
    def __init__(self, raw: fencelock.Locks, call: Call, ttl_scale: TtlScale) -> None:
        self.raw = raw
        self._call = call
        self._ttl_scale = ttl_scale

    def __repr__(self) -> str:
        return repr(self.raw)

    @property
    def traits(self) -> Traits:
        return self.raw.traits

    @property
    def owner(self) -> str:
        return self.raw.owner

    def lock(self, name: str, **options: Any) -> BlockingLock:
        return BlockingLock(self.raw.lock(name, **self._ttl_scale.options(options)), self._call)

    def locked(self, name: str, **options: Any) -> Callable[[Any], Any]:
        """Decorate a coroutine function that never suspends: in this runtime its body runs as a plain function."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            import functools

            @self.raw.locked(name, **self._ttl_scale.options(options))
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

    def rwlock(self, name: str, **options: Any) -> BlockingRWLock:
        return BlockingRWLock(self.raw.rwlock(name, **self._ttl_scale.options(options)), self._call)

    def semaphore(self, name: str, limit: int, **options: Any) -> BlockingLock:
        return BlockingLock(self.raw.semaphore(name, limit, **self._ttl_scale.options(options)), self._call)

    def multi(self, *names: str, **options: Any) -> BlockingMulti:
        return BlockingMulti(self.raw.multi(*names, **self._ttl_scale.options(options)), self._call)

    def election(self, name: str, **options: Any) -> BlockingElection:
        return BlockingElection(self.raw.election(name, **self._ttl_scale.options(options)), self._call)

    def watch(self, name: str, stop: Any = None) -> AsyncIterator[Snapshot]:
        return _iterate(self.raw.watch(name, stop), self._call)

    def assert_held(self, name: str, mode: Any = "exclusive") -> None:
        self.raw.assert_held(name, mode)

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
    def __init__(self, raw: aio.Locks, ttl_scale: TtlScale) -> None:
        self.raw = raw
        self._ttl_scale = ttl_scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __repr__(self) -> str:
        return repr(self.raw)

    def lock(self, name: str, **options: Any) -> LockView:
        return self.raw.lock(name, **self._ttl_scale.options(options))

    def locked(self, name: str, **options: Any) -> Callable[[Any], Any]:
        return self.raw.locked(name, **self._ttl_scale.options(options))

    def rwlock(self, name: str, **options: Any) -> RWLockView:
        return self.raw.rwlock(name, **self._ttl_scale.options(options))

    def semaphore(self, name: str, limit: int, **options: Any) -> LockView:
        return self.raw.semaphore(name, limit, **self._ttl_scale.options(options))

    def multi(self, *names: str, **options: Any) -> MultiView:
        return self.raw.multi(*names, **self._ttl_scale.options(options))

    def election(self, name: str, **options: Any) -> ElectionView:
        return self.raw.election(name, **self._ttl_scale.options(options))

    async def __aenter__(self) -> AioLocks:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.raw.close()


def connect(runtime_name: str, call: Call, url: str, ttl_scale: TtlScale = UNSCALED, **options: Any) -> LocksView:
    """Return a client of either runtime."""
    if runtime_name == "aio":
        return AioLocks(aio.connect(url, **options), ttl_scale)
    return BlockingLocks(fencelock.connect(url, **options), call, ttl_scale)


def client_of(locks: Any) -> Client[Any]:
    """Return the client behind either façade, for tests that put something between it and its engine."""
    client = locks.raw._client
    assert isinstance(client, Client)
    return client


def core_of(lease: Any) -> BaseLease:
    """Return the lease behind a view."""
    raw = lease.raw if isinstance(lease, BlockingLease) else lease
    assert isinstance(raw, BaseLease)
    return raw
