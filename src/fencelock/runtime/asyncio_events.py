"""Events and wake-ups of the asyncio runtime: flags that tasks wait for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result of a future, unless it has one or was cancelled."""
    if not future.done():
        future.set_result(result)


class AioEvent:
    """An event that any thread may set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Return whether it is set. A `set` is visible to every thread immediately."""
        return self._set

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def set(self) -> None:
        """Set it and wake all waiting tasks; callable from any thread."""
        self._set = True
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._wake()
        elif os.getpid() == self._pid:  # a forked child would write into the self-pipe of its parent's loop
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                pass  # the loop is closed, so no task waits

    def close(self) -> None:
        """Do nothing: the event has no descriptor."""

    def _wake(self) -> None:
        for waiter in self._waiters:
            resolve(waiter, None)

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set, at most `timeout` seconds; return whether it is set."""
        if self._set:
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        handle = None if timeout is None else self._loop.call_later(max(0.0, timeout), resolve, waiter, None)
        try:
            if not self._set:
                await waiter
        finally:
            self._waiters.discard(waiter)
            if handle is not None:
                handle.cancel()
        return self._set


class SharedSocketWakeup:
    """A wake-up that shares its client's one socket: a thousand waiting tasks need one descriptor."""

    def __init__(self, address: str, event: AioEvent, close: Callable[[], None]) -> None:
        self.address = address
        self._event = event
        self._close = close

    async def wait(self, timeout: float) -> bool:
        """Wait for a datagram, at most `timeout` seconds; return whether one arrived."""
        woken = await self._event.wait(timeout)
        self._event.clear()
        return woken

    def close(self) -> None:
        """Free the slot and wake its waiter: when the client is being closed, the waiter finds that out."""
        self._close()
        self._event.set()
