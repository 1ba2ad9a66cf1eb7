"""The nodes that a session watches. ZooKeeper reports one change of a node; then the watch has to be set again."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any

from kazoo.protocol.serialization import GetChildren, GetData

from fencelock.engines.zookeeper.protocol import Reply

Send = Callable[[Any, Callable[[Reply], None]], None]
Listener = Callable[[bool], None]
"""Called once: with True if the watched node is gone, with False if something else changed or the watch was lost."""


class Watches:
    """Sets watches and calls their listeners, in the thread that reads the connection: listeners must not wait.

    `send` sends a request without waiting for its reply.
    """

    def __init__(self, send: Send, session_id: Callable[[], int]) -> None:
        self._send = send
        self._session_id = session_id
        self._held: dict[str, Listener] = {}
        self._listeners: dict[str, dict[object, Listener]] = {}
        """The listeners for each path, by their keys."""
        self._mutex = RLock()  # a signal handler may release a lease in the middle of this

    def watch(self, path: str, key: object, listener: Listener, *, own: bool = False) -> None:
        """Call the listener when the node changes or is gone. `own`: it must belong to this session."""

        def done(reply: Reply) -> None:
            if reply.error is not None:
                self.fire(path, reply.no_node)
            elif own and reply.value[1].ephemeralOwner != self._session_id():
                self.fire(path, True)

        self._listen(path, key, listener)
        self._send(GetData(path, True), done)

    def watch_children(self, path: str, key: object, listener: Listener, seen: list[str]) -> None:
        """Call the listener when the node has other children than those that were seen."""

        def done(reply: Reply) -> None:
            if reply.error is not None or sorted(reply.value) != sorted(seen):
                self.fire(path, False)

        self._listen(path, key, listener)
        self._send(GetChildren(path, True), done)

    def _listen(self, path: str, key: object, listener: Listener) -> None:
        with self._mutex:
            # Replaced as a whole: a signal handler that removes the last of the others removes their table.
            self._listeners[path] = {**self._listeners.get(path, {}), key: listener}

    def unwatch(self, path: str, key: object) -> None:
        """Remove a listener. The server's watch stays until the node changes: one for each path, however many listen."""
        with self._mutex:
            listeners = self._listeners.get(path, {})
            listeners.pop(key, None)
            if not listeners:
                self._listeners.pop(path, None)

    def add_held(self, path: str, listener: Listener) -> None:
        """Call the listener when this node of the session is gone: it is watched from the next `watch_held` on."""
        self._held[path] = listener

    def remove_held(self, path: str) -> None:
        """Stop watching a held node."""
        if self._held.pop(path, None) is not None:
            self.unwatch(path, self)

    def watch_held(self) -> None:
        """Watch each held node without a watch: it is new, it was written to, or the connection is new."""
        for path, listener in list(self._held.items()):
            if self not in self._listeners.get(path, ()):
                self.watch(path, self, listener, own=True)

    def fire(self, path: str, gone: bool) -> None:
        """Call the listeners for a path: the server has reported a change."""
        with self._mutex:
            listeners = self._listeners.pop(path, {})
        for listener in list(listeners.values()):
            listener(gone)

    def fire_all(self) -> None:
        """Call all listeners: the connection is lost, and its watches with it."""
        with self._mutex:
            paths = list(self._listeners)
        for path in paths:
            self.fire(path, False)
