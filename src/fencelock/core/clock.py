"""The client's clock, which never goes back and also runs while the machine is suspended, and deadlines on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from fencelock.errors import EngineUnavailable

if hasattr(time, "CLOCK_BOOTTIME"):
    boottime: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    """Seconds since boot, including suspension: a lease must expire while a laptop is closed."""
else:
    boottime = time.monotonic


BOOT_ID = "/proc/sys/kernel/random/boot_id"

WALL_MAX_US = 2**52
"""A wall clock beyond the year 2112 is ignored: it would use up the tokens, which stay below 2^53."""


def wall_us() -> int:
    """Return the wall clock in µs, or 0 if it is implausible. Tokens start from it; leases never use it."""
    wall = time.time_ns() // 1000
    return wall if 0 < wall < WALL_MAX_US else 0


def boot_id() -> str:
    """Return the id of this boot of the machine. Times since boot can be compared only within one boot."""
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError as error:
        if sys.platform == "linux":
            # A substitute would differ from what other processes read: each side would treat the other's claims as void.
            raise EngineUnavailable(
                f"{BOOT_ID} cannot be read ({error.strerror}), and without it times cannot be compared with those of other "
                "processes; mount /proc, or allow it (ProcSubset=all for a systemd service)"
            ) from error
        # Without a boot id (macOS) use the time of boot, which is stable to about a second.
        return f"booted:{round((time.time() - boottime()) / 10)}"


class Deadline:
    """A moment on the client's clock, or never."""

    __slots__ = ("_now", "at", "seconds")

    def __init__(self, now: Callable[[], float], seconds: float | None, start: float | None = None) -> None:
        self._now = now
        self.seconds = seconds
        self.at = None if seconds is None else (now() if start is None else start) + seconds

    @property
    def passed(self) -> bool:
        """Whether the time has passed."""
        return self.at is not None and self._now() >= self.at

    def at_most(self, seconds: float) -> float:
        """Return the seconds left, at most `seconds`."""
        return seconds if self.at is None else max(0.0, min(seconds, self.at - self._now()))


NO_DEADLINE = Deadline(boottime, None)
"""A deadline that never passes."""
