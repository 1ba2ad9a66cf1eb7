"""The blocking world of `fencelock run`: a signal ends the wait for a lock at the next moment at which it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from fencelock.cli.signals import Signals
from fencelock.core import wakeup
from fencelock.runtime.blocking import BlockingRuntime, SocketWakeup

if TYPE_CHECKING:
    import socket

    from fencelock.core.runtime import Connection, Event

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Interrupted(BaseException):
    """A signal came before the lock did. The acquire loop takes its claim back, as it does on any exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class InterruptibleRuntime(BlockingRuntime):
    """Like asyncio's cancellation, the end of the wait comes out of an await and nowhere else."""

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._waiter: int | None = None

    def __enter__(self) -> InterruptibleRuntime:
        self._waiter = threading.get_ident()
        return self

    def __exit__(self, *error: object) -> None:
        self._waiter = None

    def look(self) -> None:
        """Raise GaveUp if a signal came and this is the thread that waits: the keeper's go on."""
        if self._waiter == threading.get_ident() and (number := self._signals.giving_up()) is not None:
            self._signals.let_go()  # whoever asks twice does not care about what is left behind
            raise Interrupted(number)

    def process_wakeup(self) -> SocketWakeup | None:
        """Return a bell that signals ring as well."""
        if not wakeup.AVAILABLE:
            return None
        return _Bell(*wakeup.open_socket(), self, self._signals.fd)

    async def sleep(self, seconds: float) -> None:
        """Sleep, unless a signal comes."""
        if self._waiter == threading.get_ident():
            self.look()
            self._signals.wait(seconds)
            self.look()
        else:
            await super().sleep(seconds)

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it right here."""
        self.look()
        return fn(*args)

    async def wait_for_push(self, connections: Sequence[Connection], bell: Event, timeout: float) -> bool:
        """Read what is pushed, unless a signal comes."""
        if self._waiter != threading.get_ident():
            return await super().wait_for_push(connections, bell, timeout)
        from fencelock.runtime.socket_connection import SocketConnection, wait_for_push

        self.look()
        rung = wait_for_push(cast("Sequence[SocketConnection]", connections), bell, timeout, self._signals.fd)
        self.look()
        return rung

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it right here; signals that come meanwhile wait."""
        waiter, self._waiter = self._waiter, None
        try:
            return await super().shield(work, timeout)
        finally:
            self._waiter = waiter


class _Bell(SocketWakeup):
    def __init__(self, sock: socket.socket, name: str, runtime: InterruptibleRuntime, fd: int) -> None:
        super().__init__(sock, name, SocketWakeup.destroy)
        self._runtime = runtime
        self._fd = fd

    async def wait(self, timeout: float) -> bool:
        self._runtime.look()
        self._listen(timeout, self._socket.fileno(), self._fd)
        self._runtime.look()
        return self.silence()
