"""Simulated connections: messages in order, late or lost, broken connections, and the server's side."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from fencelock.core.runtime import NO_REPLY, Connection
from fencelock.engines.redis.connector import ServerError
from fencelock.errors import EngineUnavailable, OutcomeUnknown
from fencelock.sim.host import SimulatedHost
from fencelock.sim.network import Network, NetworkFaults
from fencelock.sim.process import Process
from fencelock.sim.redis_engine import connector
from fencelock.sim.runtime import SimRuntime
from fencelock.sim.scheduler import Scheduler


class Lab:
    """One process and two servers."""

    def __init__(self, faults: NetworkFaults, seed: int = 0) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, faults)
        self.hosts = [SimulatedHost(self.network, label) for label in ("a", "b")]
        self.process = Process(self.scheduler, "p1")
        self.runtime = SimRuntime(self.process, self.network)
        self.pushed: list[Any] = []
        self.ended = 0

    async def connection(self, label: str = "a") -> Connection:
        return await self.runtime.connect(connector(label), self._on_push, self._end)

    def _on_push(self, push: Any) -> bool:
        if push[0] == b"subscribe":
            return True  # an answer
        self.pushed.append(push)
        return False

    def _end(self) -> None:
        self.ended += 1

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]], seconds: float = 60.0) -> Any:
        """Run a coroutine to its end; return its result or raise its error."""
        task = self.process.spawn(work(), "work", lambda _: None)
        self.scheduler.run(self.scheduler.time + seconds, lambda: task.done)
        assert task.done
        if task.error is not None:
            raise task.error
        return task.result

    def stored(self, key: str) -> Any:
        """Return a list on the first server."""
        return self.hosts[0].redis.request(("LRANGE", key, 0, -1))[0]


def test_replies_and_errors_are_as_the_real_parser_returns_them() -> None:
    """Bulk strings are bytes, nil is None, and an error is a reply of the driver's own type."""
    lab = Lab(NetworkFaults())

    async def work() -> list[Any]:
        connection = await lab.connection()
        asked = (("SET", "k", "v"), ("GET", "k"), ("GET", "n"), ("INCR", "k"))
        return [await connection.request(command, 1) for command in asked]

    *answers, error = lab.run(work)
    assert answers == [b"OK", b"v", None]
    assert type(error) is ServerError
    assert error.kind == "ERR"


@pytest.mark.parametrize("seed", range(10))
def test_in_order_and_once(seed: int) -> None:
    """Whatever the delays, messages of one connection arrive in order, and never twice."""
    lab = Lab(NetworkFaults(delay=0.01, slow=0.3, slowest=1.0, doubled=0.5), seed)

    async def work() -> list[Any]:
        connection = await lab.connection()
        asked = [(connection, ("RPUSH", "l", number)) for number in range(20)]
        return await lab.runtime.request_all(asked, 30, lambda answers: NO_REPLY not in answers)

    assert lab.run(work) == list(range(1, 21))
    assert lab.stored("l") == [b"%d" % number for number in range(20)]


def test_a_paused_process_reads_in_order() -> None:
    """Replies and pushes that arrived while a process was paused are read in the order of arrival."""
    lab = Lab(NetworkFaults())

    async def work() -> list[Any]:
        connection = await lab.connection()
        await connection.request(("SUBSCRIBE", "c"), 1)
        commands = [("PUBLISH", "c", number) for number in range(5)]
        lab.process.pause(1.0)
        return await lab.runtime.request_all(
            [(connection, command) for command in commands], 5, lambda answers: NO_REPLY not in answers
        )

    assert lab.run(work) == [1] * 5
    assert lab.pushed == [[b"message", b"c", b"%d" % number] for number in range(5)]


def test_a_request_may_arrive_after_the_close_and_after_a_newer_one() -> None:
    """Closing a connection does not withdraw its requests: they may arrive after those of a newer connection."""

    lab = Lab(NetworkFaults())

    async def work() -> None:
        old = await lab.connection()
        lab.network.faults = NetworkFaults(slow=1.0, slowest=9.0)
        with pytest.raises(OutcomeUnknown):
            await old.request(("RPUSH", "l", "old"), 0.05)
        lab.network.faults = NetworkFaults()
        old.close()
        new = await lab.connection()
        await new.request(("RPUSH", "l", "new"), 1)
        await lab.runtime.sleep(10)

    lab.run(work)
    assert lab.stored("l") == [b"new", b"old"]
    assert len(lab.hosts[0].sessions) == 1


def test_a_late_reply_is_dropped() -> None:
    """A reply that arrives after its caller timed out is not taken for the next reply."""
    lab = Lab(NetworkFaults())

    async def work() -> Any:
        connection = await lab.connection()
        lab.hosts[0].pause(1.0)
        with pytest.raises(OutcomeUnknown):
            await connection.request(("SET", "k", "1"), 0.2)
        assert connection.oldest_pending_since is not None
        answer = await connection.request(("GET", "k"), 5)
        assert connection.oldest_pending_since is None
        return answer

    assert lab.run(work) == b"1"


def test_a_partition_holds_back_and_a_restart_breaks() -> None:
    """A message that is sent during a partition arrives after it; a restart ends all connections and keeps the data."""
    lab = Lab(NetworkFaults())

    async def work() -> None:
        connection = await lab.connection()
        lab.network.partition("p1", "a", 1.0)
        with pytest.raises(OutcomeUnknown):
            await connection.request(("RPUSH", "l", "held"), 0.5)
        assert lab.stored("l") == []
        await lab.runtime.sleep(2)
        assert lab.stored("l") == [b"held"]
        lab.hosts[0].crash(0.5)
        with pytest.raises(EngineUnavailable):
            await lab.connection()
        await lab.runtime.sleep(1)
        with pytest.raises(OutcomeUnknown):
            await connection.request(("RPUSH", "l", "lost"), 1)
        assert not connection.open
        assert lab.ended == 1
        await lab.connection()

    lab.run(work)
    assert lab.stored("l") == [b"held"]


def test_connecting_to_a_server_that_cannot_be_reached() -> None:
    """A connect times out, and no connection is made after that."""
    lab = Lab(NetworkFaults(reply_timeout=0.25))
    lab.network.partition("a", "p1", 5.0)

    with pytest.raises(EngineUnavailable):
        lab.run(lab.connection)
    assert 0.9 < lab.scheduler.time < 1.2
    lab.scheduler.run(20)
    assert lab.ended == 0
    assert lab.hosts[0].sessions == {}


def test_a_lost_message_breaks_the_connection() -> None:
    """Nothing arrives on a connection that lost a message, and the client learns of it, if only by a timeout."""
    lab = Lab(NetworkFaults())

    async def work() -> None:
        connection = await lab.connection()
        lab.network.faults = NetworkFaults(lost=1.0)
        with pytest.raises(OutcomeUnknown):
            await connection.request(("RPUSH", "l", "1"), 0.2)
        lab.network.faults = NetworkFaults()
        with pytest.raises(OutcomeUnknown):
            await connection.request(("RPUSH", "l", "2"), 0.2)

    lab.run(work)
    assert lab.stored("l") == []


def test_request_all_ends_with_enough_replies() -> None:
    """It ends as soon as the replies are enough, and never waits for a closed connection."""
    lab = Lab(NetworkFaults())

    async def work() -> list[Any]:
        one, two = await lab.connection("a"), await lab.connection("b")
        lab.hosts[1].pause(10)
        first = await lab.runtime.request_all(
            [(one, ("PING",)), (two, ("PING",))], 5, lambda answers: b"PONG" in answers
        )
        two.close()
        second = await lab.runtime.request_all(
            [(one, ("PING",)), (two, ("PING",))], 5, lambda answers: NO_REPLY not in answers
        )
        at_once = await lab.runtime.request_all([(one, ("SET", "k", "1"))], 5, lambda _: True)
        return [first, second, at_once, await one.request(("GET", "k"), 1)]

    assert lab.run(work) == [[b"PONG", NO_REPLY], [b"PONG", NO_REPLY], [NO_REPLY], b"1"]
    assert lab.scheduler.time < 1
