"""A simulated process: tasks and one clock. It can be paused, and it can crash at any await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fencelock.sim.clocks import BootClock
from fencelock.sim.scheduler import Scheduler, Timer
from fencelock.sim.task import Cancelled, Task

JITTER = 0.0002
"""Seconds within which a task that is ready runs: the seed decides which task runs first."""

LATE = 0.001
"""Seconds by which a timer may be late; it is never early."""

Fault = Callable[[Task], None]


class Process:
    """All that happens in a process goes through `deliver`: immediately, after a pause, or never."""

    def __init__(self, scheduler: Scheduler, label: str) -> None:
        self.scheduler = scheduler
        self.label = label
        self.clock = BootClock.random(scheduler)
        self.current: Task | None = None
        self.dead = False
        self.died: float | None = None
        self.errors: list[BaseException] = []
        self._tasks: dict[Task, None] = {}
        self._stopped = 0
        self._backlog: list[Callable[[], object]] = []
        self._steps = 0
        self._faults: dict[int, Fault] = {}

    # ------------------------------------------------------------------ running

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str, on_end: Callable[[Task], None] | None = None) -> Task:
        """Start a task; `on_end` is called when it has ended, and gets its error. Without it, an error ends the run."""
        task = Task(self, coro, name, partial(self._ended, on_end))
        self._tasks[task] = None
        return task

    def _ended(self, on_end: Callable[[Task], None] | None, task: Task) -> None:
        del self._tasks[task]
        if on_end is not None:
            on_end(task)
        elif task.error is not None and not isinstance(task.error, Cancelled):
            self.errors.append(task.error)

    def tasks(self) -> list[Task]:
        """Return the tasks that have not ended."""
        return list(self._tasks)

    def deliver(self, fn: Callable[[], object]) -> None:
        """Call the function in this process, as soon as the process runs."""
        if self.dead:
            return
        if self._stopped:
            self._backlog.append(fn)
        else:
            fn()

    def soon(self, fn: Callable[[], object]) -> None:
        """Call the function a moment from now."""
        self.scheduler.after(self.scheduler.random.random() * JITTER, partial(self.deliver, fn))

    def timer(self, seconds: float, fn: Callable[[], object]) -> Timer:
        """Call the function after so many seconds of this process's clock."""
        late = LATE * (0.01 + self.scheduler.random.random())
        return self.scheduler.after(self.clock.true_seconds(max(0.0, seconds)) + late, partial(self.deliver, fn))

    # ------------------------------------------------------------------ faults

    def add_fault(self, step: int, what: Fault) -> None:
        """Inject a fault at the await that the process reaches as number `step`, in any of its tasks."""
        self._faults[step] = what

    def stepped(self, task: Task) -> None:
        """Count an await that a task has reached, and inject the fault that is planned for it."""
        self._steps += 1
        what = self._faults.pop(self._steps, None)
        if what is not None:
            what(task)

    def pause(self, seconds: float) -> None:
        """Run nothing for a while; time passes and messages wait."""
        self._stopped += 1
        self.scheduler.after(seconds, self._resume)

    def _resume(self) -> None:
        self._stopped = max(0, self._stopped - 1)
        if not self._stopped:
            backlog, self._backlog = self._backlog, []
            for fn in backlog:
                self.soon(fn)

    def clear_faults(self) -> None:
        """End all pauses and drop the faults that are planned."""
        self._faults.clear()
        self._stopped = 0
        self._resume()

    def crash(self) -> None:
        """End the process: it runs nothing any more."""
        if not self.dead:
            self.dead, self.died = True, self.scheduler.time
            self._backlog.clear()

    def end(self) -> None:
        """Close the coroutines that are left after a run, without running them."""
        self.dead = True
        while self._tasks:
            self._tasks.popitem()[0].close()
