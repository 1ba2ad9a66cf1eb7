"""The network: every message takes its time, may overtake others, may arrive twice, may never arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from fencelock.errors import OutcomeUnknown
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler
from fencelock.sim.task import Suspension

if TYPE_CHECKING:
    from fencelock.sim.host import SimulatedHost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """How messages fare: chances from 0 to 1, times in seconds."""

    delay: float = 0.02
    """An ordinary message takes up to this."""
    slow: float = 0.0
    """The chance that it takes up to `slowest` instead."""
    slowest: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    reply_timeout: float = 0.25
    """How long a client waits for an answer before it gives up on it."""


class Network:
    """Carries messages between processes and servers, which are known by their labels."""

    def __init__(self, scheduler: Scheduler, faults: NetworkFaults) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.faults_cleared = False
        self.hosts: dict[str, SimulatedHost] = {}
        """Servers that can be connected to, by label."""
        self._partitions: dict[tuple[str, str], int] = {}
        self._held: list[tuple[str, str, Callable[[], object]]] = []

    def partition(self, source: str, target: str, seconds: float) -> None:
        """Lose every message that is sent this way from now on, for so long; what is on a connection is held back."""
        self._partitions[source, target] = self._partitions.get((source, target), 0) + 1
        self.scheduler.after(seconds, partial(self._end_partition, source, target))

    def _end_partition(self, source: str, target: str) -> None:
        if self._partitions.get((source, target)):
            self._partitions[source, target] -= 1
        self._go_on()

    def is_partitioned(self, source: str, target: str) -> bool:
        """Return whether nothing gets through this way now."""
        return bool(self._partitions) and bool(self._partitions.get((source, target)))

    def when_reachable(self, source: str, target: str, fn: Callable[[], object]) -> None:
        """Call the function as soon as messages get through this way again."""
        self._held.append((source, target, fn))

    def _go_on(self) -> None:
        held, self._held = self._held, []
        for source, target, fn in held:
            if self.is_partitioned(source, target):
                self._held.append((source, target, fn))
            else:
                fn()

    def clear_faults(self) -> None:
        """Lose nothing from now on; what was sent before may still be on its way."""
        self.faults_cleared = True
        self.faults = NetworkFaults(self.faults.delay, reply_timeout=self.faults.reply_timeout)
        self._partitions.clear()
        self._go_on()

    def send(self, source: str, target: str, arrive: Callable[[], object], *, once: bool = False) -> None:
        """Send a message: `arrive` happens at the other end, perhaps; `once` if it must not happen twice."""
        faults, rng = self.faults, self.scheduler.random
        if self._partitions.get((source, target)) or (faults.lost and rng.random() < faults.lost):
            return
        self.scheduler.after(self.delay(), arrive)
        if faults.doubled and not once and rng.random() < faults.doubled:
            self.scheduler.after(self.delay(), arrive)

    def delay(self) -> float:
        """Return how long some message takes."""
        faults, rng = self.faults, self.scheduler.random
        slow = faults.slow and rng.random() < faults.slow
        return rng.random() * (faults.slowest if slow else faults.delay)

    async def request(self, process: Process, server: str, question: Callable[[], T], *, once: bool = False) -> T:
        """Carry a question to a server and its answer back, or raise OutcomeUnknown."""
        call: Call[T] = Call(process)
        timer = process.timer(self.faults.reply_timeout, call.suspension.wake)
        self.send(process.label, server, partial(self._arrive, call, server, question), once=once)
        try:
            await call.suspension
        finally:
            timer.cancel()
        return call.result()

    def _arrive(self, call: Call[T], server: str, question: Callable[[], T]) -> None:
        try:
            answer: Callable[[], object] = partial(call.answer, question())
        except Exception as error:
            answer = partial(call.fail, error)
        self.send(server, call.process.label, partial(call.process.deliver, answer))


class Call(Generic[T]):
    """A question that was asked: the first answer counts."""

    __slots__ = ("_error", "_value", "answered", "process", "suspension")

    def __init__(self, process: Process) -> None:
        self.process = process
        self.suspension = Suspension(process)
        self.answered = False
        self._error: Exception | None = None
        self._value: T | None = None

    def answer(self, value: T) -> None:
        """Take the answer in."""
        self._settle(value, None)

    def fail(self, error: Exception) -> None:
        """Take an error in: the server refused."""
        self._settle(None, error)

    def _settle(self, value: T | None, error: Exception | None) -> None:
        if not self.suspension.done:
            self.answered, self._value, self._error = True, value, error
            self.suspension.wake()

    def result(self) -> T:
        """Return the answer, or raise."""
        if not self.answered:
            raise OutcomeUnknown("no answer from the simulated server")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]
