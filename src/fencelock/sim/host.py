"""A simulated host that serves: a Redis, its clock, and the connections that lead to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

from fencelock.sim.clocks import RATE_ERROR, WallClock
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session


class SimulatedHost:
    """It can be stopped for a while, and it can go down and come back, with its data or without."""

    def __init__(self, network: Network, label: str, make: Callable[[Callable[[], int], str], Redis] = Redis) -> None:
        self.label = label
        self._scheduler = network.scheduler
        self._stopped = 0
        self._down = 0
        self._backlog: list[Callable[[], object]] = []
        self._starts = 0
        rng = self._scheduler.random
        error = rng.choice((-1, 1, rng.uniform(-1, 1))) * RATE_ERROR
        # Leases run out by this clock, so it goes at a bounded rate, as boot clocks do.
        self.wall = WallClock(self._scheduler, 1 + error)
        self.redis = make(self.wall.us, self._run_id())
        self.sessions: dict[Session, None] = {}
        network.hosts[label] = self

    def _run_id(self) -> str:
        self._starts += 1
        return f"{crc32(self.label.encode()):08x}{self._starts:032x}"

    def deliver(self, fn: Callable[[], object], refuse: Callable[[], object]) -> None:
        """Let something happen here as soon as the host runs; tell the sender if nobody is there."""
        if self._stopped:
            self._backlog.append(partial(self.deliver, fn, refuse))
        elif self._down:
            refuse()
        else:
            fn()

    def hang_up(self, session: Session) -> None:
        """Take note that a connection has ended."""
        self.sessions.pop(session, None)
        self.redis.forget(session)

    def pause(self, seconds: float) -> None:
        """Do nothing for a while; what comes in meanwhile is answered afterwards."""
        self._stopped += 1
        self._scheduler.after(seconds, self._resume)

    def _resume(self) -> None:
        self._stopped = max(0, self._stopped - 1)
        if not self._stopped:
            backlog, self._backlog = self._backlog, []
            for fn in backlog:
                fn()

    def crash(self, seconds: float, *, wipe: bool = False) -> None:
        """Go down, and come back after a while: every connection is broken, and scripts are forgotten."""
        self._down += 1
        self._backlog.clear()
        self.sessions.clear()
        self.redis.start(self._run_id())
        if wipe:
            self.redis.wipe()
        self._scheduler.after(seconds, self._rise)

    def _rise(self) -> None:
        self._down = max(0, self._down - 1)

    def clear_faults(self) -> None:
        """Go on at once."""
        self._down = self._stopped = 0
        self._resume()
