"""A claim that waits for a Redlock, and the notifications of the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fencelock.core.runtime import Event
    from fencelock.engines.redis.connection import RedisConnection


class NodeNotification:
    """Set when one node notifies the claim that the lock is free there."""

    __slots__ = ("_queued", "received")

    def __init__(self, queued: QueuedClaim) -> None:
        self._queued = queued
        self.received = False

    def set(self) -> None:
        """Count the node once."""
        if not self.received:
            self.received = True
            self._queued.notified()


class QueuedClaim:
    """A queued claim, and the connections over which the nodes notify it.

    A caller that takes it out of the engine's table uses it and its connections alone.
    """

    __slots__ = ("_majority", "attempts", "connections", "event", "notifications", "ticket")

    def __init__(self, connections: list[RedisConnection | None], event: Event, majority: int, ticket: int) -> None:
        self.connections = connections
        self.event = event
        """Set when a majority has notified the claim."""
        self.notifications = [NodeNotification(self) for _ in connections]
        self.ticket = ticket
        """Its place in the queue, the same on all nodes."""
        self.attempts = 0
        self._majority = majority

    def notified(self) -> None:
        """Set the event once a majority has notified the claim."""
        if sum(notification.received for notification in self.notifications) >= self._majority:
            self.event.set()

    def clear(self) -> None:
        """Forget all notifications."""
        for notification in self.notifications:
            notification.received = False
        self.event.clear()
