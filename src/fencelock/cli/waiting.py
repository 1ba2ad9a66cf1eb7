"""The blocking runtime of `fencelock run`: a signal ends the wait for a lock at the next await."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from fencelock.cli.signals import Signals
from fencelock.core import wakeup
from fencelock.runtime.blocking import BlockingRuntime
from fencelock.runtime.blocking_wakeup import SocketWakeup

if TYPE_CHECKING:
    import socket

    from fencelock.core.runtime import Connection, Event

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Interrupted(BaseException):
    """A signal arrived before the lock was granted. The acquire loop abandons the claim, as on any exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class InterruptibleRuntime(BlockingRuntime):
    """A blocking runtime whose waits raise Interrupted after a signal; nothing else raises it."""

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._waiter: int | None = None

    def __enter__(self) -> InterruptibleRuntime:
        self._waiter = threading.get_ident()
        return self

    def __exit__(self, *error: object) -> None:
        self._waiter = None

    def check_signals(self) -> None:
        """Raise Interrupted if a signal arrived and this thread waits for the lock. The renewer's thread continues."""
        if self._waiter == threading.get_ident() and (number := self._signals.terminating_signal()) is not None:
            self._signals.end_on_next_signal()  # a second signal ends the process without clean-up
            raise Interrupted(number)

    def process_wakeup(self) -> SocketWakeup | None:
        """Return a wake-up that signals end as well."""
        if not wakeup.AVAILABLE:
            return None
        return _InterruptibleWakeup(*wakeup.open_socket(), self, self._signals.fd)

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless a signal comes."""
        if self._waiter == threading.get_ident():
            self.check_signals()
            self._signals.wait(seconds)
            self.check_signals()
        else:
            await super().sleep(seconds)

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it in this thread."""
        self.check_signals()
        return fn(*args)

    async def wait_for_push(self, connections: Sequence[Connection], event: Event, timeout: float) -> bool:
        """Read what is pushed, unless a signal comes."""
        if self._waiter != threading.get_ident():
            return await super().wait_for_push(connections, event, timeout)
        from fencelock.runtime.socket_connection import SocketConnection
        from fencelock.runtime.socket_poll import wait_for_push

        self.check_signals()
        is_set = wait_for_push(cast("Sequence[SocketConnection]", connections), event, timeout, self._signals.fd)
        self.check_signals()
        return is_set

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it in this thread; signals that arrive meanwhile wait."""
        waiter, self._waiter = self._waiter, None
        try:
            return await super().shield(work, timeout)
        finally:
            self._waiter = waiter


class _InterruptibleWakeup(SocketWakeup):
    def __init__(self, sock: socket.socket, name: str, runtime: InterruptibleRuntime, fd: int) -> None:
        super().__init__(sock, name)
        self._runtime = runtime
        self._fd = fd

    async def wait(self, timeout: float) -> bool:
        self._runtime.check_signals()
        self._poll(timeout, self._socket.fileno(), self._fd)
        self._runtime.check_signals()
        return self.drain()
