"""The clocks of simulated hosts: boot clocks that run a little fast or slow, and wall clocks that are set."""

from __future__ import annotations

from fencelock.sim.scheduler import Scheduler

RATE_ERROR = 0.004
"""Two boot clocks differ by less than the 1 % that a lease's deadline leaves for them."""


class BootClock:
    """Seconds since a host started, at the host's own rate."""

    __slots__ = ("_offset", "_scheduler", "rate")

    def __init__(self, scheduler: Scheduler, rate: float, offset: float) -> None:
        self._scheduler = scheduler
        self._offset = offset
        self.rate = rate

    @classmethod
    def random(cls, scheduler: Scheduler) -> BootClock:
        """Return a clock with a random rate and a random start."""
        rng = scheduler.random
        error = rng.choice((-1, 1, rng.uniform(-1, 1))) * RATE_ERROR
        return cls(scheduler, 1 + error, rng.uniform(0, 1e5))

    def now(self) -> float:
        """Return the time that the clock shows."""
        return self._offset + self._scheduler.time * self.rate

    def true(self, shown: float) -> float:
        """Return the true time at which the clock shows this."""
        return (shown - self._offset) / self.rate

    def true_seconds(self, seconds: float) -> float:
        """Return the true duration of so many seconds of this clock."""
        return seconds / self.rate


class WallClock:
    """A wall clock in µs. It can be set; it may stand still, so that an engine that lost its data repeats its tokens."""

    __slots__ = ("_rate", "_scheduler", "shift", "stands", "step")

    def __init__(self, scheduler: Scheduler, rate: float = 1.0) -> None:
        self._scheduler = scheduler
        self._rate = rate
        self.shift = 1_700_000_000_000_000
        self.stands = False
        self.step = 1
        """µs: it advances in steps of this size."""

    def us(self) -> int:
        """Return the time that the clock shows."""
        return self.shift + (
            0 if self.stands else int(self._scheduler.time * self._rate * 1e6) // self.step * self.step
        )

    def true(self, shown: int) -> float:
        """Return the true time at which the clock shows this, since it was last set."""
        return (shown - self.shift) / 1e6 / self._rate

    def jump(self, seconds: float) -> None:
        """Set it forward, or back."""
        self.shift += int(seconds * 1e6)
