"""The simulated runtime: `fencelock.core.runtime.Runtime` for one simulated process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeVar, TypeVarTuple, cast

from fencelock.core.runtime import Command, Connection, Connector, Event, PushHandler
from fencelock.sim.connection import SimConnection, request_all
from fencelock.sim.network import Network
from fencelock.sim.process import Process
from fencelock.sim.task import Cancelled, Gone, Suspension, Task

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CONNECT_FACTOR = 4
"""Connecting may take this many times the reply timeout."""


class SimEvent:
    """An event of one process."""

    __slots__ = ("_process", "_set", "_waiters")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._set = False
        self._waiters: list[Suspension] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def set(self) -> None:
        """Set it and wake its waiters."""
        self._set = True
        for suspension in self._waiters:
            suspension.wake()

    def close(self) -> None:
        """Do nothing: it has no system resource."""

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set or the time is over; return whether it is set."""
        if self._set:
            return True
        suspension = Suspension(self._process)
        self._waiters.append(suspension)
        timer = None if timeout is None else self._process.timer(timeout, suspension.wake)
        try:
            await suspension
        finally:
            self._waiters.remove(suspension)
            if timer is not None:
                timer.cancel()
        return self._set


class SimCancelGuard:
    """Cancels the task that entered a block, and withdraws the cancellation at the end of the block."""

    def __init__(self, process: Process, task: Task) -> None:
        self._process = process
        self._task = task
        self._outside = task.cancelling
        self._inside = True
        self._cancelled = False

    def interrupt(self) -> None:
        """Cancel the body at its next await; a moment later, as the body may be running now."""
        self._process.soon(self._cancel)

    def _cancel(self) -> None:
        if self._inside and not self._cancelled and not self._task.done:
            self._cancelled = True
            self._task.cancel()

    def leave(self) -> bool:
        """Withdraw the cancellation; return whether it was the only one."""
        self._inside = False
        return self._cancelled and self._task.uncancel() <= self._outside


class SimRuntime:
    """Time, random numbers, tasks and connections of one process."""

    def __init__(self, process: Process, network: Network | None = None, *, shares_connections: bool = True) -> None:
        self.process = process
        self.shares_connections = shares_connections
        self.now = process.clock.now
        self._network = network
        self.random = process.scheduler.random.random
        self._tasks: dict[Task, None] = {}

    def check_usable(self) -> None:
        """Do nothing: every task may use it."""

    def current_task(self) -> Hashable:
        """Return the running task."""
        return self.process.current

    def event(self) -> SimEvent:
        """Return a new event."""
        return SimEvent(self.process)

    wakeup_event = event

    def process_wakeup(self) -> None:
        """Return None: simulated engines wake their clients over the network."""

    def cancel_guard(self) -> SimCancelGuard:
        """Return a guard that cancels the running task on loss."""
        assert self.process.current is not None, "a with block is entered by a task"
        return SimCancelGuard(self.process, self.process.current)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it as a new task."""
        if self.process.dead:
            work.close()
        else:
            self._keep(self.process.spawn(work, name, self._forget))

    async def run_shared(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it as a task of its own."""
        self.spawn(work, name)

    def call_user(self, function: Callable[[], None]) -> None:
        """Call it now."""
        function()

    def _keep(self, task: Task) -> Task:
        self._tasks[task] = None
        return task

    def _forget(self, task: Task) -> None:
        self._tasks.pop(task, None)
        if task.error is not None and not isinstance(task.error, Cancelled):
            self.process.errors.append(task.error)

    async def sleep(self, seconds: float) -> None:
        """Sleep by this process's clock."""
        suspension = Suspension(self.process)
        timer = self.process.timer(seconds, suspension.wake)
        try:
            await suspension
        finally:
            timer.cancel()

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it now: no simulated engine blocks."""
        return fn(*args)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it as a task that is not cancelled with the caller; raise the cancellation afterwards."""
        if self.process.dead:
            work.close()
            raise Gone
        ended = self.event()

        def on_end(task: Task) -> None:
            self._tasks.pop(task, None)
            ended.set()

        task = self._keep(self.process.spawn(work, "shielded", on_end))
        end = self.now() + timeout
        cancelled: Cancelled | None = None
        while not task.done and (left := end - self.now()) > 0:
            try:
                await ended.wait(left)
            except Cancelled as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if not task.done:
            raise TimeoutError(f"not done within {timeout:g} s")
        if isinstance(task.error, Cancelled):
            raise TimeoutError("it was cancelled: the client is being closed")
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[no-any-return]

    run_with_time_limit = shield

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect to a simulated server, by its label."""
        assert self._network is not None, "a runtime that connects to servers needs a network"
        timeout = CONNECT_FACTOR * self._network.faults.reply_timeout
        return await SimConnection(self.process, self._network, connector, on_push, on_end).connect(timeout)

    async def request_all(
        self,
        requests: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Send to several simulated servers at once."""
        return await request_all(
            self.process, cast("Sequence[tuple[SimConnection, Command | bytes]]", requests), timeout, enough
        )

    async def wait_for_push(self, connections: Sequence[Connection], event: Event, timeout: float) -> bool:
        """Wait for the event: messages arrive by themselves, and the engine sets it when a connection ends."""
        return await event.wait(timeout) if all(connection.open for connection in connections) else event.is_set()

    async def wait_for_io(self, descriptor: int, timeout: float, *, or_writable: bool = False) -> bool:
        """Refuse: simulated engines have no descriptors."""
        raise NotImplementedError("the simulated runtime has no descriptors")

    async def close(self) -> None:
        """Cancel the background tasks that are left, and wait for their end."""
        left = [task for task in self._tasks if task is not self.process.current]
        for task in left:
            task.cancel()
        while any(not task.done for task in left):
            await self.sleep(0.001)

    def after_fork(self) -> None:
        """Simulated processes do not fork."""
