"""One connection to a Redis server, and the notifications that the server pushes over it."""

from __future__ import annotations

from typing import Any

from fencelock.core.runtime import Connection, Event

MAX_EARLY_NOTIFICATIONS = 1000
"""Notifications kept for claims whose attempt has no reply yet."""


class RedisConnection:
    """A connection, the channel it is subscribed to, and the push events of the claims that wait on it."""

    __slots__ = ("channel", "last_used", "notifications", "push_events", "raw")

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.push_events: dict[str, Event] = {}
        """By the id of the claim."""
        self.notifications: dict[str, str] = {}
        """`token:attempt_no` by the id of the claim. One may arrive before the reply that makes its claim wait is read."""
        self.last_used = 0.0
        self.raw: Connection
        """The runtime's connection, which does the I/O."""

    def on_push(self, push: Any) -> bool:
        """Store a notification, `id:token:attempt_no`. Return True if the push is the reply to SUBSCRIBE.

        Ignore every other push, whatever its form: servers push more than we subscribe to (maintenance notifications).
        """
        if push[:1] == [b"subscribe"]:
            return True
        if push[:1] != [b"message"] or len(push) != 3 or type(push[2]) is not bytes:
            return False
        id, _, notification = push[2].decode(errors="replace").partition(":")
        if (event := self.push_events.get(id)) is not None:
            event.set()
        elif len(self.notifications) >= MAX_EARLY_NOTIFICATIONS:
            self.notifications.clear()
        self.notifications[id] = notification
        return False

    def on_end(self) -> None:
        """Wake all waiters when the connection ends, so that they attempt again over another one."""
        for event in list(self.push_events.values()):
            event.set()
