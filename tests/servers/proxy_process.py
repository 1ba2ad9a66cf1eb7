"""The proxy itself: run as a process of its own with the standard library alone, with commands on stdin.

A process and not a thread, because a test may hold the GIL or block its event loop for seconds, and the network must
not notice.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

ROOM = 1 << 18
CHUNK = 1 << 16
RESET = struct.pack("ii", 1, 0)


class Channel:
    """The faults of one direction, and its traffic."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.drop = False
        self.cut = False
        self.forwarded = 0
        self.swallowed = 0


class Flow:
    """Bytes on their way from one socket to another, each with the time before which it must not arrive."""

    def __init__(self, link: Link, way: Channel, source: socket.socket, sink: socket.socket) -> None:
        self.link, self.way, self.source, self.sink = link, way, source, sink
        self.queue: deque[tuple[float, bytes]] = deque()
        self.held = 0
        self.ended = False
        self.blocked = False

    def read(self) -> None:
        data = self.source.recv(CHUNK)
        if not data:
            self.ended = True
        if self.way.drop:
            # The end of a stream is a packet, too, and is dropped like the others.
            self.way.swallowed += len(data)
            self.link.lost = True
            return
        self.queue.append((time.monotonic() + self.way.delay, data))
        self.held += len(data)
        self.write()

    def write(self) -> None:
        self.blocked = False
        while self.queue and not self.way.cut and self.queue[0][0] <= time.monotonic():
            due, data = self.queue[0]
            if not data:
                self.queue.popleft()
                self.sink.shutdown(socket.SHUT_WR)
                self.link.open_ways -= 1
                continue
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                self.blocked = True
                return
            self.held -= sent
            self.way.forwarded += sent
            if sent == len(data):
                self.queue.popleft()
            else:
                self.queue[0] = (due, data[sent:])

    @property
    def reads(self) -> bool:
        # Do not read into a full queue: the sender gets back-pressure, as from a slow network.
        return not self.ended and self.held < ROOM


class Link:
    """A client's connection, and the proxy's connection to the server for it."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server = socket.socket()
        self.flows = (
            Flow(self, proxy.ways["to_server"], client, self.server),
            Flow(self, proxy.ways["to_client"], self.server, client),
        )
        self.open_ways = 2
        self.connecting = self.connected = self.lost = False
        for end in (client, self.server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connect(self) -> None:
        self.connecting = True
        error = self.server.connect_ex(self.proxy.target)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, "the server cannot be reached")

    def on_event(self, end: socket.socket, events: int) -> None:
        if not self.connected:
            error = self.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "the server cannot be reached")
            self.connected = True
        for flow in self.flows:
            if events & selectors.EVENT_WRITE and flow.sink is end:
                flow.write()
            if events & selectors.EVENT_READ and flow.source is end and flow.reads:
                flow.read()

    def wanted(self, end: socket.socket) -> int:
        if not self.connected:
            return selectors.EVENT_WRITE if self.connecting and end is self.server else 0
        events = 0
        for flow in self.flows:
            if flow.source is end and flow.reads:
                events |= selectors.EVENT_READ
            if flow.sink is end and flow.blocked:
                events |= selectors.EVENT_WRITE
        return events

    def close(self, *, abruptly: bool) -> None:
        for end in (self.client, self.server):
            self.proxy.watch(end, 0, self)
            if abruptly:
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                except OSError:
                    pass
            end.close()
        self.proxy.links.discard(self)


class Proxy:
    """Accepts connections, forwards bytes, and runs the commands of the test."""

    def __init__(self, target: tuple[str, int], address: tuple[str, int]) -> None:
        self.target, self.address = target, address
        self.ways = {"to_server": Channel(), "to_client": Channel()}
        self.links: set[Link] = set()
        self.accepted = 0
        self.selector = selectors.DefaultSelector()
        self.watched: dict[socket.socket, int] = {}
        self.listener: socket.socket | None = None
        self.listen()

    def watch(self, end: socket.socket, events: int, link: Link) -> None:
        before = self.watched.get(end, 0)
        if events == before:
            return
        if not events:
            self.selector.unregister(end)
            del self.watched[end]
            return
        if before:
            self.selector.modify(end, events, link)
        else:
            self.selector.register(end, events, link)
        self.watched[end] = events

    def listen(self) -> None:
        if self.listener is None:
            self.listener = socket.create_server(self.address, backlog=512)
            self.listener.setblocking(False)
            self.selector.register(self.listener, selectors.EVENT_READ, "accept")

    def refuse(self) -> None:
        if self.listener is not None:
            self.selector.unregister(self.listener)
            self.listener.close()
            self.listener = None

    @property
    def broken(self) -> bool:
        return any(way.drop or way.cut for way in self.ways.values())

    def accept(self) -> None:
        try:
            client, _ = self.listener.accept() if self.listener is not None else (None, None)
        except (BlockingIOError, ConnectionError):
            return
        if client is not None:
            self.accepted += 1
            link = Link(self, client)
            self.links.add(link)
            # While the network is broken, the connection to the server waits for heal().
            if not self.broken:
                self.guard(link, link.connect)

    def guard(self, link: Link, step: Any, *args: Any) -> None:
        """Do one step of a link; if one of its connections breaks, reset both."""
        if link not in self.links:
            return
        try:
            step(*args)
        except BlockingIOError:
            pass
        except OSError:
            link.close(abruptly=True)
            return
        if link.open_ways == 0:
            link.close(abruptly=False)
            return
        for end in (link.client, link.server):
            self.watch(end, link.wanted(end), link)

    def flush(self) -> float | None:
        """Send what is due; return the seconds until more is due."""
        next_due: float | None = None
        for link in list(self.links):
            for flow in link.flows:
                if flow.queue and not flow.way.cut and not flow.blocked and link in self.links:
                    self.guard(link, flow.write)
                    if flow.queue and not flow.blocked:
                        next_due = min(flow.queue[0][0], next_due or flow.queue[0][0])
        return None if next_due is None else max(0.0, next_due - time.monotonic())

    def heal(self) -> None:
        for way in self.ways.values():
            way.delay, way.drop, way.cut = 0.0, False, False
        for link in list(self.links):
            for flow in link.flows:
                flow.queue = deque((0.0, data) for _, data in flow.queue)
            # TCP never continues after a gap, so a connection that lost bytes must be reset.
            if link.lost:
                link.close(abruptly=True)
            elif not link.connecting:
                self.guard(link, link.connect)
        self.listen()

    def run_command(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "fault":
                for way in order["ways"]:
                    setattr(self.ways[way], order["kind"], order["value"])
            case "refuse":
                self.refuse()
            case "disconnect":
                for link in list(self.links):
                    link.close(abruptly=True)
            case "heal":
                self.heal()
        reply: dict[str, Any] = {"accepted": self.accepted, "open": len(self.links)}
        for number, (name, way) in enumerate(self.ways.items()):
            held = sum(link.flows[number].held for link in self.links)
            reply[name] = {"forwarded": way.forwarded, "swallowed": way.swallowed, "held": held}
        return reply

    def run(self, tests: int) -> None:
        self.selector.register(os.pidfd_open(tests), selectors.EVENT_READ, "tests ended")
        self.selector.register(0, selectors.EVENT_READ, "order")
        while True:
            for key, events in self.selector.select(self.flush()):
                if key.data == "accept":
                    self.accept()
                elif key.data == "order":
                    line = sys.stdin.readline()
                    if not line:
                        return
                    print(json.dumps(self.run_command(json.loads(line))), flush=True)
                elif isinstance(key.data, Link):
                    if key.fileobj in self.watched:
                        self.guard(key.data, key.data.on_event, key.fileobj, events)
                else:
                    return


def main() -> None:
    order = json.loads(sys.argv[1])
    try:
        proxy = Proxy(tuple(order["target"]), tuple(order["address"]))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"error": None}), flush=True)
    proxy.run(order["tests"])


if __name__ == "__main__":
    main()
