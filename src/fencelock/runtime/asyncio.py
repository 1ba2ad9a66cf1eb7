"""The asyncio runtime: the coroutines of the core are awaited, and cancellation is asyncio's own."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from random import random
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from fencelock.core import wakeup
from fencelock.core.clock import boottime
from fencelock.errors import DifferentLoop
from fencelock.runtime.asyncio_cancel import TaskCancelGuard, await_uncancelled
from fencelock.runtime.asyncio_events import AioEvent, SharedSocketWakeup, resolve

if TYPE_CHECKING:
    from fencelock.core.runtime import Command, Connection, Connector, Event, PushHandler

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 4


class AsyncioRuntime:
    """`fencelock.core.runtime.Runtime` for tasks. It belongs to the loop that first uses it."""

    shares_connections = True

    def __init__(self) -> None:
        self.now = boottime
        self.random = random
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._socket: socket.socket | None = None
        self._socket_name = ""
        self._socket_mutex = Lock()
        self._slots: dict[bytes, AioEvent] = {}
        self._numbers = itertools.count()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise DifferentLoop("this client belongs to another event loop; connect again inside this one")
            self._close_pending()
            self._forget_loop()
            self._loop = loop
        return loop

    def _close_pending(self) -> None:
        """Close the coroutines that a closed loop left pending: the garbage collector may do that much later."""
        for task in list(self._tasks):
            if not task.done():
                with suppress(RuntimeError):  # the coroutine awaits in its clean-up
                    cast("Coroutine[Any, Any, Any]", task.get_coro()).close()

    def check_usable(self) -> None:
        """Raise DifferentLoop unless this client belongs to the running loop. Without a loop, a coroutine is being closed."""
        if asyncio._get_running_loop() is not None:
            self._own_loop()

    def current_task(self) -> Hashable:
        """Return the running task."""
        return asyncio.current_task()

    def event(self) -> AioEvent:
        """Return a new event."""
        return AioEvent(self._own_loop())

    wakeup_event = event
    """The loop waits for pushes and for other threads alike."""

    def process_wakeup(self) -> SharedSocketWakeup | None:
        """Return a slot of the one socket. Engines may call it in a thread of `run_blocking`, where no loop runs."""
        if not wakeup.AVAILABLE:
            return None
        loop = self._loop or self._own_loop()
        with self._socket_mutex:
            if self._socket is None:
                self._socket, self._socket_name = wakeup.open_socket()
                loop.call_soon_threadsafe(self._add_reader, self._socket)
        slot = str(next(self._numbers))
        event = self._slots[slot.encode()] = AioEvent(loop)
        return SharedSocketWakeup(f"{self._socket_name}/{slot}", event, partial(self._free_slot, slot.encode()))

    def _add_reader(self, sock: socket.socket) -> None:
        if self._loop is not None and sock is self._socket:
            self._loop.add_reader(sock, self._read_datagrams)

    def _free_slot(self, slot: bytes) -> None:
        self._slots.pop(slot, None)

    def _read_datagrams(self) -> None:
        assert self._socket is not None
        try:
            for _ in range(wakeup.MAX_DATAGRAMS):
                event = self._slots.get(self._socket.recv(16))
                if event is not None:
                    event.set()
        except BlockingIOError:
            pass

    def cancel_guard(self) -> TaskCancelGuard:
        """Return a guard that cancels the running task when the lease is lost."""
        return TaskCancelGuard()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it as a task."""
        try:
            self._keep(self._own_loop().create_task(work, name=name))
        except BaseException:
            work.close()  # the loop is closed, or another one: Python would warn that nobody awaited it
            raise

    async def run_shared(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it as a task of its own."""
        self.spawn(work, name)

    def call_user(self, function: Callable[[], None]) -> None:
        """Call it on the loop, soon; close() does not cancel that."""
        if self._loop is None:
            function()
            return
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop is closed, and the user's tasks with it

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # not a mistake of the user's
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """Sleep in this task."""
        await asyncio.sleep(seconds)

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it in a thread of this runtime: a program that fills the loop's own pool must not delay renewals."""
        loop = self._own_loop()  # first: it drops the thread pool of a closed loop
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fencelock")
        future = loop.run_in_executor(self._pool, partial(fn, *args))
        return await await_uncancelled(future, None)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it as a task that a cancellation of the caller does not cancel."""
        return await await_uncancelled(self._keep(self._own_loop().create_task(work)), timeout)

    run_with_time_limit = shield
    """A task runs in the background anyway."""

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect, in this task."""
        from fencelock.runtime.asyncio_connection import AsyncioConnection  # engines without a server do not need it

        return await AsyncioConnection.connect(connector, on_push, on_end)

    async def request_all(
        self,
        requests: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to all, then await all."""
        from fencelock.runtime.asyncio_connection import AsyncioConnection, request_all

        return await request_all(cast("Sequence[tuple[AsyncioConnection, Command | bytes]]", requests), timeout, enough)

    async def wait_for_push(self, connections: Sequence[Connection], event: Event, timeout: float) -> bool:
        """Wait for the event: the loop reads the connections, and their `on_end` sets the event when one ends."""
        return await event.wait(timeout) if all(connection.open for connection in connections) else event.is_set()

    async def wait_for_io(self, descriptor: int, timeout: float, *, or_writable: bool = False) -> bool:
        """Wait with the loop's reader and writer callbacks."""
        loop = self._own_loop()
        ready: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(descriptor, resolve, ready, True)
        if or_writable:
            loop.add_writer(descriptor, resolve, ready, True)
        handle = loop.call_later(max(0.0, timeout), resolve, ready, False)
        try:
            return await ready
        finally:
            handle.cancel()
            loop.remove_reader(descriptor)
            if or_writable:
                loop.remove_writer(descriptor)

    async def close(self) -> None:
        """Close the socket, end the threads and cancel the remaining tasks."""
        if self._socket is not None:
            self._own_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        left = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def after_fork(self) -> None:
        """Drop the parent's loop, threads and socket."""
        self._forget_loop()

    def _forget_loop(self) -> None:
        """Drop the loop, its tasks, threads and socket: it is a parent's, or it is closed."""
        if self._socket is not None:
            self._socket.close()
        self._loop = self._pool = self._socket = None
        self._socket_mutex = Lock()
        self._slots.clear()
        self._tasks.clear()
