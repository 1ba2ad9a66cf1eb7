"""The blocking runtime: no await ever suspends, so a coroutine runs to its end in the caller's own thread."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from fencelock.core import wakeup
from fencelock.core.clock import boottime
from fencelock.core.fork import raise_if_forked
from fencelock.core.log import WARNING, log
from fencelock.runtime.blocking_events import BlockingEvent, PollableEvent
from fencelock.runtime.blocking_wakeup import SocketWakeup

if TYPE_CHECKING:
    from fencelock.core.runtime import Command, Connection, Connector, Event, PushHandler
    from fencelock.runtime.socket_connection import SocketConnection

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_warned = False
"""Whether this process has logged the warning about the blocking API in an event loop."""


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of this runtime to its end in this thread, and return its result."""
    result: list[T] = []
    runner = _store(work, result)
    for _ in runner.__await__():
        runner.close()
        raise RuntimeError("a coroutine suspended in the blocking runtime: it awaited something of another runtime")
    return result[0]


async def _store(work: Coroutine[Any, Any, T], result: list[T]) -> None:
    """Await it. A coroutine without a value ends without a StopIteration that later errors would have as their context."""
    result.append(await work)


def each(items: AsyncIterator[T]) -> Iterator[T]:
    """Iterate over an asynchronous iterator of this runtime."""

    async def step() -> T:
        return await anext(items)

    while True:
        try:
            yield run_sync(step())
        except StopAsyncIteration:
            return


class _ThreadKey(threading.local):
    """A key for each thread. Thread ids are no keys: the system reuses them as soon as a thread ends."""

    def __init__(self) -> None:
        self.key = object()


class BlockingRuntime:
    """`fencelock.core.runtime.Runtime` for threads."""

    shares_connections = False

    def __init__(self) -> None:
        self.now = boottime
        self.cancel_guard = None  # a thread cannot be interrupted, so the body must check the lease
        self.current_task = partial(getattr, _ThreadKey(), "key")

    def random(self) -> float:
        """Return a number for jitter."""
        from random import random  # the import takes 2 ms, and only a wait or a failure needs it

        return random()

    def event(self) -> BlockingEvent:
        """Return a new event."""
        return BlockingEvent()

    def wakeup_event(self) -> PollableEvent:
        """Return a new event that ends `wait_for_push`."""
        return PollableEvent()

    def process_wakeup(self) -> SocketWakeup | None:
        """Return a wake-up with a socket of its own."""
        return SocketWakeup(*wakeup.open_socket()) if wakeup.AVAILABLE else None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in a daemon thread."""
        thread = threading.Thread(target=run_sync, args=(work,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # If Ctrl-C arrives while `start` waits for its lock, the release of the lock fails and hides the Ctrl-C.
            if isinstance(interrupt := error.__context__, Exception | None):
                work.close()
                raise
            raise interrupt from None

    async def run_shared(self, work: Coroutine[Any, Any, None], name: str) -> None:  # noqa: ARG002
        """Run it in this thread, which cannot be cancelled: the user's function may need the thread's own state."""
        await work

    def check_usable(self) -> None:
        """Warn, once, if this thread runs an event loop: a second task that waits for the same lock would deadlock."""
        global _warned
        if (
            not _warned
            and (asyncio := sys.modules.get("asyncio")) is not None
            and asyncio._get_running_loop() is not None
        ):
            _warned = True
            log(
                "client",
                WARNING,
                "the blocking API of fencelock is used inside a running event loop: it stops all tasks while it waits, and "
                "two tasks that want the same lock deadlock; use fencelock.aio there",
            )

    def call_user(self, function: Callable[[], None]) -> None:
        """Call it in a new thread."""
        try:
            threading.Thread(target=function, name="fencelock-on-lost", daemon=True).start()
        except RuntimeError:  # no more threads
            function()

    async def sleep(self, seconds: float) -> None:
        """Sleep in this thread."""
        with raise_if_forked():
            time.sleep(seconds)  # noqa: ASYNC251

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it in this thread."""
        return fn(*args)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:  # noqa: ARG002
        """Run it in this thread: a thread cannot be cancelled."""
        return await work

    async def run_with_time_limit(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it in a new thread and wait for the result; in this thread if the system has no more threads."""
        outcome: list[T | BaseException] = []
        done = BlockingEvent()

        async def run() -> None:
            try:
                outcome.append(await work)
            except Exception as error:
                outcome.append(error)
            finally:
                done.set()

        runner = run()
        try:
            self.spawn(runner, "fencelock-background")
        except RuntimeError:
            runner.close()
            return await work
        if not await done.wait(timeout):
            raise TimeoutError(f"not done within {timeout:g} s")
        if isinstance(result := outcome[0], BaseException):
            raise result
        return result

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect, in this thread."""
        from fencelock.runtime.socket_connection import SocketConnection  # engines without a server do not need it

        return SocketConnection(connector, on_push, on_end)

    async def request_all(
        self,
        requests: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to all, then read from all, in this thread."""
        from fencelock.runtime.socket_poll import request_all

        return request_all(cast("Sequence[tuple[SocketConnection, Command | bytes]]", requests), timeout, enough)

    async def wait_for_push(self, connections: Sequence[Connection], event: Event, timeout: float) -> bool:
        """Read the connections in this thread until a push sets the event."""
        from fencelock.runtime.socket_poll import wait_for_push

        wakeup_fd = event.fileno() if isinstance(event, PollableEvent) else None
        return wait_for_push(cast("Sequence[SocketConnection]", connections), event, timeout, wakeup_fd)

    async def wait_for_io(self, descriptor: int, timeout: float, *, or_writable: bool = False) -> bool:
        """Poll in this thread."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLOUT if or_writable else select.POLLIN)
        with raise_if_forked():
            return bool(poll.poll(max(0.0, timeout) * 1000))

    async def close(self) -> None:
        """Do nothing: the runtime has no threads or sockets of its own."""

    def after_fork(self) -> None:
        """Do nothing, as `close`."""
