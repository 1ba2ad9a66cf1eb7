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
"""From here on a ttl is long enough for every engine, and taken as it is."""

SCALED = ("ttl", "max_hold", "stall_after")


@dataclass(frozen=True, slots=True)
class TtlScale:
    """What the tests' times mean on an engine.

    Clients (`runtimes.py`) apply it to the SCALED options that a test gives them; a test applies it to whatever it ties to
    these: sleeps, stalls, delays of a fault. How long a lease lasts is up to the engine, which may keep a shorter ttl than
    it is asked for: at least half of it if it is not renewed, and never more than the whole.
    """

    factor: float = 1.0
    """How many times longer than for others a ttl has to be."""
    slack: float = 0.0
    """Seconds that the engine may take to notice, beyond its ttl, that a claim is over."""

    def __call__(self, seconds: float) -> float:
        """Return what so many seconds of a test are on this engine."""
        return seconds * self.factor

    async def sleep(self, seconds: float) -> None:
        """Let others run for that long."""
        await asyncio.sleep(self(seconds))

    def stall(self, seconds: float) -> None:
        """Block this thread, and with it the event loop: nothing can interrupt it."""
        time.sleep(self(seconds))

    async def outlast(self, ttl: float) -> None:
        """Wait until the engine must have seen the end of a claim that it granted, or renewed, before now, with this ttl."""
        await asyncio.sleep(ttl + 0.05 + self.slack)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a lock or a client with their times scaled."""
        return {
            **options,
            **{name: self(options[name]) for name in SCALED if _is_short(options.get(name))},
        }


def _is_short(value: object) -> bool:
    """Return whether it is a time to be scaled; what is no time at all is left to those who refuse it."""
    return type(value) in (int, float) and 0 < value < LONG  # type: ignore[operator]


UNSCALED = TtlScale()
"""For engines that keep any ttl, and for tests of the ttl itself."""
