"""Wait on several connections of the blocking runtime at once, in the caller's own thread."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any

from fencelock.core.clock import boottime
from fencelock.core.runtime import NO_REPLY, Command, Event
from fencelock.runtime.socket_connection import SocketConnection


def request_all(
    requests: Sequence[tuple[SocketConnection, Command | bytes]],
    timeout: float,
    enough: Callable[[Sequence[Any]], bool],
) -> list[Any]:
    """Send to all, then read from all."""
    replies: list[Any] = [NO_REPLY] * len(requests)
    until = boottime() + timeout
    poll = select.poll()
    connections: dict[int, SocketConnection] = {}
    try:
        for place, (connection, command) in enumerate(requests):
            connection.retain()
            if connection.post(command, replies, place):
                descriptor = connection.fileno()
                connections[descriptor] = connection
                poll.register(descriptor, select.POLLIN)
        reads_ahead = any(connection.tls for connection in connections.values())
        while connections and not enough(replies):
            ready = (
                [descriptor for descriptor, connection in connections.items() if connection.has_buffered()]
                if reads_ahead
                else []
            )
            if not ready:
                # Poll once more after the timeout: if the process was stopped meanwhile, the replies are there.
                left = until - boottime()
                ready = [descriptor for descriptor, _ in poll.poll(max(0.0, left) * 1000)]
                if not ready and left <= 0:
                    break
            for descriptor in ready:
                connection = connections[descriptor]
                connection.read_once()
                if not connection.pending or not connection.open:
                    poll.unregister(descriptor)
                    del connections[descriptor]
    finally:
        for connection, _ in requests:
            connection.end_retain()
    for connection, _ in requests:
        connection.check_forked()
    return replies


def wait_for_push(
    connections: Sequence[SocketConnection], event: Event, timeout: float, wakeup_fd: int | None = None
) -> bool:
    """Read all connections until a push sets the event; end early if `wakeup_fd` becomes readable."""
    until = boottime() + timeout
    if len(connections) == 1 and wakeup_fd is None:
        (connection,) = connections
        connection.read_until(event.is_set, until)
        connection.check_forked()
        return event.is_set()
    while not event.is_set():
        left = until - boottime()
        if left <= 0:
            break
        ready = [connection for connection in connections if not connection.open or connection.has_buffered()]
        if not ready:
            poll = (
                select.poll()
            )  # a new one each time: a connection may be closed, and its number reused, at any moment
            for descriptor in (
                *(connection.fileno() for connection in connections),
                -1 if wakeup_fd is None else wakeup_fd,
            ):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            received = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            if wakeup_fd in received:
                break
            ready = [connection for connection in connections if connection.fileno() in received]
        for connection in ready:
            if connection.open:
                connection.read_once()
        if not all(connection.open for connection in connections):
            break
    for connection in connections:
        connection.check_forked()
    return event.is_set()
