"""Tasks of a simulated process: coroutines that are suspended at an await and then resumed, cancelled or closed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fencelock.sim.process import Process


class Cancelled(BaseException):
    """The task was cancelled: the simulator's CancelledError."""


class Gone(BaseException):
    """The process has ended: raised at every await, to close its coroutines without running them."""


class Suspension:
    """An await that suspends its task until `wake` is called."""

    __slots__ = ("_process", "_task", "done")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._task: Task | None = None
        self.done = False

    def wake(self) -> None:
        """Resume the task that is suspended here."""
        if not self.done:
            self.done = True
            if self._task is not None:
                self._task.resume(self)

    def __await__(self) -> Generator[Suspension, None, None]:
        if self._process.dead:
            raise Gone
        if not self.done:
            yield self

    def attach(self, task: Task) -> None:
        """Remember the task that is suspended here."""
        self._task = task


class Task:
    """A coroutine of a process. As in asyncio, a cancellation is an exception at the await where it is suspended."""

    __slots__ = (
        "_context",
        "_coro",
        "_must_cancel",
        "_on_end",
        "_pending",
        "_process",
        "_suspension",
        "cancelling",
        "done",
        "error",
        "name",
        "result",
    )

    def __init__(
        self, process: Process, coro: Coroutine[Any, Any, Any], name: str, on_end: Callable[[Task], None]
    ) -> None:
        self._process = process
        self._coro = coro
        self._context = copy_context()
        self._on_end = on_end
        self._suspension: Suspension | None = None
        self._pending = False
        self._must_cancel = False
        self.name = name
        self.cancelling = 0
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._schedule()

    def _schedule(self) -> None:
        if not self._pending and not self.done:
            self._pending = True
            self._process.soon(self._step)

    def resume(self, suspension: Suspension) -> None:
        """Continue after an await, unless the task has left it already."""
        if self._suspension is suspension:
            self._schedule()

    def cancel(self) -> None:
        """Raise Cancelled at the await where the task is suspended, or at its next await if it is running."""
        if not self.done:
            self.cancelling += 1
            self._must_cancel = True
            if self._suspension is not None:
                self._schedule()

    def uncancel(self) -> int:
        """Withdraw one cancellation; return how many are left."""
        self.cancelling = max(0, self.cancelling - 1)
        return self.cancelling

    def _step(self) -> None:
        self._pending = False
        self._suspension = None
        process = self._process
        process.current = self
        try:
            if self._must_cancel:
                self._must_cancel = False
                suspension = self._context.run(self._coro.throw, Cancelled())
            else:
                suspension = self._context.run(self._coro.send, None)
        except StopIteration as stop:
            self._finish(stop.value, None)
        except BaseException as error:
            self._finish(None, error)
        else:
            self._suspension = suspension
            suspension.attach(self)
            if suspension.done or self._must_cancel:
                self._schedule()
        finally:
            process.current = None
        process.stepped(self)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self.done, self.result, self.error = True, result, error
        self._on_end(self)

    def close(self) -> None:
        """Close the coroutine without running it: every await of a dead process raises Gone."""
        if self.done:
            return
        self.done = True
        try:
            self._context.run(self._coro.throw, Gone()) if self._suspension is not None else self._coro.close()
        except (Gone, StopIteration):
            pass
