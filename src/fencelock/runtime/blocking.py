"""The blocking world: no await ever suspends, so a coroutine runs to its end in the caller's own thread."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from fencelock.core import wakeup
from fencelock.core.clock import boottime
from fencelock.core.fork import unforked
from fencelock.core.log import WARNING, log

if TYPE_CHECKING:
    import socket

    from fencelock.core.runtime import Command, Connection, Connector, Event, PushHandler, Source

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BELLS_KEPT = 8

_warned = False
"""Whether this process was warned about the blocking API in an event loop."""


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of this world to its end in this thread, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("a coroutine suspended in the blocking world: an engine awaited something not of its world")


def each(items: AsyncIterator[T]) -> Iterator[T]:
    """Iterate over what a coroutine of this world yields."""

    async def step() -> T:
        return await anext(items)

    while True:
        try:
            yield run_sync(step())
        except StopAsyncIteration:
            return


class BlockingEvent:
    """An event whose wait is a coroutine that does not suspend.

    Not a `threading.Event`: if Ctrl-C comes in the moment in which that takes its lock, the lock stays taken, and whoever
    sets the event hangs for ever: a driver's thread, say. Here `set` never waits.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set it and wake whoever waits."""
        self._set = True
        waiters = self._waiters
        try:
            while waiters:
                waiters.pop()()
        except IndexError:
            pass  # who waited has just left

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set, for so long at most; return whether it is."""
        if self._set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        wake = waiter.release
        self._waiters.append(wake)
        try:
            if self._set:  # whoever set it may not have seen us
                return True
            with unforked():
                return waiter.acquire(timeout=-1 if timeout is None else max(0.0, min(timeout, threading.TIMEOUT_MAX)))
        finally:
            with suppress(ValueError):
                self._waiters.remove(wake)

    async def attend(self, source: Source, timeout: float) -> bool:
        """Wait like `wait`, and read meanwhile what may set it, unless somebody else does."""
        if self._set:
            return True
        until, key = boottime() + timeout, object()
        try:
            if source.enter(key):
                self._waiters.append(source.wake)
                with unforked():
                    source.read_until(key, self.is_set, until)
            return self.is_set() or await self.wait(until - boottime())
        finally:
            source.leave(key)
            if self._waiters:
                with suppress(ValueError):
                    self._waiters.remove(source.wake)


class PushFlag:
    """An event that nobody sleeps on: who listens to a wire is woken by the wire itself."""

    __slots__ = ("_set",)

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Set it."""
        self._set = True

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    async def wait(self, timeout: float | None) -> bool:  # noqa: ARG002
        """Look."""
        return self._set


class WakeupFlag(PushFlag):
    """A flag that wakes whoever listens: it has a pair of sockets for that."""

    __slots__ = ("_ear", "_mouth")

    def __init__(self) -> None:
        from socket import socketpair  # engines without a server do without

        super().__init__()
        self._ear, self._mouth = socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    def set(self) -> None:
        """Set it, and wake whoever listens."""
        self._set = True
        with suppress(OSError):  # full, so that it is heard in any case; or closed
            self._mouth.send(b".")

    def clear(self) -> None:
        """Unset it. In this order: whoever sets it meanwhile has set it."""
        self._set = False
        with suppress(OSError):
            while self._ear.recv(64):
                pass

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._ear.fileno()

    def close(self) -> None:
        """Give back the sockets."""
        self._set = True
        self._ear.close()
        self._mouth.close()


class SocketWakeup:
    """A doorbell with a socket of its own."""

    def __init__(self, sock: socket.socket, name: str, done: Callable[[SocketWakeup], None]) -> None:
        self._socket = sock
        self._done = done
        self.address = name

    async def wait(self, timeout: float) -> bool:
        """Wait for a ring, for so long at most."""
        with unforked():
            return self._listen(timeout, self._socket.fileno()) and self.silence()

    def _listen(self, timeout: float, *descriptors: int) -> bool:
        # A poll object for each wait: when a client is closed, two may come to wait for one bell.
        poll = select.poll()
        for descriptor in descriptors:
            if descriptor < 0:
                return True  # closed, as the client is
            poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    def silence(self) -> bool:
        """Forget the rings so far."""
        rung = False
        try:
            for _ in range(wakeup.MAX_DATAGRAMS):
                self._socket.recv(16)
                rung = True
        except BlockingIOError:
            pass
        except OSError:
            return True  # the client was closed under a waiter: let it look, and learn of that
        return rung

    def close(self) -> None:
        """Give it back for the next wait."""
        self._done(self)

    def destroy(self) -> None:
        """Give back the socket itself."""
        self._socket.close()


class _Place(threading.local):
    """What tells threads apart: their numbers do not, as each is given to the next thread as soon as one ends."""

    def __init__(self) -> None:
        self.mark = object()


class BlockingRuntime:
    """`fencelock.core.runtime.World` for threads."""

    shares_connections = False

    def __init__(self) -> None:
        self.now = boottime
        self.cancel_guard = None  # nothing can interrupt a thread, so its body has to look at the lease
        self.current_task = partial(getattr, _Place(), "mark")
        self._bells: list[SocketWakeup] = []
        self._closed = False

    def random(self) -> float:
        """Return a number for jitter."""
        from random import random  # 2 ms that only a wait or a failure should pay

        return random()

    def event(self) -> BlockingEvent:
        """Return a new event."""
        return BlockingEvent()

    def push_event(self) -> PushFlag:
        """Return a flag."""
        return PushFlag()

    def wakeup_event(self) -> WakeupFlag:
        """Return a flag that wakes who listens."""
        return WakeupFlag()

    def process_wakeup(self) -> SocketWakeup | None:
        """Return a bell, an earlier one if there is one: opening a socket costs as much as a whole transaction."""
        if not wakeup.AVAILABLE:
            return None
        try:
            bell = self._bells.pop()
        except IndexError:
            return SocketWakeup(*wakeup.open_socket(), self._keep)
        bell.silence()
        return bell

    def _keep(self, bell: SocketWakeup) -> None:
        if self._closed or len(self._bells) >= BELLS_KEPT:
            bell.destroy()
        else:
            self._bells.append(bell)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run in a daemon thread."""
        thread = threading.Thread(target=run_sync, args=(work,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # Where Ctrl-C comes as `start` takes its lock again, to let go of that fails, and hides the Ctrl-C.
            if isinstance(interrupt := error.__context__, Exception | None):
                work.close()
                raise
            raise interrupt from None

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
        """Call it in a thread of its own."""
        try:
            threading.Thread(target=function, name="fencelock-on-lost", daemon=True).start()
        except RuntimeError:  # no more threads
            function()

    async def sleep(self, seconds: float) -> None:
        """Sleep in this thread."""
        with unforked():
            time.sleep(seconds)  # noqa: ASYNC251

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it right here."""
        return fn(*args)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:  # noqa: ARG002
        """Run it right here: nobody cancels a thread."""
        return await work

    async def in_background(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it in a thread, and wait for that; right here if there is no thread to be had."""
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
        from fencelock.runtime.socket_connection import SocketConnection  # engines without a server do without

        return SocketConnection(connector, on_push, on_end)

    async def request_all(
        self,
        asked: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to all, then read from all, in this thread."""
        from fencelock.runtime.socket_connection import SocketConnection, request_all

        return request_all(cast("Sequence[tuple[SocketConnection, Command | bytes]]", asked), timeout, enough)

    async def wait_for_push(self, connections: Sequence[Connection], bell: Event, timeout: float) -> bool:
        """Read, in this thread, what is pushed."""
        from fencelock.runtime.socket_connection import SocketConnection, wait_for_push

        besides = bell.fileno() if isinstance(bell, WakeupFlag) else None
        return wait_for_push(cast("Sequence[SocketConnection]", connections), bell, timeout, besides)

    def attend(self, source: Source, event: Event, timeout: float) -> Coroutine[Any, Any, bool]:
        """Read, in this thread, if nobody else does."""
        own: Any = event
        return own.attend(source, timeout)  # type: ignore[no-any-return]

    async def readable(self, descriptor: int, timeout: float, *, write: bool = False) -> bool:
        """Wait for it in this thread."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLOUT if write else select.POLLIN)
        with unforked():
            return bool(poll.poll(max(0.0, timeout) * 1000))

    async def close(self) -> None:
        """Close the sockets that are kept."""
        self._closed = True
        while self._bells:
            self._bells.pop().destroy()

    def after_fork(self) -> None:
        """Close our copies: the parent's bells must not ring here."""
        while self._bells:
            self._bells.pop().destroy()
