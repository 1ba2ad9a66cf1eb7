"""The network: a message may be late, overtake others, arrive twice, or never arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fencelock.errors import OutcomeUnknown
from fencelock.sim.process import Process
from fencelock.sim.scheduler import Scheduler
from fencelock.sim.task import Suspension

if TYPE_CHECKING:
    from fencelock.sim.host import SimulatedHost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """What happens to messages: probabilities from 0 to 1, times in seconds."""

    delay: float = 0.02
    """The longest delay of an ordinary message."""
    slow: float = 0.0
    """The probability that a message takes up to `slowest` instead."""
    slowest: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    reply_timeout: float = 0.25
    """How long a client waits for a reply."""


class Network:
    """Carries messages between processes and servers, by their labels."""

    def __init__(self, scheduler: Scheduler, faults: NetworkFaults) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.faults_cleared = False
        self.hosts: dict[str, SimulatedHost] = {}
        """The servers that accept connections, by label."""
        self._partitions: dict[tuple[str, str], int] = {}
        self._held: list[tuple[str, str, Callable[[], object]]] = []

    def partition(self, source: str, target: str, seconds: float) -> None:
        """Drop every message in this direction for so many seconds; connections hold theirs back instead."""
        self._partitions[source, target] = self._partitions.get((source, target), 0) + 1
        self.scheduler.after(seconds, partial(self._end_partition, source, target))

    def _end_partition(self, source: str, target: str) -> None:
        if self._partitions.get((source, target)):
            self._partitions[source, target] -= 1
        self._send_held_back()

    def is_partitioned(self, source: str, target: str) -> bool:
        """Return whether messages in this direction are dropped now."""
        return bool(self._partitions) and bool(self._partitions.get((source, target)))

    def when_reachable(self, source: str, target: str, fn: Callable[[], object]) -> None:
        """Call the function when the partition of this direction ends."""
        self._held.append((source, target, fn))

    def _send_held_back(self) -> None:
        held, self._held = self._held, []
        for source, target, fn in held:
            if self.is_partitioned(source, target):
                self._held.append((source, target, fn))
            else:
                fn()

    def clear_faults(self) -> None:
        """Drop nothing from now on. Messages that were sent before may still be late."""
        self.faults_cleared = True
        self.faults = NetworkFaults(self.faults.delay, reply_timeout=self.faults.reply_timeout)
        self._partitions.clear()
        self._send_held_back()

    def send(self, source: str, target: str, arrive: Callable[[], object], *, once: bool = False) -> None:
        """Send a message: `arrive` is called at the other end, unless it is lost; with `once` never twice."""
        faults, rng = self.faults, self.scheduler.random
        if self._partitions.get((source, target)) or (faults.lost and rng.random() < faults.lost):
            return
        self.scheduler.after(self.delay(), arrive)
        if faults.doubled and not once and rng.random() < faults.doubled:
            self.scheduler.after(self.delay(), arrive)

    def delay(self) -> float:
        """Return the delay of a message."""
        faults, rng = self.faults, self.scheduler.random
        slow = faults.slow and rng.random() < faults.slow
        return rng.random() * (faults.slowest if slow else faults.delay)

    async def request(self, process: Process, server: str, question: Callable[[], T], *, once: bool = False) -> T:
        """Call `question` on a server and return its reply, the first one that arrives, or raise OutcomeUnknown."""
        suspension, replies = Suspension(process), list[Callable[[], T]]()

        def arrive() -> None:
            self.send(server, process.label, partial(process.deliver, partial(receive, _call(question))))

        def receive(reply: Callable[[], T]) -> None:
            if not suspension.done:
                replies.append(reply)
                suspension.wake()

        timer = process.timer(self.faults.reply_timeout, suspension.wake)
        self.send(process.label, server, arrive, once=once)
        try:
            await suspension
        finally:
            timer.cancel()
        if not replies:
            raise OutcomeUnknown("no reply from the simulated server")
        return replies[0]()


def _call(question: Callable[[], T]) -> Callable[[], T]:
    """Call a function; return one that returns the same result, or raises the same error."""
    try:
        result = question()
    except Exception as error:
        return partial(_raise, error)
    return lambda: result


def _raise(error: Exception) -> NoReturn:
    raise error
