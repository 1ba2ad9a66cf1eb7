"""A claim that waits: the nodes notify it over connections that it keeps for itself."""

from __future__ import annotations

from dataclasses import dataclass

from fencelock.core.runtime import Event, Runtime
from fencelock.engines.redis.connection import RedisConnection
from fencelock.engines.redlock.cluster import Connections

FIRST_PAUSE, MAX_PAUSE = 0.02, 2.0
"""Seconds between the attempts of a waiter: a random part of a pause that doubles. A notification of the nodes ends it."""


@dataclass(slots=True)
class WaitingClaim:
    """A claim's connections and its place in the queue. A caller that takes it out of the engine's table uses it alone."""

    id: str
    connections: Connections
    event: Event
    """Set at each notification, and at the end of each connection."""
    ticket: int = 0
    """Its place in the queue, the same on all nodes: its first proposal; 0 before that."""
    attempts: int = 0

    def subscribe(self) -> None:
        """Set the event when a node notifies the claim."""
        for connection in self._present():
            connection.push_events[self.id] = self.event

    def forget_notifications(self) -> None:
        """Forget the notifications of earlier attempts."""
        for connection in self._present():
            connection.notifications.pop(self.id, None)

    def unsubscribe(self) -> None:
        """Let others use the connections."""
        self.forget_notifications()
        for connection in self._present():
            connection.push_events.pop(self.id, None)

    async def wait(self, runtime: Runtime, majority: int, timeout: float) -> None:
        """Wait until a majority of the nodes has notified the claim, or for a random, growing pause."""
        self.attempts += 1
        pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(self.attempts, 10)) * runtime.random()
        until = runtime.now() + min(timeout, pause)
        while (left := until - runtime.now()) > 0:
            self.event.clear()
            connections = self._present()
            notified = [conn for conn in connections if self.id in conn.notifications or not conn.raw.open]
            if len(notified) >= majority:
                break
            await runtime.wait_for_push([conn.raw for conn in connections if conn.raw.open], self.event, left)

    def _present(self) -> list[RedisConnection]:
        return [connection for connection in self.connections if connection is not None]
