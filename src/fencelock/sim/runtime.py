"""The simulated world: `fencelock.core.runtime.World` for one simulated process."""

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

DIAL_PATIENCES = 4
"""Connecting may take so much longer than an answer."""


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
        """Set it and wake whoever waits."""
        self._set = True
        for parked in self._waiters:
            parked.wake()

    def close(self) -> None:
        """Nothing of the system's to give back."""

    async def wait(self, timeout: float | None) -> bool:
        """Wait until it is set, for so long at most; return whether it is."""
        if self._set:
            return True
        parked = Suspension(self._process)
        self._waiters.append(parked)
        timer = None if timeout is None else self._process.timer(timeout, parked.wake)
        try:
            await parked
        finally:
            self._waiters.remove(parked)
            if timer is not None:
                timer.cancel()
        return self._set


class SimCancelGuard:
    """Cancels the task that entered the block, and takes the cancellation back on the way out."""

    def __init__(self, process: Process, task: Task) -> None:
        self._process = process
        self._task = task
        self._outside = task.cancelling
        self._inside = True
        self._cancelled = False

    def interrupt(self) -> None:
        """Cancel the body at its next await, a moment later, as the body may be running now."""
        self._process.soon(self._cancel)

    def _cancel(self) -> None:
        if self._inside and not self._cancelled and not self._task.done:
            self._cancelled = True
            self._task.cancel()

    def leave(self) -> bool:
        """Take our cancellation back; return whether it was the only one."""
        self._inside = False
        return self._cancelled and self._task.uncancel() <= self._outside


class SimRuntime:
    """One process's way to time, chance and tasks."""

    def __init__(self, process: Process, network: Network | None = None, *, shares_connections: bool = True) -> None:
        self.process = process
        self.shares_connections = shares_connections
        self.now = process.clock.now
        self._network = network
        self.random = process.scheduler.random.random
        self._tasks: dict[Task, None] = {}

    def check_usable(self) -> None:
        """Any task will do."""

    def current_task(self) -> Hashable:
        """Return the task."""
        return self.process.current

    def event(self) -> SimEvent:
        """Return a new event."""
        return SimEvent(self.process)

    def push_event(self) -> SimEvent:
        """Return a new event."""
        return SimEvent(self.process)

    def wakeup_event(self) -> SimEvent:
        """Return a new event."""
        return SimEvent(self.process)

    def process_wakeup(self) -> None:
        """Return None: the engines of this world ring over the network."""

    def cancel_guard(self) -> SimCancelGuard:
        """Return what cancels the running task on loss."""
        assert self.process.current is not None, "a with block is entered by a task"
        return SimCancelGuard(self.process, self.process.current)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run as a task of its own."""
        if self.process.dead:
            work.close()
        else:
            self._keep(self.process.spawn(work, name, self._forget))

    async def run_detached(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it as a task of its own."""
        self.spawn(work, name)

    def call_user(self, function: Callable[[], None]) -> None:
        """Call it right here."""
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
        parked = Suspension(self.process)
        timer = self.process.timer(seconds, parked.wake)
        try:
            await parked
        finally:
            timer.cancel()

    async def run_blocking(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it right here: no engine of this world blocks."""
        return fn(*args)

    async def shield(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run it as a task that a cancellation of the caller does not reach; the cancellation comes out afterwards."""
        if self.process.dead:
            work.close()
            raise Gone
        ended = self.event()

        def whole(task: Task) -> None:
            self._tasks.pop(task, None)
            ended.set()

        task = self._keep(self.process.spawn(work, "shielded", whole))
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
            raise TimeoutError("it was broken off: the client is being closed")
        if task.error is not None:
            raise task.error
        return task.result  # type: ignore[no-any-return]

    in_background = shield

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> Connection:
        """Connect to a simulated server, by its label."""
        assert self._network is not None, "a world that connects to servers needs a network"
        patience = DIAL_PATIENCES * self._network.faults.patience
        return await SimConnection(self.process, self._network, connector, on_push, on_end).connect(patience)

    async def request_all(
        self,
        asked: Sequence[tuple[Connection, Command | bytes]],
        timeout: float,
        enough: Callable[[Sequence[Any]], bool],
    ) -> list[Any]:
        """Ask several simulated servers at once."""
        return await request_all(
            self.process, cast("Sequence[tuple[SimConnection, Command | bytes]]", asked), timeout, enough
        )

    async def wait_for_push(self, connections: Sequence[Connection], bell: Event, timeout: float) -> bool:
        """Wait for the bell: messages arrive by themselves, and whoever gave us the wires rings when one ends."""
        return await bell.wait(timeout) if all(connection.open for connection in connections) else bell.is_set()

    async def readable(self, descriptor: int, timeout: float, *, write: bool = False) -> bool:
        """Refuse: there are no descriptors here, and no engine of this world has a driver that needs one."""
        raise NotImplementedError("the simulated world has no descriptors")

    async def close(self) -> None:
        """Cancel what is left of the world's own tasks, and wait for their end."""
        left = [task for task in self._tasks if task is not self.process.current]
        for task in left:
            task.cancel()
        while any(not task.done for task in left):
            await self.sleep(0.001)

    def after_fork(self) -> None:
        """Simulated processes do not fork."""
