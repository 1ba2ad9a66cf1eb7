"""The asyncio world: the same coroutines, awaited. Cancellation is asyncio's own."""

from __future__ import annotations

import asyncio
import itertools
import os
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

if TYPE_CHECKING:
    from fencelock.core.runtime import Command, Connection, Connector, Event, PushHandler, Source

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREADS = 4


class AioEvent:
    """An event that any thread may set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Return whether it is set, at once in every thread."""
        return self._set

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def set(self) -> None:
        """Set it and wake whoever waits."""
        self._set = True
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._wake()
        elif os.getpid() == self._pid:  # a forked child would write into its parent's loop
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                pass  # the loop is closed: nobody waits there any more

    def close(self) -> None:
        """Nothing of the system's to give back."""

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set, for so long at most; return whether it is."""
        if self._set:
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        handle = None if timeout is None else self._loop.call_later(max(0.0, timeout), _finish, waiter)
        try:
            if not self._set:
                await waiter
        finally:
            self._waiters.discard(waiter)
            if handle is not None:
                handle.cancel()
        return self._set


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class SharedSocketWakeup:
    """A doorbell that shares its client's one socket: a thousand waiting tasks, one descriptor."""

    def __init__(self, address: str, event: AioEvent, close: Callable[[], None]) -> None:
        self.address = address
        self._event = event
        self._close = close

    async def wait(self, timeout: float) -> bool:
        """Wait for a ring, for so long at most."""
        rung = await self._event.wait(timeout)
        self._event.clear()
        return rung

    def close(self) -> None:
        """Give back the slot; whoever still waits, as the client is being closed, looks and learns of that."""
        self._close()
        self._event.set()


class TaskCancelGuard:
    """Cancels the task that entered the block, and takes the cancellation back on the way out."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a with block is entered by a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._outside = task.cancelling()
        self._inside = True
        self._cancelled = False

    def interrupt(self) -> None:
        """Cancel the body, from any thread, at its next await: by way of the loop, as the body may be running now."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            pass  # the loop is closed, and the body with it

    def _cancel(self) -> None:
        if self._inside and not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel("the lease was lost")

    def leave(self) -> bool:
        """Take our cancellation back; return whether it was the only one."""
        self._inside = False
        return self._cancelled and self._task.uncancel() <= self._outside


class AsyncioRuntime:
    """`fencelock.core.runtime.World` for tasks. It belongs to the loop that first uses it."""

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

    def _home(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise DifferentLoop("this client belongs to another event loop; connect anew inside this one")
            self._bury()
            self.after_fork()  # a closed loop took its tasks with it, as a parent process does
            self._loop = loop
        return loop

    def _bury(self) -> None:
        """End what a closed loop left pending, so that it knows: the garbage collector might take its time."""
        for task in list(self._tasks):
            if not task.done():
                with suppress(RuntimeError):  # it would go on to await
                    cast("Coroutine[Any, Any, Any]", task.get_coro()).close()

    def check_usable(self) -> None:
        """Make sure that we are in the loop that this client belongs to. No loop at all: a coroutine is being closed."""
        if asyncio._get_running_loop() is not None:
            self._home()

    def current_task(self) -> Hashable:
        """Return the task."""
        return asyncio.current_task()

    def event(self) -> AioEvent:
        """Return a new event."""
        return AioEvent(self._home())

    def push_event(self) -> AioEvent:
        """Return a new event."""
        return AioEvent(self._home())

    def wakeup_event(self) -> AioEvent:
        """Return a new event."""
        return AioEvent(self._home())

    def process_wakeup(self) -> SharedSocketWakeup | None:
        """Return a slot of the one socket. Engines may ask for it in a thread of `block`, where no loop runs."""
        if not wakeup.AVAILABLE:
            return None
        loop = self._loop or self._home()
        with self._socket_mutex:
            if self._socket is None:
                self._socket, self._socket_name = wakeup.open_socket()
                loop.call_soon_threadsafe(self._listen, self._socket)
        slot = str(next(self._numbers))
        event = self._slots[slot.encode()] = AioEvent(loop)
        return SharedSocketWakeup(f"{self._socket_name}/{slot}", event, partial(self._release, slot.encode()))

    def _listen(self, sock: socket.socket) -> None:
        if self._loop is not None and sock is self._socket:
            self._loop.add_reader(sock, self._rung)

    def _release(self, slot: bytes) -> None:
        self._slots.pop(slot, None)

    def _rung(self) -> None:
        assert self._socket is not None
        try:
            for _ in range(wakeup.MAX_DATAGRAMS):
                event = self._slots.get(self._socket.recv(16))
                if event is not None:
                    event.set()
        except BlockingIOError:
            pass

    def cancel_guard(self) -> TaskCancelGuard:
        """Return what cancels the running task on loss."""
        return TaskCancelGuard()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run as a task of its own."""
        self._keep(self._home().create_task(work, name=name))

    def call_user(self, function: Callable[[], None]) -> None:
        """Call it on the loop, soon; close() does not take that back."""
        if self._loop is None:
            function()
            return
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            pass  # the loop is closed, and with it everybody who cared

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # ours to know, not a mistake of the user's
        task.add_done_callback(self._tasks.discard)
        return task

    async def sleep(self, seconds: float) -> None:
        """Sleep in this task."""
        await asyncio.sleep(seconds)

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it in a thread of ours, so that a program that fills the loop's own pool does not starve renewals."""
        loop = self._home()  # first: it forgets the pool of a loop that was closed
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fencelock")
        future = loop.run_in_executor(self._pool, partial(fn, *args))
        return await _to_the_end(future, None)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it as a task that a cancellation of the caller does not reach."""
        return await _to_the_end(self._keep(self._home().create_task(work)), timeout)

    in_background = shield
    """Tasks run in the background anyway."""

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect, in this task."""
        from fencelock.runtime.asyncio_connection import AsyncioConnection  # engines without a server do without

        return await AsyncioConnection.connect(connector, on_push, on_end)

    async def request_all(
        self,
        asked: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to all, then await all."""
        from fencelock.runtime.asyncio_connection import AsyncioConnection, request_all

        return await request_all(cast("Sequence[tuple[AsyncioConnection, Command | bytes]]", asked), timeout, enough)

    async def wait_for_push(self, connections: Sequence[Connection], bell: Event, timeout: float) -> bool:
        """Wait for the bell: the loop reads by itself, and whoever gave us the wires rings when one ends."""
        return await bell.wait(timeout) if all(connection.open for connection in connections) else bell.is_set()

    async def attend(self, source: Source, event: Event, timeout: float) -> bool:  # noqa: ARG002
        """Wait for the event: nobody may read here, as other tasks would have to wait."""
        return await event.wait(timeout)

    async def readable(self, descriptor: int, timeout: float, *, write: bool = False) -> bool:
        """Let the loop watch it."""
        loop = self._home()
        ready: asyncio.Future[bool] = loop.create_future()
        loop.add_reader(descriptor, _ready, ready)
        if write:
            loop.add_writer(descriptor, _ready, ready)
        handle = loop.call_later(max(0.0, timeout), _not_ready, ready)
        try:
            return await ready
        finally:
            handle.cancel()
            loop.remove_reader(descriptor)
            if write:
                loop.remove_writer(descriptor)

    async def close(self) -> None:
        """Give back the socket, the threads and the tasks that are left."""
        if self._socket is not None:
            self._home().remove_reader(self._socket)
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
        """Forget the parent's loop, threads and socket."""
        if self._socket is not None:
            self._socket.close()
        self._loop = self._pool = self._socket = None
        self._socket_mutex = Lock()
        self._slots.clear()
        self._tasks.clear()


def _ready(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(True)


def _not_ready(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


def _nobody_asks(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # retrieved, so that asyncio does not report it as lost


async def _to_the_end(future: asyncio.Future[T], timeout: float | None) -> T:
    """Await it however often we are cancelled, for so long at most; the cancellation comes out afterwards."""
    loop = asyncio.get_running_loop()
    end = None if timeout is None else loop.time() + timeout
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait([future], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None or not future.done():
        future.add_done_callback(_nobody_asks)
    if cancelled is not None:
        raise cancelled
    if not future.done():
        raise TimeoutError(f"not done within {timeout:g} s")
    if future.cancelled():
        raise TimeoutError("it was broken off: the client is being closed")
    return future.result()
