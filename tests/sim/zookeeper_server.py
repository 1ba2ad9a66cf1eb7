"""A small simulated ZooKeeper: nodes, transactions, sessions and watches, in ZooKeeper's own frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.protocol import serialization as codec

from fencelock.core.runtime import NoReply
from fencelock.engines.zookeeper.protocol import FrameParser

START = 1 << 32
"""The first zxid: the epoch of the leader is in the upper 32 bits."""
CREATE, DELETE, EXISTS, GET, SET, CHILDREN, SYNC = 1, 2, 3, 4, 5, 8, 9
MULTI, CREATE2, CONTAINER, CLOSE = 14, 15, 19, -11
EPHEMERAL, SEQUENTIAL = 1, 2
WRITES = (CREATE, DELETE, SET, MULTI, CREATE2, CONTAINER, CLOSE)
EVENT_DELETED, EVENT_CHANGED, EVENT_CHILDREN = 2, 3, 4
NOT_EXECUTED = -2


class Refused(Exception):
    """The server refuses a request, with ZooKeeper's error code."""


class Node(NamedTuple):
    """A node; `numbered` counts the children that it ever had."""

    data: bytes
    czxid: int
    mzxid: int
    version: int = 0
    owner: int = 0
    numbered: int = 0


class Reader:
    """Reads the fields of a request."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def _next(self, value: Any, at: int) -> Any:
        self.at = at
        return value

    def text(self) -> str:
        return self._next(*codec.read_string(self.data, self.at))  # type: ignore[no-any-return]

    def buffer(self) -> bytes:
        return self._next(*codec.read_buffer(self.data, self.at)) or b""

    def number(self) -> int:
        return self._next(codec.int_struct.unpack_from(self.data, self.at)[0], self.at + 4)  # type: ignore[no-any-return]

    def flag(self) -> bool:
        return bool(self._next(self.data[self.at], self.at + 1))

    def skip_acl(self) -> None:
        for _ in range(self.number()):
            self._next(*codec.read_acl(self.data, self.at))

    def step(self) -> int | None:
        """Return the type of a transaction's next step, or None after the last one."""
        kind, done, _ = codec.multiheader_struct.unpack_from(self.data, self.at)
        return self._next(None if done else kind, self.at + codec.multiheader_struct.size)  # type: ignore[no-any-return]


class SimulatedZooKeeper:
    """One server. A restart is a change of the leader: the zxid continues in the next epoch."""

    def __init__(self, wall: Callable[[], int], run_id: str) -> None:
        self._wall = wall
        self.bases: list[int] = []
        self._nodes = {"/": Node(b"", 0, 0)}
        self._zxid = START - (1 << 32)
        self._last_session = 0
        self._sessions: dict[int, tuple[int, int]] = {}
        """The timeout in ms and the end in µs of each session."""
        self.start(run_id)

    @property
    def transactions(self) -> int:
        """How far zxids have advanced."""
        return self._zxid - START

    def start(self, _: str) -> None:
        """Start or restart: the new leader gives every session its whole timeout again."""
        self._zxid = ((self._zxid >> 32) + 1) << 32
        self._connections: dict[Any, int] = {}
        """The session of each connection that has sent its handshake; 0 if the session has moved, or has expired."""
        self._watchers: dict[tuple[str, bool], set[Any]] = {}
        """The connections to notify, by path, and whether of its children."""
        for id in self._sessions:
            self._touch(id)

    def forget(self, connection: Any) -> None:
        """Drop a connection that has ended; its session lives on."""
        self._connections.pop(connection, None)
        for watchers in self._watchers.values():
            watchers.discard(connection)

    def request(self, data: Any, connection: Any) -> list[bytes]:
        """Carry out the frames of a message, and push their replies."""
        for id in [id for id, (_, end) in self._sessions.items() if end <= self._wall()]:
            self._end_session(id)
        parser = FrameParser()
        parser.feed(data)
        while not isinstance(message := parser.gets(), NoReply):
            if connection not in self._connections:
                self._shake_hands(message, connection)
            elif not self._connections[connection]:
                connection.hang_up()
            else:
                self._serve(message, connection)
        return [b""]

    # ------------------------------------------------------------------ sessions

    def _shake_hands(self, message: bytes, connection: Any) -> None:
        _, _, timeout, id = codec.int_long_int_long_struct.unpack_from(message)
        if not id:
            self._last_session += 1
            id = self._last_session
            self._sessions[id] = timeout, 0
        for other in [other for other, moved in self._connections.items() if moved == id]:
            self._connections[other] = 0
        known = id in self._sessions
        self._connections[connection] = id if known else 0
        if known:
            self._touch(id)
        reply = codec.int_int_long_struct.pack(0, self._sessions[id][0] if known else 0, id if known else 0)
        connection.push(reply + codec.write_buffer(b"\0" * 16) + b"\0")

    def _touch(self, id: int) -> None:
        timeout, _ = self._sessions[id]
        self._sessions[id] = timeout, self._wall() + timeout * 1000

    def _end_session(self, id: int) -> None:
        del self._sessions[id]
        for connection in [connection for connection, other in self._connections.items() if other == id]:
            self._connections[connection] = 0
            connection.hang_up()
        self._zxid += 1
        for path in [path for path, node in self._nodes.items() if node.owner == id]:
            self._delete(path, -1)
            self._fire([(path, EVENT_DELETED)])

    # ------------------------------------------------------------------ requests

    def _serve(self, message: bytes, connection: Any) -> None:
        xid, kind = codec.int_int_struct.unpack_from(message)
        session = self._connections[connection]
        self._touch(session)
        if kind in WRITES:
            self._zxid += 1
        events: list[tuple[str, int]] = []
        error, body = 0, b""
        try:
            body = self._carry_out(kind, Reader(message, codec.int_int_struct.size), session, connection, events)
        except Refused as refused:
            error = refused.args[0]
        self._fire(events)
        connection.push(codec.reply_header_struct.pack(xid, self._zxid, error) + body)
        bases = [int(path.rpartition("/")[2]) for path in self._nodes if path.rpartition("/")[0].endswith("/layout")]
        if bases and max(bases) not in self.bases[-1:]:
            self.bases.append(max(bases))

    def _carry_out(
        self, kind: int, reader: Reader, session: int, connection: Any, events: list[tuple[str, int]]
    ) -> bytes:
        if kind == MULTI:
            return self._multi(reader, session, events)
        if kind in WRITES and kind != CLOSE:
            return self._write(kind, reader, session, events)
        if kind == CLOSE:
            self._end_session(session)
            return b""
        path = reader.text()
        if kind == SYNC:
            return codec.write_string(path)  # type: ignore[no-any-return]
        if reader.flag():
            self._watchers.setdefault((path, kind == CHILDREN), set()).add(connection)
        node = self._node(path)
        if kind == CHILDREN:
            children = self._children(path)
            return bytes(codec.int_struct.pack(len(children)) + b"".join(map(codec.write_string, children)))
        return bytes(codec.write_buffer(node.data) if kind == GET else b"") + self._stat(node)

    def _multi(self, reader: Reader, session: int, events: list[tuple[str, int]]) -> bytes:
        before = dict(self._nodes)
        replies, kinds = [], []
        happened: list[tuple[str, int]] = []
        try:
            while (kind := reader.step()) is not None:
                kinds.append(kind)
                body = self._write(kind, reader, session, happened)
                replies.append(codec.multiheader_struct.pack(kind, False, 0) + body)
            events += happened
        except Refused as refused:
            self._nodes = before
            codes = [0] * (len(kinds) - 1) + [refused.args[0], NOT_EXECUTED]
            replies = [codec.multiheader_struct.pack(-1, False, code) + codec.int_struct.pack(code) for code in codes]
        return bytes(b"".join(replies) + codec.multiheader_struct.pack(-1, True, -1))

    def _write(self, kind: int, reader: Reader, session: int, events: list[tuple[str, int]]) -> bytes:
        path = reader.text()
        if kind == DELETE:
            self._delete(path, reader.number())
            events.append((path, EVENT_DELETED))
            return b""
        data = reader.buffer()
        if kind == SET:
            node = self._checked(path, reader.number())
            self._nodes[path] = node._replace(data=data, version=node.version + 1, mzxid=self._zxid)
            events.append((path, EVENT_CHANGED))
            return self._stat(self._nodes[path])
        reader.skip_acl()
        path = self._create(path, data, reader.number(), session)
        events.append((_parent(path), EVENT_CHILDREN))
        return codec.write_string(path) + (b"" if kind == CREATE else self._stat(self._nodes[path]))  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ nodes

    def _node(self, path: str) -> Node:
        if path not in self._nodes:
            raise Refused(NoNodeError.code)
        return self._nodes[path]

    def _checked(self, path: str, version: int) -> Node:
        node = self._node(path)
        if version not in (-1, node.version):
            raise Refused(BadVersionError.code)
        return node

    def _children(self, path: str) -> list[str]:
        return [other.rpartition("/")[2] for other in self._nodes if other != "/" and _parent(other) == path]

    def _create(self, path: str, data: bytes, flags: int, session: int) -> str:
        parent = self._node(_parent(path))
        if flags in (SEQUENTIAL, SEQUENTIAL | EPHEMERAL):
            path += f"{parent.numbered:010d}"
        if path in self._nodes:
            raise Refused(NodeExistsError.code)
        owner = session if flags in (EPHEMERAL, SEQUENTIAL | EPHEMERAL) else 0
        self._nodes[_parent(path)] = parent._replace(numbered=parent.numbered + 1)
        self._nodes[path] = Node(data, self._zxid, self._zxid, owner=owner)
        return path

    def _delete(self, path: str, version: int) -> None:
        self._checked(path, version)
        if self._children(path):
            raise Refused(NotEmptyError.code)
        del self._nodes[path]

    def _stat(self, node: Node) -> bytes:
        return codec.stat_struct.pack(node.czxid, node.mzxid, 0, 0, node.version, 0, 0, node.owner, 0, 0, 0)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ watches

    def _fire(self, events: list[tuple[str, int]]) -> None:
        """Notify the watchers of nodes that have changed; each watch fires once."""
        for path, kind in events:
            if kind != EVENT_CHILDREN:
                self._notify(path, kind, children=False)
            if kind == EVENT_DELETED:
                self._notify(path, kind, children=True)
                self._notify(_parent(path), EVENT_CHILDREN, children=True)
            if kind == EVENT_CHILDREN:
                self._notify(path, kind, children=True)

    def _notify(self, path: str, kind: int, *, children: bool) -> None:
        message = (
            codec.reply_header_struct.pack(-1, -1, 0) + codec.int_int_struct.pack(kind, 3) + codec.write_string(path)
        )
        watchers = self._watchers.pop((path, children), set())
        for connection in [connection for connection in self._connections if connection in watchers]:
            connection.push(message)


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"
