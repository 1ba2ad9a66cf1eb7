"""Simulated connections: messages arrive in order, late or not at all, and perhaps after the connection was closed."""

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

TOLD_PROBABILITY = 0.6
"""The probability that one side is told of a broken connection; otherwise only its timeout shows it."""
TOLD_WITHIN = 0.5
"""Seconds after which a side is told, or sends again after a partition, at most."""


class Channel:
    """One direction of a connection. A lost message breaks the connection."""

    __slots__ = ("_held", "_last", "_network", "_source", "_target", "broken", "on_loss")

    def __init__(self, network: Network, source: str, target: str, on_loss: Callable[[], None]) -> None:
        self._network = network
        self._source, self._target = source, target
        self._held: list[Callable[[], object]] = []
        self._last = 0.0
        self.on_loss = on_loss
        self.broken = False

    def send(self, arrive: Callable[[], object]) -> None:
        """Send a message: `arrive` is called at the other end, unless it is lost."""
        if self.broken:
            return
        network = self._network
        lost = network.faults.lost
        if lost and network.scheduler.random.random() < lost:
            self.on_loss()
        elif self._held or network.is_partitioned(self._source, self._target):
            if not self._held:
                network.when_reachable(self._source, self._target, self._resend_later)
            self._held.append(arrive)
        else:
            self._last = max(self._last, network.scheduler.time + network.delay())
            network.scheduler.at(self._last, arrive)

    def _resend_later(self) -> None:
        """Send again a little after the partition: the sender does not know that it has ended."""
        network = self._network
        wait = 0.0 if network.faults_cleared else network.scheduler.random.random() * TOLD_WITHIN
        network.scheduler.after(wait, self._resend)

    def _resend(self) -> None:
        network = self._network
        if network.is_partitioned(self._source, self._target):
            network.when_reachable(self._source, self._target, self._resend_later)
            return
        held, self._held = self._held, []
        if not self.broken:
            for arrive in held:
                self._last = max(self._last, network.scheduler.time + network.delay())
                network.scheduler.at(self._last, arrive)

    def drop_held_back(self) -> None:
        """Drop the messages that a partition holds back."""
        self._held.clear()


class SimConnection:
    """`fencelock.core.runtime.Connection` between a process and a server, and the server's session of it."""

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
        self._connecting = Suspension(process)
        self._ended = False

    # ------------------------------------------------------------------ the client's side

    async def connect(self, timeout: float) -> SimConnection:
        """Connect: one message to the server and one back."""
        suspension = self._connecting
        self._up.send(partial(self._host.deliver, self._accept, self._reset))
        timer = self._process.timer(timeout, suspension.wake)
        try:
            await suspension
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
        """When the oldest command without a reply was sent."""
        return self.pending[0][0] if self.pending else None

    def alive(self) -> bool:
        """Return whether it is open: the process learns of the end by itself."""
        return self.open

    def post(self, command: Command | bytes, take: Callable[[Any], None]) -> None:
        """Send, and call `take` with the reply, or with NO_REPLY if there will be none."""
        if not self.open:
            take(NO_REPLY)
            return
        self.pending.append((self._process.clock.now(), take))
        self._up.send(partial(self._host.deliver, partial(self._serve, command), self._reset))

    async def request(self, command: Command | bytes, timeout: float) -> Any:
        """Send, and return the reply."""
        (answer,) = await request_all(self._process, [(self, command)], timeout, _never)
        if answer is NO_REPLY:
            why = f"no reply within {timeout:g} s" if self.open else "the connection broke before the reply came"
            raise OutcomeUnknown(f"{self._connector.address}: {why}")
        return answer

    def close(self) -> None:
        """Close it. Messages that were sent before may still arrive, unless a partition held them back."""
        if self._ended:
            return
        if self._network.scheduler.random.random() < 0.5:
            self._up.drop_held_back()
        self._up.send(partial(self._host.deliver, self._end_session, _nothing))
        self._end()

    def send(self, data: bytes) -> None:
        """Refuse: simulated servers read commands, not bytes."""
        raise NotImplementedError(f"{len(data)} bytes for a simulated server")

    def detach_after_fork(self) -> None:
        """Do nothing: simulated processes do not fork."""

    def _end(self) -> None:
        if self._ended:
            return
        self._ended, was_open, self.open = True, self.open, False
        while self.pending:
            self.pending.popleft()[1](NO_REPLY)
        if was_open:
            self._on_end()
        else:
            self._connecting.wake()

    def _handle_inbox(self) -> None:
        while self._inbox and self.open:
            pushed, answer = self._inbox.popleft()
            if pushed and not self._on_push(answer):
                continue
            if self.pending:
                sent, take = self.pending.popleft()
                self.last_latency = self._process.clock.now() - sent
                take(answer)

    # ------------------------------------------------------------------ the network

    def _lost(self) -> None:
        """Break the connection: each side is told, or is not."""
        self._up.broken = self._down.broken = True
        rng, scheduler = self._network.scheduler.random, self._network.scheduler
        if rng.random() < TOLD_PROBABILITY:
            scheduler.after(rng.random() * TOLD_WITHIN, partial(self._process.deliver, self._end))
        if rng.random() < TOLD_PROBABILITY:
            scheduler.after(rng.random() * TOLD_WITHIN, self._end_session)

    def _receive(self, pushed: bool, answer: Any) -> None:
        if self._process.dead:
            self._end_session()
        # In order, even after a pause: the first delivery handles all messages that have arrived so far.
        self._inbox.append((pushed, answer))
        self._process.deliver(self._handle_inbox)

    # ------------------------------------------------------------------ the server's side

    def _accept(self) -> None:
        self._host.sessions[self] = None
        self._down.send(partial(self._process.deliver, self._connected))

    def _connected(self) -> None:
        if not self._ended and not self._connecting.done:
            self.open = True
            self._connecting.wake()

    def _serve(self, command: Command | bytes) -> None:
        if self not in self._host.sessions:
            self._reset()
            return
        for answer in self._host.redis.request(command, self):
            kind = type(answer)
            parsed = answer if kind is bytes or kind is int else as_parsed(self._connector, answer)
            self._down.send(partial(self._receive, False, parsed))

    def push(self, message: list[Any]) -> None:
        """Send a published message, or the confirmation of a subscription."""
        self._down.send(partial(self._receive, True, message))

    def _reset(self) -> None:
        """Tell the client that the server does not know this connection."""
        self._down.send(partial(self._process.deliver, self._end))

    def _end_session(self) -> None:
        self._host.hang_up(self)


def as_parsed(connector: Connector, answer: Any) -> Any:
    """Return a reply as the client's parser returns it: errors have a type of their own."""
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
    """Send to all servers, then wait until the replies are enough."""
    answers: list[Any] = [NO_REPLY] * len(requests)
    suspension = Suspension(process)
    left = len(requests)

    def take(place: int, answer: Any) -> None:
        nonlocal left
        if not suspension.done:
            left -= 1
            answers[place] = answer
            if not left or enough(answers):
                suspension.wake()

    for place, (connection, command) in enumerate(requests):
        connection.post(command, partial(take, place))
    timer = process.timer(timeout, suspension.wake)
    try:
        if requests and not enough(answers):
            await suspension
    finally:
        suspension.done = True
        timer.cancel()
    return answers


def _never(_: Sequence[Any]) -> bool:
    return False


def _nothing() -> None:
    pass
