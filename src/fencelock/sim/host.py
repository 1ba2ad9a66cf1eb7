"""A simulated server host: a Redis, its clock, and its connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from zlib import crc32

from fencelock.sim.clocks import RATE_ERROR, WallClock
from fencelock.sim.network import Network
from fencelock.sim.redis import Redis, Session


class SimulatedHost:
    """A host that can be paused, and can crash and restart with its data or without."""

    def __init__(self, network: Network, label: str, make: Callable[[Callable[[], int], str], Redis] = Redis) -> None:
        self.label = label
        self._scheduler = network.scheduler
        self._stopped = 0
        self._down = 0
        self._backlog: list[Callable[[], object]] = []
        self._starts = 0
        rng = self._scheduler.random
        error = rng.choice((-1, 1, rng.uniform(-1, 1))) * RATE_ERROR
        # Leases expire by this clock, so its rate is bounded as that of a boot clock.
        self.wall = WallClock(self._scheduler, 1 + error)
        self.redis = make(self.wall.us, self._run_id())
        self.sessions: dict[Session, None] = {}
        network.hosts[label] = self

    def _run_id(self) -> str:
        self._starts += 1
        return f"{crc32(self.label.encode()):08x}{self._starts:032x}"

    def deliver(self, fn: Callable[[], object], refuse: Callable[[], object]) -> None:
        """Call the function as soon as the host runs, or `refuse` if the host is down."""
        if self._stopped:
            self._backlog.append(partial(self.deliver, fn, refuse))
        elif self._down:
            refuse()
        else:
            fn()

    def hang_up(self, session: Session) -> None:
        """End a connection on the server's side."""
        self.sessions.pop(session, None)
        self.redis.forget(session)

    def unexpired(self, claims: Mapping[bytes, bytes]) -> list[bytes]:
        """Return the values of a hash that begin with a time in ms that is still to come."""
        now = self.wall.us() // 1000
        return [claim for claim in claims.values() if int(claim.partition(b":")[0]) > now]

    def pause(self, seconds: float) -> None:
        """Pause the host; it answers requests afterwards."""
        self._stopped += 1
        self._scheduler.after(seconds, self._resume)

    def _resume(self) -> None:
        self._stopped = max(0, self._stopped - 1)
        if not self._stopped:
            backlog, self._backlog = self._backlog, []
            for fn in backlog:
                fn()

    def crash(self, seconds: float, *, wipe: bool = False) -> None:
        """Crash and restart after so many seconds: all connections break, and loaded scripts are gone."""
        self._down += 1
        self._backlog.clear()
        self.sessions.clear()
        self.redis.start(self._run_id())
        if wipe:
            self.redis.wipe()
        self._scheduler.after(seconds, self._restart)

    def _restart(self) -> None:
        self._down = max(0, self._down - 1)

    def clear_faults(self) -> None:
        """End all pauses and start the host."""
        self._down = self._stopped = 0
        self._resume()
