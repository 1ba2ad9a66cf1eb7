"""Connections of the simulated world: what is sent arrives in order, late, or not at all, and perhaps after the close."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fencelock.core.runtime import NO_REPLY, Command, Connector, PushHandler
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.sim.host import SimulatedHost
from fencelock.sim.lua import Refused
from fencelock.sim.network import Network
from fencelock.sim.process import Process
from fencelock.sim.task import Suspension

TOLD = 0.6
"""The chance that somebody learns of a broken connection other than by waiting in vain."""
LATER = 0.5
"""Seconds after which somebody is told, or tries again after an outage, at most."""


class Channel:
    """One direction of a connection. A message that is lost takes the connection with it."""

    __slots__ = ("_held", "_last", "_network", "_source", "_target", "broken", "on_loss")

    def __init__(self, network: Network, source: str, target: str, on_loss: Callable[[], None]) -> None:
        self._network = network
        self._source, self._target = source, target
        self._held: list[Callable[[], object]] = []
        self._last = 0.0
        self.on_loss = on_loss
        self.broken = False

    def send(self, arrive: Callable[[], object]) -> None:
        """Send a message: `arrive` happens at the other end, perhaps."""
        if self.broken:
            return
        network = self._network
        lost = network.faults.lost
        if lost and network.scheduler.random.random() < lost:
            self.on_loss()
        elif self._held or network.is_cut(self._source, self._target):
            if not self._held:
                network.when_mended(self._source, self._target, self._again_later)
            self._held.append(arrive)
        else:
            self._last = max(self._last, network.scheduler.time + network.delay())
            network.scheduler.at(self._last, arrive)

    def _again_later(self) -> None:
        """Wait a little after an outage: nobody knows when it is over before the next try."""
        network = self._network
        wait = 0.0 if network.healed else network.scheduler.random.random() * LATER
        network.scheduler.after(wait, self._reenter)

    def _reenter(self) -> None:
        network = self._network
        if network.is_cut(self._source, self._target):
            network.when_mended(self._source, self._target, self._again_later)
            return
        held, self._held = self._held, []
        if not self.broken:
            for arrive in held:
                self._last = max(self._last, network.scheduler.time + network.delay())
                network.scheduler.at(self._last, arrive)

    def give_up(self) -> None:
        """Forget what is held back."""
        self._held.clear()


class SimConnection:
    """`fencelock.core.runtime.Wire` between a simulated process and a simulated server. It is the server's session too."""

    def __init__(
        self,
        process: Process,
        network: Network,
        connector: Connector,
        on_push: PushHandler,
        on_end: Callable[[], None],
    ) -> None:
        self.open = False
        self.last_latency = 0.0
        self._process, self._network, self._connector = process, network, connector
        self._host: SimulatedHost = network.hosts[connector.address]
        self._on_push, self._on_end = on_push, on_end
        self._up = Channel(network, process.label, self._host.label, self._lost)
        self._down = Channel(network, self._host.label, process.label, self._lost)
        self.pending: deque[tuple[float, Callable[[Any], None]]] = deque()
        self._inbox: deque[tuple[bool, Any]] = deque()
        self._dialled = Suspension(process)
        self._ended = False

    # ------------------------------------------------------------------ the client's end

    async def connect(self, patience: float) -> SimConnection:
        """Connect: one message there and one back."""
        parked = self._dialled
        self._up.send(partial(self._host.deliver, self._accept, self._reset))
        timer = self._process.timer(patience, parked.wake)
        try:
            await parked
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        if not self.open:
            self.close()
            raise EngineUnavailable(f"cannot reach the simulated server {self._connector.address}")
        return self

    @property
    def oldest_pending_since(self) -> float | None:
        """When the oldest command that is not answered yet was sent."""
        return self.pending[0][0] if self.pending else None

    def alive(self) -> bool:
        """The process is told of the end by itself."""
        return self.open

    def post(self, command: Command | bytes, take: Callable[[Any], None]) -> None:
        """Send, and give the answer to `take`; NO_ANSWER once there will be none."""
        if not self.open:
            take(NO_REPLY)
            return
        self.pending.append((self._process.clock.now(), take))
        self._up.send(partial(self._host.deliver, partial(self._serve, command), self._reset))

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and wait for the answer."""
        (answer,) = await request_all(self._process, [(self, command)], timeout, _never)
        if answer is NO_REPLY:
            why = f"no answer within {timeout:g} s" if self.open else "the connection broke before the answer came"
            raise OutcomeUnknown(f"{self._connector.address}: {why}")
        return answer

    def close(self) -> None:
        """Close it. What was sent before may still arrive, unless it was held back by an outage."""
        if self._ended:
            return
        if self._network.scheduler.random.random() < 0.5:
            self._up.give_up()
        self._up.send(partial(self._host.deliver, self._hang_up, _nothing))
        self._end()

    def send(self, data: bytes) -> None:
        """Simulated servers are asked commands; none of them reads bytes."""
        raise NotImplementedError(f"{len(data)} bytes for a simulated server")

    def detach_after_fork(self) -> None:
        """Simulated processes do not fork."""

    def _end(self) -> None:
        if self._ended:
            return
        self._ended, was_open, self.open = True, self.open, False
        while self.pending:
            self.pending.popleft()[1](NO_REPLY)
        if was_open:
            self._on_end()
        else:
            self._dialled.wake()

    def _take_in(self) -> None:
        while self._inbox and self.open:
            pushed, answer = self._inbox.popleft()
            if pushed and not self._on_push(answer):
                continue
            if self.pending:
                sent, take = self.pending.popleft()
                self.last_latency = self._process.clock.now() - sent
                take(answer)

    # ------------------------------------------------------------------ on the way

    def _lost(self) -> None:
        """Break: each end learns of it, or does not."""
        self._up.broken = self._down.broken = True
        chance, scheduler = self._network.scheduler.random, self._network.scheduler
        if chance.random() < TOLD:
            scheduler.after(chance.random() * LATER, partial(self._process.deliver, self._end))
        if chance.random() < TOLD:
            scheduler.after(chance.random() * LATER, self._hang_up)

    def _receive(self, pushed: bool, answer: Any) -> None:
        if self._process.dead:
            self._hang_up()
        # In order, even after a stop: whatever is delivered first takes in all that has come so far.
        self._inbox.append((pushed, answer))
        self._process.deliver(self._take_in)

    # ------------------------------------------------------------------ the server's end

    def _accept(self) -> None:
        self._host.sessions[self] = None
        self._down.send(partial(self._process.deliver, self._connected))

    def _connected(self) -> None:
        if not self._ended and not self._dialled.done:
            self.open = True
            self._dialled.wake()

    def _serve(self, command: Command | bytes) -> None:
        if self not in self._host.sessions:
            self._reset()
            return
        for answer in self._host.redis.request(command, self):
            kind = type(answer)
            parsed = answer if kind is bytes or kind is int else as_parsed(self._connector, answer)
            self._down.send(partial(self._receive, False, parsed))

    def push(self, message: list[Any]) -> None:
        """Send what was published, or that it subscribed."""
        self._down.send(partial(self._receive, True, message))

    def _reset(self) -> None:
        """Tell the client that the server knows no such connection."""
        self._down.send(partial(self._process.deliver, self._end))

    def _hang_up(self) -> None:
        self._host.hang_up(self)


def as_parsed(connector: Connector, answer: Any) -> Any:
    """Return an answer as the client's own parser makes it: errors are of a type of its own."""
    if isinstance(answer, Refused):
        parser = connector.parser()
        parser.feed(f"-{answer}\r\n".encode())
        return parser.gets()
    if isinstance(answer, list):
        return [as_parsed(connector, item) for item in answer]
    return answer


async def request_all(
    process: Process,
    requests: Sequence[tuple[SimConnection, Command | bytes]],
    timeout: float,
    enough: Callable[[Sequence[Any]], bool],
) -> list[Any]:
    """Send to all, then wait for all."""
    answers: list[Any] = [NO_REPLY] * len(requests)
    parked = Suspension(process)
    left = len(requests)

    def take(place: int, answer: Any) -> None:
        nonlocal left
        if not parked.done:
            left -= 1
            answers[place] = answer
            if not left or enough(answers):
                parked.wake()

    for place, (connection, command) in enumerate(requests):
        connection.post(command, partial(take, place))
    timer = process.timer(timeout, parked.wake)
    try:
        if requests and not enough(answers):
            await parked
    finally:
        parked.done = True
        timer.cancel()
    return answers


def _never(_: Sequence[Any]) -> bool:
    return False


def _nothing() -> None:
    pass
