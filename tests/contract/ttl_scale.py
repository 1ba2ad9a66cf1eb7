"""Scales a test's ttls, so that one suite fits engines with millisecond ttls and engines with whole seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHORTEST = 0.25
"""The shortest ttl that the suite uses. An engine's scale is at least its shortest ttl divided by this."""
LONG = 2.0
"""A ttl from this length on is long enough for every engine, and is not scaled."""

SCALED = ("ttl", "max_hold", "stall_after")


@dataclass(frozen=True, slots=True)
class TtlScale:
    """The factor by which the times of the tests are longer on an engine.

    Clients (`runtimes.py`) apply it to the SCALED options that a test gives them; a test applies it to whatever it ties to
    these: sleeps, stalls, delays of a fault. How long a lease lasts is up to the engine, which may keep a shorter ttl than
    it is asked for: at least half of it if it is not renewed, and never more than the whole.
    """

    factor: float = 1.0
    """The factor for ttls."""
    slack: float = 0.0
    """Seconds after the ttl within which the engine notices that a claim has expired."""

    def __call__(self, seconds: float) -> float:
        """Return the scaled number of seconds."""
        return seconds * self.factor

    async def sleep(self, seconds: float) -> None:
        """Sleep for the scaled time; other tasks run meanwhile."""
        await asyncio.sleep(self(seconds))

    def stall(self, seconds: float) -> None:
        """Block this thread, and with it the event loop, for the scaled time."""
        time.sleep(self(seconds))

    async def outlast(self, ttl: float) -> None:
        """Wait until the engine must have noticed the end of a claim with this ttl that it granted or renewed before now."""
        await asyncio.sleep(ttl + 0.05 + self.slack)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a lock or a client with their times scaled."""
        return {
            **options,
            **{name: self(options[name]) for name in SCALED if _is_short(options.get(name))},
        }


def _is_short(value: object) -> bool:
    """Return whether this is a time to be scaled; an invalid value is passed on unchanged, as the client refuses it."""
    return type(value) in (int, float) and 0 < value < LONG  # type: ignore[operator]


UNSCALED = TtlScale()
"""For engines that keep any ttl, and for tests of the ttl itself."""
