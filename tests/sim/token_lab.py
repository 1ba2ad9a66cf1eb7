"""Several clients of one simulated server, with wall clocks that differ and jump: do tokens rise and follow the clock?

The engine is the production code. Its messages travel over the simulated network: they are late, they are lost with their
connection, the server restarts, and clients crash at any await. A seed decides all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast
from unittest.mock import patch

from fencelock.core.clock import Deadline
from fencelock.core.engine import Engine
from fencelock.core.runtime import Connector, PushHandler, Runtime
from fencelock.errors import FencelockError, OutcomeUnknown
from fencelock.model import Claim, Grant, Renewal, Waiting
from fencelock.sim.clocks import WallClock
from fencelock.sim.connection import SimConnection
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network, NetworkFaults
from fencelock.sim.process import Process
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scheduler import Scheduler
from fencelock.sim.task import Task

LABEL = "server:1"
"""The address of the server, as the engines' connectors write it."""
NAMES = ("x", "y")
CLIENTS = 4
TASKS = 2
"""Tasks of each client: what one learns of the base, the other uses."""
LOCKS = 8
"""Locks that each task acquires."""
TTL = 3.0
GIVE_UP = 20.0
"""Seconds after which a client abandons a claim that it does not get."""
MAX_LAG = 60_000_000
"""µs by which a token may be behind the clock of the client that asked for it."""
LONGEST = 2000.0
"""Seconds of simulated time after which a run must be over."""


class Server(Protocol):
    """What the lab needs of a simulated server, beside what its host calls (`start`, `request`, `forget`)."""

    bases: list[int]
    """All values that the token base ever had, in order."""

    @property
    def transactions(self) -> int:
        """How far transaction numbers have advanced: by so much tokens may run ahead of the clocks."""
        ...


class Token(NamedTuple):
    """A lock that a client got."""

    name: str
    token: int
    clock: int
    """The lowest time, in µs, that the client's wall clock has shown since the client asked for the lock."""


class ByteConnection(SimConnection):
    """A connection to a server that reads bytes, or messages of a protocol, and pushes all that it sends."""

    def send(self, data: Any) -> None:
        """Send bytes; the server's empty reply only ends the request."""
        self.post(data, lambda _: None)

    def hang_up(self) -> None:
        """End the connection from the server's side."""
        self._reset()


class LabRuntime(SimRuntime):
    """A process of the lab, with a wall clock of its own."""

    def __init__(self, lab: Lab, label: str) -> None:
        rng = lab.scheduler.random
        super().__init__(Process(lab.scheduler, label), lab.network, shares_connections=rng.random() < 0.5)
        self._lab_network = lab.network
        self.wall = WallClock(lab.scheduler)
        self.wall.jump(rng.uniform(-200, 200))
        self.lowest: dict[str, int] = {}
        """The lowest time that the wall clock has shown since each claim was made."""

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock forward, or back."""
        self.wall.jump(seconds)
        self.lowest = {id: min(shown, self.wall.us()) for id, shown in self.lowest.items()}

    async def connect(self, connector: Connector, on_push: PushHandler, on_end: Callable[[], None]) -> SimConnection:
        """Connect to the simulated server."""
        return await ByteConnection(self.process, self._lab_network, connector, on_push, on_end).connect(1.0)


class Lab:
    """One run. `connect` makes the engine of a client, `make_server` the server."""

    def __init__(
        self, seed: int, make_server: Callable[[Callable[[], int], str], Server], connect: Callable[[Runtime], Engine]
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.rng = rng = self.scheduler.random
        faults = NetworkFaults(
            delay=0.02,
            slow=rng.choice((0.0, 0.05)),
            slowest=3.0,
            lost=rng.choice((0.0, 0.01, 0.03)),
            reply_timeout=0.25,
        )
        self.network = Network(self.scheduler, faults)
        self.host = SimulatedHost(self.network, LABEL, cast("Any", make_server))
        self.server = cast("Server", self.host.redis)
        self._connect = connect
        self.tokens: list[Token] = []
        """In the order in which clients got them."""
        self.violations: list[str] = []
        self._highest_wall = 0
        self._runtimes: list[LabRuntime] = []
        self._unfinished: set[Task] = set()

    # ------------------------------------------------------------------ the run

    def run(self, engine_package: str) -> list[str]:
        """Run all clients to their end; return what was violated."""
        with self._wall_clocks(engine_package):
            for number in range(CLIENTS):
                self._start_client(f"client-{number}", LOCKS)
            for _ in range(self.rng.randrange(4)):
                fault = self.rng.choice((self.host.crash, self.host.pause))
                self.scheduler.after(self.rng.uniform(0, 40), partial(fault, self.rng.uniform(0.1, 2.0)))
            done = self.scheduler.run(LONGEST, lambda: not self._unfinished)
            for runtime in self._runtimes:
                runtime.process.end()
        if not done:
            self.violations.append("a client never ended")
        self._check()
        return self.violations

    @contextmanager
    def _wall_clocks(self, engine_package: str) -> Iterator[None]:
        """Give the modules of an engine the wall clock of the process that is running."""
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith(engine_package) and hasattr(module, "wall_us"):
                    stack.enter_context(patch.object(module, "wall_us", self._wall_us))
            yield

    def _wall_us(self) -> int:
        (running,) = [runtime for runtime in self._runtimes if runtime.process.current is not None]
        shown = running.wall.us()
        self._highest_wall = max(self._highest_wall, shown)
        return shown

    def _start_client(self, label: str, locks: int) -> None:
        runtime = LabRuntime(self, label)
        self._runtimes.append(runtime)
        engine = self._connect(runtime)
        for _ in range(TASKS):
            self._unfinished.add(runtime.process.spawn(self._work(runtime, engine, locks), "work", self._ended))
        if self.rng.random() < 0.3:  # it crashes, and another process does the rest
            runtime.process.add_fault(self.rng.randrange(5, 300), lambda _: self._crash(runtime, locks))

    def _ended(self, task: Task) -> None:
        self._unfinished.discard(task)
        if task.error is not None:
            self._violated("error", repr(task.error))

    def _crash(self, runtime: LabRuntime, locks: int) -> None:
        runtime.process.crash()
        self._unfinished.difference_update(runtime.process.tasks())
        self._start_client(runtime.process.label + "'", locks // 2)

    async def _work(self, runtime: LabRuntime, engine: Engine, locks: int) -> None:
        for _ in range(locks):
            await runtime.sleep(self.rng.uniform(0, 2))
            if self.rng.random() < 0.4:
                runtime.set_clock(self.rng.choice((self.rng.uniform(-300, 300), self.rng.uniform(60, 900))))
            await self._lock_once(runtime, engine)

    async def _lock_once(self, runtime: LabRuntime, engine: Engine) -> None:
        claim = Claim(self.rng.choice(NAMES), TTL)
        runtime.lowest[claim.id] = runtime.wall.us()
        grant = await self._acquire(runtime, engine, claim)
        clock = runtime.lowest.pop(claim.id)
        if grant is not None:
            self.tokens.append(Token(claim.name, grant.token, clock))
            await self._hold(runtime, engine, grant)
        try:
            if grant is not None:
                await engine.release(grant)
            if grant is None or grant.attempt_in_flight:
                await engine.abandon(claim)
        except FencelockError:
            pass  # the claim ends with its session

    async def _acquire(self, runtime: LabRuntime, engine: Engine, claim: Claim) -> Grant | None:
        """Acquire as `core/acquire.py` does: repeat an attempt under the same id, for a ttl at most without a reply."""
        until = runtime.now() + GIVE_UP
        unknown, answered = False, runtime.now()
        while runtime.now() < until:
            try:
                outcome: Grant | Waiting | None = await engine.attempt(
                    claim, enqueue=True, deadline=Deadline(runtime.now, TTL)
                )
                if isinstance(outcome, Waiting):
                    answered = runtime.now()
                    outcome = await engine.wait(outcome, TTL / 3)
                if isinstance(outcome, Grant):
                    in_flight = unknown or outcome.attempt_in_flight
                    return outcome._replace(attempt_in_flight=in_flight) if runtime.now() < outcome.deadline else None
            except FencelockError as error:
                unknown = unknown or isinstance(error, OutcomeUnknown)
                if runtime.now() - answered >= TTL:
                    break
                await runtime.sleep(0.1)
        return None

    async def _hold(self, runtime: LabRuntime, engine: Engine, grant: Grant) -> None:
        """Hold a lock for a while, renew it, and compare its token with the one that `inspect` shows."""
        await runtime.sleep(self.rng.uniform(0, TTL / 3))
        try:
            renewed = grant._replace(since=runtime.now())
            if await engine.renew([grant]) != [Renewal.RENEWED]:
                return
            shown = [holder.token for holder in (await engine.inspect(grant.claim.name)).holders]
        except FencelockError:
            return
        if runtime.now() < renewed.deadline and shown != [grant.token]:
            self._violated("inspect", f"{grant.claim.name} is held with {grant.token}, and inspect shows {shown}")

    # ------------------------------------------------------------------ the checks

    def _violated(self, check: str, what: str) -> None:
        self.violations.append(f"{check}: {what}")

    def _check(self) -> None:
        for name in NAMES:
            tokens = [token.token for token in self.tokens if token.name == name]
            for before, after in pairwise(tokens):
                if after <= before:
                    self._violated("tokens rise", f"{name} was held with {before}, then with {after}")
        for before, after in pairwise(self.server.bases):
            if after <= before:
                self._violated("base", f"it was {before}, then {after}")
        for token in self.tokens:
            if token.token < token.clock - MAX_LAG:
                self._violated("behind the clock", f"{token}")
            if token.token > self._highest_wall + self.server.transactions:
                self._violated("ahead of all clocks", f"{token}")
